"""The gradient of a matrix beside dQ, in one kernel: which matrix. See templates/backward_dq_matrix.

Apart, dQ, dK and dV, and the matrix take nine products of tiles; with the scores recomputed once for dQ and the matrix it
is seven. A program holds dQ of every batch that shares the matrix, so these must be few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..score.expr import Program, names_in
from ..score.fill import fill_of
from .plan import Gradient, gradients_of
from .spec import KernelSpec
from .tiles import padded, shared_bytes, tile_for

KIND = "backward_dq_matrix"
MOST = 256  # channels of dQ that a program holds for each row, of all its batches
MOST_OF_PARTS = 64  # the same where what it holds lies in shared memory twice
ROWS = 64  # of a program, at least
FEWEST = 128  # programs; with less a GPU is not busy


def matrix_beside_dq(
    spec: KernelSpec, captures: Iterable[int], b: Any, h: Any, m: Any, shared_limit: int
) -> tuple[Gradient, int] | None:
    """The first gradient of these captures that the kernel of dQ can sum, and how many batches share it."""
    program = spec.parsed
    if fill_of(program) is not None:
        return None
    for gradient in (g for c in captures for g in gradients_of(program, c)):
        batches = _batches(gradient, program, b, h)
        if batches is not None and _fits(spec, batches, shared_limit) and (spec.interpret or _is_busy(b, h, m, batches)):
            return gradient, batches
    return None


def _fits(spec: KernelSpec, batches: int, shared_limit: int) -> bool:
    if batches * padded(max(spec.d, spec.dv)) > (MOST_OF_PARTS if spec.precision == "tf32x3" else MOST):
        return False
    tile = tile_for(KIND, spec, shared_limit, batches=batches)
    return shared_bytes(KIND, spec, tile, batches) <= shared_limit


def _is_busy(b: Any, h: Any, m: Any, batches: int) -> bool:
    known = all(isinstance(n, int) for n in (b, h, m))
    return not known or b // batches * h * -(-m // ROWS) >= FEWEST


def _batches(gradient: Gradient, program: Program, b: Any, h: Any) -> int | None:
    """How many batches an element is the sum of; None where it is no sum over all batches of one head."""
    if gradient.mode != "tile" or gradient.grouped or ("h" not in gradient.axes and h != 1):
        return None
    if "b" in gradient.axes:
        return 1
    kept_alike = program.keep is None or "b" not in names_in(program.keep)  # all batches walk over the same tiles
    return b if isinstance(b, int) and (b == 1 or kept_alike) else None
