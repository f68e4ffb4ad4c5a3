"""Facts about a score that choose a form of the softmax."""

from __future__ import annotations

import math
from functools import lru_cache

from ..score.expr import SCORE, Const, Expr, Load, Op, Program, names_in, walk
from .spec import KernelSpec

_SAFE_MAGNITUDE = 1e4  # lse + log(n) must keep the logarithm in float32
_SAFE_OPS = frozenset(
    {"add", "sub", "mul", "neg", "where", "minimum", "maximum", "tanh", "sigmoid", "erf", "sin", "cos", "abs",
     "floor", "ceil", "round", "trunc", "float", "int", "bool", "floordiv", "mod",
     "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "isnan"}
)  # fmt: skip


def linear_scale(score: Expr) -> float | None:
    """c where the score is exactly `score * c` with a finite c > 0, else None.

    Then the maximum of the raw dot products is the maximum of the scores, and the scale costs nothing: one
    multiply-add `qk * (c * log2(e)) - m` feeds exp2.
    """
    scale = _factor(score)
    return scale if scale is not None and 1e-30 < scale < 1e30 else None


def _factor(e: Expr) -> float | None:
    if e is SCORE:
        return 1.0
    if not isinstance(e, Op):
        return None
    if e.head == "float":
        return _factor(e.args[0])
    if e.head in ("mul", "div"):
        left, right = e.args
        if isinstance(left, Const) and e.head == "mul":
            left, right = right, left
        inner = _factor(left)
        if inner is None or not isinstance(right, Const) or right.head == 0 or not math.isfinite(right.head):
            return None
        return inner * right.head if e.head == "mul" else inner / right.head
    return None


def is_tame(score: Expr) -> bool:
    """No value of the score can be so large that `score * log2(e)` overflows, or that adding a logarithm to it is lost.

    False for anything read from a capture (a mask may hold -3.4e38) and for large constants, where rows filled with
    one huge finite number must still give a uniform softmax.
    """
    for node in walk(score):
        if isinstance(node, Load):
            return False
        if isinstance(node, Const) and (math.isnan(node.head) or _SAFE_MAGNITUDE < abs(node.head) < math.inf):
            return False
        if isinstance(node, Op) and node.head == "div" and not isinstance(node.args[1], Const):
            return False
        if isinstance(node, Op) and node.head not in _SAFE_OPS and node.head != "div":
            return False
    return True


def needs_residual(spec: KernelSpec) -> bool:
    """Whether exp(s - lse) may miss the softmax by the rounding of a large lse, see Note [Large scores] in `delta`.

    In float32 that shows as soon as a score passes 100, which any input may bring about; 16-bit gradients only feel
    scores that are not tame.
    """
    score = spec.parsed.score
    return spec.dtype == "float32" or not (linear_scale(score) is not None or is_tame(score))


def _matrix_loads(program: Program) -> list[Load]:
    return [n for n in program.loads() if {"q_idx", "kv_idx"} <= names_in(n)]


@lru_cache(maxsize=512)
def matrices_of(program: Program) -> frozenset[int]:
    """Captures of which a loop loads whole tiles."""
    return frozenset(n.head for n in _matrix_loads(program))


@lru_cache(maxsize=512)
def batches_share_tiles(program: Program) -> bool:
    """Whether a matrix that all batches read, such as a bias [H, M, N], is captured.

    Then the batches of a head should run at the same time, so that only the first one reads it from memory.
    """
    return any("b" not in names_in(n) for n in _matrix_loads(program))
