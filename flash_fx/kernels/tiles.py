"""Tile sizes: a table by kernel, dtype and head dim, made to fit the shared memory at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .facts import matrices_of
from .spec import KernelSpec

HOPPER_SHARED = 227 * 1024
HOPPER_MULTIPROCESSORS = 132
_SMALL_CHANGE = 2048  # bytes: rows, barriers
UNKNOWN = 1 << 30  # a length, under dynamic shapes
_OVERRIDE: list[tuple[Tile, tuple[str, ...]]] = []


@dataclass(frozen=True)
class Tile:
    """One program's BLOCK_M queries by BLOCK_N keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@contextmanager
def override(tile: Tile, *kinds: str) -> Iterator[None]:
    """Every kernel launched inside, or every one of these kinds, uses this tile; the others that of the table."""
    _OVERRIDE.append((tile, kinds))
    try:
        yield
    finally:
        _OVERRIDE.pop()


def padded(d: int) -> int:
    """The smallest power of two that tl.dot takes and that holds the head dim."""
    return max(16, 1 << (d - 1).bit_length())


# kind -> rows of (greatest padded head dim, tile); 16-bit operands. Registers per thread, Hopper:
# forward ~ 1.5 * BM * BN / T + BM * D / T + 60, dkdv ~ 2 * BM * BN / T + 2 * BN * D / T + 50, with T = 32 * warps.
# Rows up to 128 wide are the fastest of a sweep on an H200 (Triton 3.6, 16k tokens, S = 4096, full and causal).
_HALF = {
    "forward": [(64, Tile(64, 64, 4, 3)), (128, Tile(128, 128, 8, 3)), (256, Tile(64, 64, 4, 2)), (512, Tile(64, 32, 8, 2))],
    "decode": [(128, Tile(16, 64, 4, 3)), (256, Tile(16, 32, 4, 3)), (512, Tile(16, 32, 4, 2))],
    "backward_dkdv": [(64, Tile(64, 64, 4, 3)), (128, Tile(64, 128, 8, 3)), (256, Tile(64, 64, 8, 1)), (512, Tile(32, 32, 8, 1))],
    "backward_dq": [(64, Tile(128, 64, 8, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 64, 8, 1)), (512, Tile(32, 32, 8, 1))],
    "backward_dq_matrix": [(128, Tile(128, 64, 8, 3)), (256, Tile(128, 32, 8, 2))],
    "backward_capture": [
        (64, Tile(64, 64, 4, 3)), (128, Tile(64, 64, 4, 1)), (256, Tile(64, 64, 8, 1)), (512, Tile(32, 32, 8, 1)),
    ],
    "delta": [(64, Tile(64, 64, 4, 2)), (128, Tile(64, 64, 4, 2)), (256, Tile(64, 32, 4, 1)), (512, Tile(32, 32, 4, 1))],
}  # fmt: skip
# 16-bit sequences that are over after a few tiles, by the greatest length: head dims up to 128, measured in the same way.
_SHORT = {
    "forward": [(16, Tile(16, 16, 1, 1)), (32, Tile(32, 16, 1, 2)), (64, Tile(64, 32, 4, 2)), (256, Tile(64, 32, 4, 3))],
    "backward_dkdv": [
        (16, Tile(16, 16, 1, 1)), (32, Tile(32, 16, 1, 2)), (64, Tile(32, 64, 4, 1)), (256, Tile(32, 64, 4, 3)),
    ],
    "backward_dq": [
        (16, Tile(16, 16, 1, 1)), (32, Tile(32, 16, 1, 2)), (64, Tile(64, 32, 4, 2)), (256, Tile(64, 32, 4, 3)),
    ],
    "delta": [(16, Tile(16, 16, 1, 1)), (32, Tile(32, 16, 1, 1))],
}  # fmt: skip
_SHORT_AND_WIDE = {"backward_dq": Tile(128, 32, 8, 3)}  # from 65 on, head dims above 64
# float32 with "ieee" dots runs on the ordinary units: everything must stay in registers. Up to 128 wide these and the next
# are the fastest of a sweep on an H200 (Triton 3.6, S = 2048, nothing captured).
_FULL = {
    "forward": [(128, Tile(64, 32, 8, 2)), (256, Tile(16, 32, 8, 1))],
    "decode": [(128, Tile(16, 32, 4, 2)), (256, Tile(16, 32, 8, 1))],
    "backward_dkdv": [(64, Tile(32, 64, 8, 1)), (128, Tile(64, 32, 8, 1)), (256, Tile(16, 16, 8, 1))],
    "backward_dq": [(128, Tile(64, 32, 8, 1)), (256, Tile(16, 16, 8, 1))],
    "backward_dq_matrix": [(256, Tile(64, 32, 8, 1))],
    "backward_capture": [(128, Tile(64, 32, 8, 1)), (256, Tile(16, 16, 8, 1))],
    "delta": [(128, Tile(64, 32, 8, 2)), (256, Tile(16, 16, 8, 1))],
}
# float32 with tensor-core dots of reduced precision
_TF32 = {
    "forward": [(128, Tile(128, 64, 8, 2)), (256, Tile(32, 32, 4, 1))],
    "decode": [(128, Tile(16, 64, 4, 2)), (256, Tile(16, 32, 4, 2))],
    "backward_dkdv": [(64, Tile(64, 128, 8, 1)), (128, Tile(64, 32, 4, 2)), (256, Tile(32, 32, 8, 1))],
    "backward_dq": [(128, Tile(128, 64, 8, 1)), (256, Tile(32, 32, 8, 1))],
    "backward_dq_matrix": [(128, Tile(64, 64, 8, 1)), (256, Tile(64, 32, 8, 1))],
    "backward_capture": [(64, Tile(64, 64, 8, 1)), (128, Tile(32, 32, 4, 1)), (256, Tile(32, 32, 8, 1))],
    "delta": [(128, Tile(128, 64, 8, 2)), (256, Tile(32, 32, 4, 1))],
}
# float32 as three products of TF32, whose operands lie in shared memory twice
_TF32X3 = {
    "forward": [(64, Tile(128, 64, 8, 2)), (128, Tile(128, 64, 8, 1)), (256, Tile(32, 32, 4, 1))],
    "decode": [(128, Tile(16, 64, 4, 2)), (256, Tile(16, 32, 4, 1))],
    "backward_dkdv": [(64, Tile(64, 64, 4, 1)), (256, Tile(32, 32, 4, 1))],
    "backward_dq": [(64, Tile(128, 64, 8, 1)), (256, Tile(32, 32, 4, 1))],
    "backward_dq_matrix": [(64, Tile(64, 64, 4, 1)), (256, Tile(32, 32, 4, 1))],
    "backward_capture": [(64, Tile(64, 64, 4, 1)), (128, Tile(128, 64, 8, 1)), (256, Tile(32, 32, 8, 1))],
    "delta": [(64, Tile(128, 64, 8, 2)), (128, Tile(64, 64, 8, 1)), (256, Tile(32, 32, 4, 1))],
}
_FLOAT32 = {"ieee": _FULL, "tf32": _TF32, "tf32x3": _TF32X3}


