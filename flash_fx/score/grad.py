"""Symbolic derivatives of expressions, with torch's conventions where a function has a kink.

    derivative(op("tanh", SCORE * 0.5), SCORE)    # (1.0 - tanh(score * 0.5) * tanh(score * 0.5)) * 0.5

Ties of minimum and maximum give half to each side, abs has slope 0 at 0, rounding and comparisons have slope 0. An
index is an integer, so nothing flows through the index of a load. A branch that `where` does not take adds nothing,
not even the NaN that torch's 0 * inf would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from .expr import ARITY, Expr, Load, Op, Program, const, op, walk
from .simplify import make, simplify

_ZERO, _ONE = const(0.0), const(1.0)


@lru_cache(maxsize=1024)
def derivative(expr: Expr, wrt: Expr) -> Expr:
    """d expr / d wrt, a float expression; `wrt` is SCORE or a Load node, compared by identity."""
    slopes: dict[int, Expr] = {}
    for node in walk(expr):
        if node is wrt:
            slopes[id(node)] = _ONE
        elif isinstance(node, Op):
            slopes[id(node)] = _slope(node, [slopes[id(a)] for a in node.args])
        else:
            slopes[id(node)] = _ZERO
    return simplify(slopes[id(expr)])


def loads_of(program: Program, capture: int) -> tuple[Load, ...]:
    """The distinct places where the program reads the capture, in the order of evaluation."""
    return tuple(n for n in program.loads() if n.head == capture)


def _slope(node: Op, slopes: list[Expr]) -> Expr:
    if node.head == "where":
        then, other = slopes[1:]
        return then if then is other else op("where", node.args[0], then, other)
    if all(s is _ZERO for s in slopes):
        return _ZERO
    if node.head in _TIED:
        return _tied(node, *slopes)
    rule = _PARTIALS[node.head]
    return _sum([_product(p, s) for p, s in zip(rule(node), slopes, strict=True) if s is not _ZERO])


def _sum(terms: list[Expr]) -> Expr:
    kept = [t for t in terms if t is not _ZERO]
    total = kept[0] if kept else _ZERO
    for t in kept[1:]:
        total = op("add", total, t)
    return total


def _product(partial: Expr, slope: Expr) -> Expr:
    """Keeps 0 and 1 out, which `simplify` could not remove: 0.0 * NaN is NaN."""
    if partial is _ZERO or slope is _ZERO:
        return _ZERO
    return make("mul", partial, slope)


def _tied(node: Op, da: Expr, db: Expr) -> Expr:
    """minimum and maximum: all to the winner, half each when equal, all to both when one is NaN (as torch)."""
    a, b = node.args
    a_loses, b_loses = ("lt", "gt") if node.head == "maximum" else ("gt", "lt")
    half = const(0.5)
    if db is _ZERO:
        return op("where", op(a_loses, a, b), _ZERO, op("where", op("eq", a, b), _product(half, da), da))
    if da is _ZERO:
        return op("where", op(b_loses, a, b), _ZERO, op("where", op("eq", a, b), _product(half, db), db))
    both = _sum([_product(half, da), _product(half, db)])
    return op("where", op(a_loses, a, b), db, op("where", op(b_loses, a, b), da, both))


def _pow(node: Op) -> list[Expr]:
    a, b = node.args
    base = op("where", op("eq", b, 0), _ZERO, b * op("pow", a, b - 1))
    if make("eq", b, const(0)) is const(False):  # a constant exponent other than 0
        base = b * make("pow", a, make("sub", b, const(1)))
    flat = op("eq", a, 0) & op("ge", b, 0)  # torch: slope 0 where log(0) would make 0 * -inf
    return [base, op("where", flat, _ZERO, node * op("log", a))]


def _quotient(node: Op) -> list[Expr]:
    a, b = node.args
    return [op("div", 1.0, b), -((a / b) / b)]


# op -> the partial derivative by each argument, as expressions of the arguments and the result y
_PARTIALS: dict[str, Callable[[Op], list[Expr]]] = {
    "add": lambda y: [_ONE, _ONE],
    "sub": lambda y: [_ONE, const(-1.0)],
    "mul": lambda y: [y.args[1], y.args[0]],
    "div": _quotient,
    "mod": lambda y: [_ONE, -op("floor", y.args[0] / y.args[1])],
    "pow": _pow,
    "neg": lambda y: [const(-1.0)],
    "exp": lambda y: [y],
    "exp2": lambda y: [y * math.log(2.0)],
    "expm1": lambda y: [y + 1.0],
    "log": lambda y: [op("div", 1.0, y.args[0])],
    "log2": lambda y: [op("div", 1.0, y.args[0] * math.log(2.0))],
    "log1p": lambda y: [op("div", 1.0, y.args[0] + 1.0)],
    "sqrt": lambda y: [op("div", 0.5, y)],
    "rsqrt": lambda y: [-0.5 * (y * y * y)],
    "tanh": lambda y: [1.0 - y * y],
    "sigmoid": lambda y: [y * (1.0 - y)],
    "erf": lambda y: [2.0 / math.sqrt(math.pi) * op("exp", -(y.args[0] * y.args[0]))],
    "sin": lambda y: [op("cos", y.args[0])],
    "cos": lambda y: [-op("sin", y.args[0])],
    "abs": lambda y: [op("sign", y.args[0])],
    "float": lambda y: [_ONE],
}
_TIED = frozenset({"minimum", "maximum"})
_FLAT = frozenset(ARITY) - _PARTIALS.keys() - _TIED - {"where"}  # comparisons, logic, rounding, casts to int and bool
_PARTIALS |= {operation: lambda y: [_ZERO] * len(y.args) for operation in _FLAT}
