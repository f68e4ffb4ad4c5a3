"""`mode="max-autotune"`: the fastest tile of those that fit, remembered on disk, one choice for all ranks.

A choice is made once for a kernel, a chip and lengths (powers of two where they are known at run time only), with random
operands of the call's shapes and strides. Whatever fails, from shared memory to a compiler's assertion, is no choice.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .. import compat
from ..version import __version__
from .render import cache_folder
from .spec import KernelSpec
from .tiles import Tile, fit, padded, rows_of, shared_bytes

# BLOCK_M, BLOCK_N, warps: 16-bit kernels want 16 rows of the result a warp, for wgmma 64 a group of four (studies, note 0.7)
_BLOCKS = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8))
_STAGES = (2, 3, 4)
_DECODE = ((16, 32, 4), (16, 64, 4), (16, 128, 4), (16, 64, 8))
_ACCUMULATED = 160  # float32 numbers of the result that each thread holds; more surely spill
Timer = Callable[[Tile], float]


def candidates(kind: str, spec: KernelSpec, default: Tile, shared_limit: int, batches: int = 1) -> list[Tile]:
    """Tiles worth trying, the default first: all that the table has for this dtype, and combinations that fit."""
    width = padded(max(spec.d, spec.dv)) * batches

    def runs(tile: Tile) -> bool:
        return shared_bytes(kind, spec, tile, batches) <= shared_limit and _accumulated(kind, tile, width) <= _ACCUMULATED

    listed = [fit(kind, spec, t, shared_limit, batches) for greatest, t in rows_of(kind, spec) if width <= 2 * greatest]
    blocks = () if spec.dtype == "float32" else _DECODE if kind == "decode" else _BLOCKS
    made = [Tile(*block, stages) for block, stages in product(blocks, _STAGES)]
    return list(dict.fromkeys([default, *listed, *filter(runs, made)]))


def _accumulated(kind: str, tile: Tile, width: int) -> int:
    rows = 2 * tile.block_n if kind == "backward_dkdv" else tile.block_m
    return rows * width // (32 * tile.num_warps)


def choose(kind: str, spec: KernelSpec, lengths: Sequence[Any], tiles: Sequence[Tile], timer: Timer) -> Tile:
    """The remembered tile, or the one for which `timer` gives the least; the first of them all where none runs.

    `timer` may raise whatever it likes.
    """
    path, key = _file(), _key(kind, spec, lengths)
    found = _recall(path).get(key)
    if found is None:
        with FileLock(f"{path}.lock"):  # other ranks of this machine wait here, and then find the answer
            found = _recall(path).get(key)
            if found is None:
                found = _agreed(key, list(astuple(_fastest(tiles, timer))))
                _write(path, {**_recall(path), key: found})
    return Tile(*found)


def _fastest(tiles: Sequence[Tile], timer: Timer) -> Tile:
    times = {tile: _time(timer, tile) for tile in tiles}
    return min(times, key=lambda tile: times[tile])  # the first of equal ones


def _time(timer: Timer, tile: Tile) -> float:
    try:
        found = timer(tile)
    except Exception:
        return math.inf
    return found if found == found else math.inf


def _agreed(key: str, found: list[int]) -> list[int]:
    """What the first rank found. No collective: a rank that does not compile this kernel is not waited for."""
    store = compat.default_store()
    if store is None:
        return found
    return json.loads(store.compare_set(f"flash_fx/{__version__}/{key}", "", json.dumps(found)))


# *** on disk ***


def _file() -> Path:
    return cache_folder() / f"tiles_{_chip()}.json"


@cache
def _chip() -> str:
    """The GPU and the compiler, as part of a file's name."""
    import triton

    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return "".join(c if c.isalnum() else "-" for c in f"{chip}_triton_{triton.__version__}_{__version__}")


def _key(kind: str, spec: KernelSpec, lengths: Sequence[Any]) -> str:
    known = [str(n) if isinstance(n, int) else f"~{1 << (compat.sym_hint(n) - 1).bit_length()}" for n in lengths]
    return f"{kind} {spec.key()} {'x'.join(known)}"


def _recall(path: Path) -> dict[str, list[int]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut short
        return {}


def _write(path: Path, choices: dict[str, list[int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as f:
        json.dump(choices, f, indent=0, sort_keys=True)
    os.replace(temporary, path)


# *** operands to time with ***


def stand_ins(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Real tensors of the same shapes, strides and dtypes: random numbers, true, and 0, which is a position everywhere."""
    for t in tensors:
        shape, strides = ([compat.sym_hint(n) for n in of] for of in (t.shape, t.stride()))
        length = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
        base = torch.zeros(length, dtype=t.dtype, device=t.device)
        if t.dtype.is_floating_point:
            base.normal_()
        elif t.dtype is torch.bool:
            base.fill_(True)
        yield base.as_strided(shape, strides)