def tile_for(
    kind: str, spec: KernelSpec, shared_limit: int = HOPPER_SHARED, longest: int = UNKNOWN, batches: int = 1
) -> Tile:
    """The tile of a kernel on a device with `shared_limit` bytes of shared memory per program.

    `longest` of M and N; a program of `batches` of them holds what one does of as many times the head dim.
    """
    if _OVERRIDE and (not _OVERRIDE[-1][1] or kind in _OVERRIDE[-1][1]):
        return _OVERRIDE[-1][0]
    if spec.interpret:
        return Tile(32, 32, 4, 1)
    width = padded(max(spec.d, spec.dv)) * batches
    tile = _short(kind, spec, width, longest) or next(t for greatest, t in rows_of(kind, spec) if width <= greatest)
    if longest <= 64 < tile.block_m:
        tile = replace(tile, block_m=64, num_warps=4)
    return fit(kind, spec, tile, shared_limit, batches)


def is_overridden() -> bool:
    return bool(_OVERRIDE)


def rows_of(kind: str, spec: KernelSpec) -> list[tuple[int, Tile]]:
    """The table's rows for a kernel: (greatest padded head dim, tile)."""
    return (_HALF if spec.precision is None else _FLOAT32[spec.precision])[kind]


def _short(kind: str, spec: KernelSpec, width: int, longest: int) -> Tile | None:
    if spec.dtype == "float32" or width > 128 or matrices_of(spec.parsed):
        return None
    even = longest % 64 == 0 and width <= 64 and spec.parsed.keep is None
    if kind == "forward" and longest > 64 and even:
        return None  # tiles of 64 keys are neither ragged nor masked
    if 64 < longest <= 256 and width > 64 and kind in _SHORT_AND_WIDE:
        return _SHORT_AND_WIDE[kind]
    return next((t for greatest, t in _SHORT.get(kind, []) if longest <= greatest), None)


def fit(kind: str, spec: KernelSpec, tile: Tile, shared_limit: int, batches: int = 1) -> Tile:
    """Fewer stages, then smaller blocks, until the estimate fits."""
    while shared_bytes(kind, spec, tile, batches) > shared_limit:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_n > 16:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > 16:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            break
    return tile


def shared_bytes(kind: str, spec: KernelSpec, tile: Tile, batches: int = 1) -> int:
    """Estimate: what stays for the whole loop, and what each stage of the loop loads."""
    size = 4 if spec.dtype == "float32" else 2
    both = (padded(spec.d) + padded(spec.dv)) * batches
    score = tile.block_m * tile.block_n
    loads = sum(2 if spec.captures[i].dtype.endswith("16") else 4 for i in matrices_of(spec.parsed)) * score
    if kind == "backward_dkdv":
        stay, step = tile.block_n * both, tile.block_m * both
    else:
        stay, step = tile.block_m * (padded(spec.d) if kind == "forward" else both), tile.block_n * both
    if spec.precision == "tf32x3":  # what stays is held as the two parts of which the products are made
        return size * (2 * stay + tile.num_stages * step) + tile.num_stages * loads + _SMALL_CHANGE
    scores = score if size == 4 else 0  # 16-bit p and ds feed the next dot from registers
    return size * (stay + tile.num_stages * step + scores) + tile.num_stages * loads
