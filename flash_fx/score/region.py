"""Which keys a tile of queries can attend to, and which queries a tile of keys, read off `keep` alone.

    kv_region(parse("keep = kv_idx <= q_idx"))    # Region(lo=None, full_lo=None, full_hi=q0 + 1, hi=q1 + 1)

A tile is the rows q0 to q1 (keys k0 to k1), the last one included. Interval arithmetic over comparisons of integers
that are linear in `kv_idx` and `q_idx`, floor division and minimum/maximum included; the logic around them may be any.
What needs data (a load, `b`, `h`) or is periodic (`%` of the searched index) is unknown: it may hold everywhere and
surely holds nowhere. Always sound; tight for causal, window, prefix and length masks and their combinations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .expr import (
    COMPARISONS,
    FALSE,
    KV,
    KV_LEN,
    Q_LEN,
    SCORE,
    TRUE,
    B,
    Const,
    Expr,
    H,
    Load,
    Name,
    Op,
    Program,
    Q,
    const,
    name,
    walk,
)  # fmt: skip
from .simplify import FOLD, known_kind, make

Q0, Q1, K0, K1 = name("q0"), name("q1"), name("k0"), name("k1")


@dataclass(frozen=True)
class Region:
    """Bounds over q0, q1 (or k0, k1), q_len, kv_len and sizes; None is unbounded. Not clipped to the length.

    Positions outside [lo, hi) are dropped for the whole tile, those in [full_lo, full_hi) are kept for the whole tile.
    A range whose end is not above its start is empty.
    """

    lo: Expr | None = None
    full_lo: Expr | None = None
    full_hi: Expr | None = None
    hi: Expr | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether any position can be skipped."""
        return self.lo is not None or self.hi is not None


@lru_cache(maxsize=512)
def kv_region(program: Program) -> Region:
    """The keys of the query tile q0..q1."""
    return Region() if program.keep is None else _solve_kv().region(program.keep)


@lru_cache(maxsize=512)
def q_region(program: Program) -> Region:
    """The queries of the key tile k0..k1."""
    return Region() if program.keep is None else _solve_q().region(program.keep)


def bound_value(bound: Expr, values: Mapping[str, Any]) -> Any:
    """The bound as a number, a run-time one where a value is.

    `values` has every name in it: q0, q1 or k0, k1, q_len, kv_len, s0, ...
    """
    done: dict[Expr, Any] = {}
    for node in walk(bound):
        if isinstance(node, Const):
            done[node] = node.head
        elif isinstance(node, Name):
            done[node] = values[node.head]
        elif node.head == "where":
            condition, then, other = (done[a] for a in node.args)
            done[node] = then if condition else other
        else:
            done[node] = FOLD[node.head](*(done[a] for a in node.args))
    return done[bound]


# *** intervals of positions ***


@dataclass(frozen=True)
class _Span:
    """[lo, hi) with None for unbounded."""

    lo: Expr | None = None
    hi: Expr | None = None


_FAR = 1 << 30  # stands for "unbounded" on one side of a run-time choice; fits int32
_ALL, _NOTHING = _Span(), _Span(const(0), const(0))


@dataclass(frozen=True)
class _Set:
    """`may` holds every position that some row of the tile keeps, `sure` only positions that all rows keep."""

    may: _Span
    sure: _Span


_EVERYTHING, _UNKNOWN = _Set(_ALL, _ALL), _Set(_ALL, _NOTHING)


