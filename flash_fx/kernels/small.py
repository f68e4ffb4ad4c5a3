"""The backward of sequences that fit in one tile, as one kernel: when, and what it sums. See templates/backward_small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..score.expr import Program
from .plan import Gradient, gradients_of
from .spec import KernelSpec
from .tiles import Tile, padded

SMALL = 64  # queries, keys and channels: three tiles of scores and six of operands are in use at the same time
MOST_SUMS = 2  # tiles of sums that stay in registers beside them
DTYPES = ("float16", "bfloat16")  # in float32 so many tiles do not stay in registers
SUMMING = 1024  # programs that share sums over batches: a few for each multiprocessor


def is_small(spec: KernelSpec, m: Any, n: Any, group: Any) -> bool:
    """Whether all scores of a head are one tile, and no heads share a key head. Lengths may be symbols."""
    fits = all(isinstance(length, int) and 0 < length <= SMALL for length in (m, n))
    alone = isinstance(group, int) and group == 1 and spec.parsed.sink is None  # a sink's gradient needs rows
    return fits and alone and spec.dtype in DTYPES and max(spec.d, spec.dv) <= SMALL


def sums_of(program: Program, captures: Iterable[int]) -> tuple[Gradient, ...] | None:
    """The gradients of these captures, None if one is not a sum of tiles over batches."""
    found = [g for c in captures for g in gradients_of(program, c)]
    summed = all(g.mode == "tile" and not g.grouped and "b" not in g.axes for g in found)
    return tuple(found) if summed and len(found) <= MOST_SUMS else None


def chunks_of_batches(b: Any, h: Any, sums: bool) -> Any:
    """Into how many programs the batches of a head go: each its own, or as many as fill the device."""
    if not sums:
        return b
    wanted = -(-SUMMING // h) if isinstance(h, int) else SUMMING // 16
    return min(b, wanted) if isinstance(b, int) else wanted


def tile_of(m: int, n: int, sums: bool) -> Tile:
    """Warps by the size of the tile; the next batch is loaded early where a program takes several."""
    rows, columns = padded(m), padded(n)
    warps = max(1, rows * columns // (512 if sums else 1024))
    return Tile(rows, columns, warps, 2 if sums else 1)
