"""Facts about a score that choose a form of the softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..score.diagonal import affine
from ..score.expr import KV, SCORE, Const, Expr, Load, Op, Program, Q, const, name, names_in, op, walk
from ..score.fill import fill_of
from ..score.simplify import make, simplify
from .spec import KernelSpec

LOG2E = 1.4426950408889634

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


@dataclass(frozen=True)
class Separated:
    """A score that is score * c + f(kv_idx - q0) + g(q_idx - q0), where q0 is the first query of a tile.

    `score2`  the part that varies within a row, times log2(e): one multiply-add, with one f for each key
    `row`     g: the softmax does not see it, LSE does
    """

    score2: Expr
    row: Expr


@lru_cache(maxsize=512)
def separated(spec: KernelSpec) -> Separated | None:
    """Scores with terms like ALiBi's `c0[h] * float(kv_idx - q_idx)`, for 16-bit operands; None for all others.

    Apart, the two indices cost next to nothing for each score; their floats are exact, and counted from the tile's first query
    small where the weights are not. The rounding of a product is that of the largest distance in the tile: a 16-bit
    weight does not show it.
    """
    program = spec.parsed
    if spec.dtype == "float32" or any(fill_of(program, blocks) is not None for blocks in (False, True)):
        return None
    scale = 0.0
    column: Expr = const(0.0)
    row: Expr = const(0.0)
    for sign, term in _terms(program.score):
        if SCORE in walk(term):
            factor = linear_scale(term) if sign > 0 and scale == 0.0 else None
            if factor is None:
                return None
            scale = factor
        elif _is_scalar(term):
            row = make("add", row, _times(sign, term))
        else:
            split = _difference(term)
            if split is None:
                return None
            factor_of, step, rest = split
            factor2 = _times(sign * LOG2E, factor_of)
            column = make("add", column, factor2 * _float(step * (KV - Q0) + rest))
            row = make("add", row, _times(sign, factor_of) * _float(step * (Q0 - Q)))
    if scale == 0.0 or column is const(0.0):
        return None
    return Separated(SCORE * (scale * LOG2E) + column, row)


Q0 = name("q0")


def _terms(e: Expr, sign: float = 1.0) -> Iterator[tuple[float, Expr]]:
    """The signed terms of a sum."""
    if isinstance(e, Op) and e.head in ("add", "sub"):
        yield from _terms(e.args[0], sign)
        yield from _terms(e.args[1], sign if e.head == "add" else -sign)
    else:
        yield sign, e


def _difference(e: Expr) -> tuple[Expr, int, Expr] | None:
    """(f, k, rest) where the term is f * float(k * (kv_idx - q_idx) + rest) and f is a number of a batch and head."""
    if not isinstance(e, Op):
        return None
    if e.head == "float":
        steps = affine(e.args[0])
        return (const(1.0), steps[1], steps[2]) if steps is not None and steps[0] == -steps[1] != 0 else None
    if e.head == "neg":
        inner = _difference(e.args[0])
        return None if inner is None else (_times(-1.0, inner[0]), *inner[1:])
    if e.head == "mul":
        for factor, other in (e.args, e.args[::-1]):
            if _is_scalar(factor) and (inner := _difference(other)) is not None:
                return (factor if inner[0] is const(1.0) else factor * inner[0], *inner[1:])
    return None


def _is_scalar(e: Expr) -> bool:
    """Whether it is one ordinary number for a batch and head."""
    numbers = [n.head for n in walk(e) if isinstance(n, Const)]
    return not names_in(e) & {"q_idx", "kv_idx", "score"} and all(abs(n) <= _SAFE_MAGNITUDE for n in numbers)


def _times(factor: float, e: Expr) -> Expr:
    return make("mul", e, const(factor))


def _float(e: Expr) -> Expr:
    return op("float", simplify(e))


def needs_residual(spec: KernelSpec) -> bool:
    """Whether exp(s - lse) may miss the softmax by the rounding of a large lse, see Note [Large scores] in `delta`.

    In float32 that shows as soon as a score passes 100, which any input may bring about; 16-bit gradients only feel
    scores that are not tame.
    """
    score = spec.parsed.score
    tame = linear_scale(score) is not None or is_tame(score) or separated(spec) is not None
    return spec.dtype == "float32" or not tame


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