def _pick(operation: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """minimum or maximum where None adds nothing."""
    if a is None or b is None:
        return b if a is None else a
    return make(operation, a, b)


def _meet(a: _Span, b: _Span) -> _Span:
    if _NOTHING in (a, b):
        return _NOTHING
    return _Span(_pick("maximum", a.lo, b.lo), _pick("minimum", a.hi, b.hi))


def _hull(a: _Span, b: _Span) -> _Span:
    """The smallest interval around both."""
    if _NOTHING in (a, b):
        return b if a == _NOTHING else a
    lo = None if a.lo is None or b.lo is None else make("minimum", a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else make("maximum", a.hi, b.hi)
    return _Span(lo, hi)


def _inner_join(a: _Span, b: _Span) -> _Span:
    """An interval inside the union: the hull if the two touch, else the first that is not empty.

    If one is empty and yet "touches", the hull is the other one, so that needs no test of its own.
    """
    if a in (_NOTHING, b) or b == _NOTHING:
        return b if a == _NOTHING else a
    hull = _hull(a, b)
    touch = make("and", _at_most(a.lo, b.hi), _at_most(b.lo, a.hi))
    if touch is TRUE:
        return hull
    filled = TRUE if a.lo is None or a.hi is None else make("lt", a.lo, a.hi)
    return _Span(
        _choose(touch, hull.lo, _choose(filled, a.lo, b.lo, -_FAR), -_FAR),
        _choose(touch, hull.hi, _choose(filled, a.hi, b.hi, _FAR), _FAR),
    )


def _choose(condition: Expr, then: Expr | None, other: Expr | None, unbounded: int) -> Expr | None:
    if then is other:
        return then
    ends = (const(unbounded) if e is None else e for e in (then, other))
    return make("where", condition, *ends)


def _at_most(a: Expr | None, b: Expr | None) -> Expr:
    return TRUE if a is None or b is None else make("le", a, b)


# *** solving for one index ***


@dataclass(frozen=True)
class _Linear:
    """constant + sum of factor * atom."""

    atoms: tuple[tuple[Expr, int], ...]
    constant: int = 0


def _linear(node: Expr) -> _Linear:
    total: dict[Expr, int] = {}
    constant = _collect(node, 1, total)
    return _Linear(tuple((a, f) for a, f in total.items() if f), constant)


def _tidy(node: Expr) -> Expr:
    """The same integer as one sum: `q1 - s0 + 1`."""
    linear = _linear(node)
    total: Expr | None = None
    for atom, factor in sorted(linear.atoms, key=lambda pair: pair[1] < 0):
        term = atom if abs(factor) == 1 else atom * abs(factor)
        if total is None:
            total = term if factor > 0 else -term
        else:
            total = total + term if factor > 0 else total - term
    if total is None:
        return const(linear.constant)
    if linear.constant == 0:
        return total
    return total + linear.constant if linear.constant > 0 else total - -linear.constant


def _collect(node: Expr, factor: int, total: dict[Expr, int]) -> int:
    """Adds factor * node to `total`, returns the constant part."""
    if isinstance(node, Const):
        return factor * int(node.head)
    if isinstance(node, Op):
        a, b = node.args[0], node.args[-1]
        if node.head == "add":
            return _collect(a, factor, total) + _collect(b, factor, total)
        if node.head == "sub":
            return _collect(a, factor, total) + _collect(b, -factor, total)
        if node.head == "neg":
            return _collect(a, -factor, total)
        if node.head == "int" and known_kind(a) == "int":
            return _collect(a, factor, total)
        if node.head == "mul" and isinstance(b, Const):
            return _collect(a, factor * int(b.head), total)
        if node.head == "mul" and isinstance(a, Const):
            return _collect(b, factor * int(a.head), total)
    total[node] = total.get(node, 0) + factor
    return 0


_Interval = tuple[Expr, Expr]  # least and greatest value over the tile, both attained or beyond


class _Solver:
    """Solves conditions for `index`, while `other` runs over the tile first..last."""

    def __init__(self, index: Expr, length: Expr, other: Expr, first: Expr, last: Expr) -> None:
        self.index, self.length, self.other, self.ends = index, length, other, (first, last)
        self.sets: dict[tuple[Expr, bool], _Set] = {}

    def region(self, condition: Expr, holds: bool = True) -> Region:
        found = self.solve(condition, holds)
        return Region(found.may.lo, found.sure.lo, found.sure.hi, found.may.hi)

    def solve(self, node: Expr, holds: bool) -> _Set:
        """Where the bool expression is `holds`."""
        key = (node, holds)
        if key not in self.sets:
            self.sets[key] = self._solve(node, holds)
        return self.sets[key]

    def _solve(self, node: Expr, holds: bool) -> _Set:
        if node in (TRUE, FALSE):
            return _EVERYTHING if (node is TRUE) == holds else _Set(_NOTHING, _NOTHING)
        if not isinstance(node, Op):
            return _UNKNOWN
        if node.head == "not":
            return self.solve(node.args[0], not holds)
        if node.head in ("and", "or"):
            a, b = (self.solve(x, holds) for x in node.args)
            return self._both(a, b) if (node.head == "and") == holds else self._either(a, b)
        if node.head == "where":
            condition, then, other = node.args
            return self._where(condition, self.solve(then, holds), self.solve(other, holds))
        if node.head in COMPARISONS and all(known_kind(a) == "int" for a in node.args):
            return self._compare(node.head, *node.args, holds=holds)
        return _UNKNOWN

    def _where(self, condition: Expr, then: _Set, other: _Set) -> _Set:
        yes, no = self.solve(condition, True), self.solve(condition, False)
        # c | (~c & x) is c | x, which is tighter when a tile is cut by c
        if then == _EVERYTHING:
            return self._either(yes, other)
        if other == _EVERYTHING:
            return self._either(no, then)
        return self._either(self._both(yes, then), self._both(no, other))

    def _both(self, a: _Set, b: _Set) -> _Set:
        return _Set(_meet(a.may, b.may), _meet(a.sure, b.sure))

    def _either(self, a: _Set, b: _Set) -> _Set:
        return _Set(_hull(a.may, b.may), _inner_join(a.sure, b.sure))

    def _compare(self, operation: str, a: Expr, b: Expr, *, holds: bool) -> _Set:
        if not holds:
            operation = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}[operation]
        below, above = a - b, b - a  # everything becomes "expression <= constant"
        zero, minus_one = const(0), const(-1)
        if operation == "eq":
            return self._both(self._at_most(below, zero), self._at_most(above, zero))
        if operation == "ne":
            return self._either(self._at_most(below, minus_one), self._at_most(above, minus_one))
        limit = zero if operation in ("le", "ge") else minus_one
        return self._at_most(below if operation in ("lt", "le") else above, limit)

    def _at_most(self, node: Expr, limit: Expr) -> _Set:
        """Where node <= limit."""
        return self._solve_linear(_linear(node), (limit, limit))

    def _solve_linear(self, linear: _Linear, limit: _Interval) -> _Set:
        """Where linear <= limit, for a limit that depends on the row within the interval."""
        searched = [(a, f) for a, f in linear.atoms if self.index in walk(a)]
        rest = self._interval(_Linear(tuple(p for p in linear.atoms if p not in searched), linear.constant))
        if rest is None or len(searched) > 1:
            return _UNKNOWN
        limit = (_tidy(limit[0] - rest[1]), _tidy(limit[1] - rest[0]))
        if not searched:
            return _Set(self._all_if(limit[1]), self._all_if(limit[0]))
        ((atom, factor),) = searched
        limit = (_floordiv(limit[0], abs(factor)), _floordiv(limit[1], abs(factor)))
        if factor < 0:  # -|f| * atom <= x  <=>  atom >= -(x // |f|)
            return self._at_least(atom, (_tidy(-limit[1]), _tidy(-limit[0])))
        return self._below(atom, limit)

    def _below(self, atom: Expr, limit: _Interval) -> _Set:
        """Where atom <= limit."""
        if atom is self.index:
            return _Set(_Span(None, _tidy(limit[1] + 1)), _Span(None, _tidy(limit[0] + 1)))
        if isinstance(atom, Op) and atom.head in ("abs", "minimum", "maximum"):
            a, b = (self._solve_linear(_linear(x), limit) for x in _pair(atom))
            return self._either(a, b) if atom.head == "minimum" else self._both(a, b)
        inner = _divided(atom)
        if inner is None:
            return _UNKNOWN
        node, divisor = inner  # node // d <= x  <=>  node <= x * d + d - 1
        low, high = (_tidy(x * divisor + (divisor - 1)) for x in limit)
        return self._solve_linear(_linear(node), (low, high))

    def _at_least(self, atom: Expr, limit: _Interval) -> _Set:
        """Where atom >= limit."""
        if atom is self.index:
            return _Set(_Span(limit[0], None), _Span(limit[1], None))
        if isinstance(atom, Op) and atom.head in ("abs", "minimum", "maximum"):
            negated = (_tidy(-limit[1]), _tidy(-limit[0]))
            a, b = (self._solve_linear(_linear(-x), negated) for x in _pair(atom))
            return self._both(a, b) if atom.head == "minimum" else self._either(a, b)
        inner = _divided(atom)
        if inner is None:
            return _UNKNOWN
        node, divisor = inner  # node // d >= x  <=>  -node <= -(x * d)
        high, low = (_tidy(-(x * divisor)) for x in limit)
        return self._solve_linear(_linear(-node), (low, high))

    def _all_if(self, margin: Expr) -> _Span:
        """Everything where margin >= 0: a condition on the row alone."""
        holds = make("le", const(0), margin)
        if isinstance(holds, Const):
            return _ALL if holds is TRUE else _NOTHING
        # when empty it must not widen a hull: from far above to far below
        return _Span(make("where", holds, const(0), const(_FAR)), make("where", holds, self.length, const(-_FAR)))

    def _interval(self, linear: _Linear) -> _Interval | None:
        low: Expr = const(linear.constant)
        high = low
        for atom, factor in linear.atoms:
            ends = self._atom_interval(atom)
            if ends is None:
                return None
            a, b = ends if factor > 0 else ends[::-1]
            low, high = _tidy(low + a * factor), _tidy(high + b * factor)
        return low, high

    def _atom_interval(self, atom: Expr) -> _Interval | None:
        if atom is self.other:
            return self.ends
        nodes = list(walk(atom))
        if any(isinstance(n, Load) or n in (B, H, SCORE, self.index) for n in nodes):
            return None
        if self.other not in nodes:
            # the bounds are evaluated by `bound_value`
            exact = all(known_kind(n) in ("int", "bool") and _is_foldable(n) for n in nodes)
            return (atom, atom) if exact and not _may_fail(nodes) else None
        if isinstance(atom, Op) and atom.head in ("minimum", "maximum"):
            ends = [self._interval(_linear(a)) for a in atom.args]
            if ends[0] is None or ends[1] is None:
                return None
            return make(atom.head, ends[0][0], ends[1][0]), make(atom.head, ends[0][1], ends[1][1])
        divisor = atom.args[-1].head if isinstance(atom, Op) and isinstance(atom.args[-1], Const) else 0
        if isinstance(atom, Op) and atom.head == "mod" and divisor > 0:
            return const(0), const(divisor - 1)
        if isinstance(atom, Op) and atom.head == "floordiv" and divisor > 0:
            inner = self._interval(_linear(atom.args[0]))
            return None if inner is None else (_floordiv(inner[0], divisor), _floordiv(inner[1], divisor))
        return None


def _solve_kv() -> _Solver:
    return _Solver(KV, KV_LEN, Q, Q0, Q1)


def _solve_q() -> _Solver:
    return _Solver(Q, Q_LEN, KV, K0, K1)


def _is_foldable(node: Expr) -> bool:
    return not isinstance(node, Op) or node.head in FOLD or node.head == "where"


def _may_fail(nodes: list[Expr]) -> bool:
    """A division whose divisor is not a positive constant."""
    divisions = [n for n in nodes if isinstance(n, Op) and n.head in ("floordiv", "mod", "div")]
    return any(not isinstance(n.args[1], Const) or n.args[1].head <= 0 for n in divisions)


def _pair(atom: Op) -> tuple[Expr, Expr]:
    """The two sides of minimum and maximum; abs(a) is maximum(a, -a)."""
    a = atom.args[0]
    return (a, -a) if atom.head == "abs" else (a, atom.args[1])


def _divided(atom: Expr) -> tuple[Expr, int] | None:
    """The dividend and the positive constant divisor."""
    if isinstance(atom, Op) and atom.head == "floordiv" and isinstance(atom.args[1], Const) and atom.args[1].head > 0:
        return atom.args[0], atom.args[1].head
    return None


def _floordiv(node: Expr, divisor: int) -> Expr:
    return make("floordiv", node, const(divisor))
