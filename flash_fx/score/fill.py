"""Finite fills: scores that a condition replaces by, or adds, a huge negative number that is not -inf.

    fill_of(parse("score = where(kv_idx <= q_idx, score * 0.125, -1e9)"))
    # Fill(condition=kv_idx <= q_idx, inside=score * 0.125, outside=-1e9, top=-1e9)

Unlike -inf such a score has a weight: in a row where all others lie as low, or lower. Elsewhere the weight is exactly 0
in float32. So a kernel may leave filled keys out and then look: if the maximum (or LSE) of each row exceeds `top` by
MARGIN, nothing was left out; otherwise it walks the filled keys too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .expr import BOOL_RESULT, KV, KV_LEN, Q_LEN, SCORE, Const, Expr, Load, Name, Op, Program, Q, const, load, walk
from .region import kv_region
from .simplify import make

FILL_LIMIT = -9900.0  # a finite fill at or below is meant as "masked"; -1e4 is -9984 in bfloat16
MARGIN = 104.0  # exp(-104) is below half of the least float32
MARGIN64 = 746.0  # the same for float64


@dataclass(frozen=True)
class Fill:
    """The score is `inside` where `condition` holds and `outside` elsewhere, where it is at most `top`.

    `top` is a constant, or an expression over the extremes of what the score reads: c0 is a bound of |score|, the next
    two the minimum and the maximum of capture 0, and so on (`extremes` in evaluate.py).
    """

    condition: Expr
    inside: Expr
    outside: Expr
    top: Expr

    def inner(self, program: Program) -> Program:
        """The program of the positions that are not filled."""
        keep = self.condition if program.keep is None else make("and", program.keep, self.condition)
        return replace(program, score=self.inside, keep=keep)


@lru_cache(maxsize=512)
def fill_of(program: Program, mapped: bool = False) -> Fill | None:
    """The first fill whose condition lets tiles be skipped; None where there is none, or nothing bounds it from above.

    Where none has bounds, a block map (`mapped`) still tells which blocks the first of them covers.
    """
    fills = [
        Fill(condition, inside, outside, top[1])
        for condition, inside, outside in _fills(program.score)
        if (top := _bounds(outside)) is not None and SCORE in walk(inside)
    ]
    bounded = (f for f in fills if kv_region(Program(keep=f.condition)).is_bounded)
    return next(bounded, fills[0] if fills and mapped else None)


def _fills(e: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
    """Each fill that e adds or is: the condition to stay unfilled, e where it holds, e where it does not."""
    if not isinstance(e, Op):
        return
    if e.head == "where":
        condition, then, other = e.args
        if _is_fill(other):
            yield condition, then, other
            yield from (
                (c, make("where", condition, x, other), make("where", condition, y, other)) for c, x, y in _fills(then)
            )
        elif _is_fill(then):
            yield make("not", condition), other, then
            yield from (
                (c, make("where", condition, then, x), make("where", condition, then, y)) for c, x, y in _fills(other)
            )
    elif e.head in ("add", "sub", "mul", "div", "float"):
        for position, a in enumerate(e.args):
            for condition, *sides in _fills(a):
                inside, outside = ((*e.args[:position], x, *e.args[position + 1 :]) for x in sides)
                yield condition, _without_zero(e.head, inside), make(e.head, *outside)


def _without_zero(operation: str, args: tuple[Expr, ...]) -> Expr:
    """x + 0.0 as x: the sign of a zero score does not matter."""
    if operation == "add" and any(_is_zero(a) for a in args):
        return args[0] if _is_zero(args[1]) else args[1]
    return make(operation, *args)


def _is_fill(node: Expr) -> bool:
    value = node.head if isinstance(node, Const) else math.nan
    return isinstance(value, (int, float)) and math.isfinite(value) and value <= FILL_LIMIT


def _is_zero(node: Expr) -> bool:
    return isinstance(node, Const) and node.head == 0


# *** bounds of values ***

# Rounding is monotone, so a bound computed in float32 by the same operations bounds what a kernel computes.

_Bounds = tuple[Expr, Expr]
_SCORE_BOUND = load(0)
_RISING = frozenset(
    {"tanh", "sigmoid", "erf", "exp", "exp2", "floor", "ceil", "round", "trunc", "float", "int", "bool"}
)


def _bounds(root: Expr) -> _Bounds | None:
    """Least and greatest value, or beyond. None for what has no rule."""
    found: dict[Expr, _Bounds] = {}
    for node in walk(root):
        inner = [found.get(a) for a in node.args]
        bounds = _leaf(node) if not isinstance(node, Op) else _operation(node.head, inner)  # type: ignore[arg-type]
        if bounds is not None:
            found[node] = bounds
    return found.get(root)


def _leaf(node: Expr) -> _Bounds | None:
    if isinstance(node, Const):
        return node, node
    if isinstance(node, Load):
        return load(2 * node.head + 1), load(2 * node.head + 2)
    if node is SCORE:
        return make("neg", _SCORE_BOUND), _SCORE_BOUND
    if node in (Q, KV):
        return const(0), (Q_LEN if node is Q else KV_LEN) - 1
    return (node, node) if isinstance(node, Name) and node.head not in ("b", "h") else None


def _operation(operation: str, args: list[_Bounds | None]) -> _Bounds | None:
    if operation in BOOL_RESULT:
        return const(0), const(1)
    if operation == "where":
        args = args[1:]
    if any(a is None for a in args):
        return None
    known: list[_Bounds] = args  # type: ignore[assignment]
    if operation == "where":
        return _hull([*known[0], *known[1]])
    (a, b), (c, d) = known[0], known[-1]
    if operation in ("add", "minimum", "maximum"):
        return make(operation, a, c), make(operation, b, d)
    if operation == "sub":
        return make("sub", a, d), make("sub", b, c)
    if operation == "neg":
        return make("neg", b), make("neg", a)
    if operation == "abs":
        return const(0), make("maximum", make("neg", a), b)
    if operation == "mul" and isinstance(a, Const) and a is b:
        (a, b), (c, d) = (c, d), (a, b)
    if isinstance(c, Const) and c is d and (operation == "mul" or (operation == "div" and c.head != 0)):
        ends = make(operation, a, c), make(operation, b, c)
        return ends if c.head >= 0 else ends[::-1]
    if operation == "mul":
        return _hull([make("mul", x, y) for x in (a, b) for y in (c, d)])
    if operation in ("sin", "cos"):
        return const(-1.0), const(1.0)
    return (make(operation, a), make(operation, b)) if operation in _RISING else None


def _hull(ends: list[Expr]) -> _Bounds:
    low = high = ends[0]
    for e in ends[1:]:
        if e is not low and e is not high:
            low, high = _least("minimum", low, e), _least("maximum", high, e)
    return low, high


def _least(operation: str, a: Expr, b: Expr) -> Expr:
    """minimum and maximum, folded for constants of any kind."""
    if isinstance(a, Const) and isinstance(b, Const):
        return const(min(a.head, b.head) if operation == "minimum" else max(a.head, b.head))
    return make(operation, a, b)
