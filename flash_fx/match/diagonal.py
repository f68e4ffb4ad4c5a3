"""Integers that depend on key - query alone, made for one pair of each diagonal instead of for every pair.

`buckets[m, n] == f(n - m)` has M + N - 1 different values. The user's own operations run on the pairs of the first
column, upwards, and of the first row: for diagonal t the query is max(M - 1 - t, 0) and the key max(t - (M - 1), 0).
These are pairs that exist, so each value is the very number that the matrix would hold there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..score.expr import COMPARISONS, Expr, Load, Op, kind_of, name, op, rebuild, substitute, walk
from . import aten as table
from . import index as ix

if TYPE_CHECKING:
    from .pull import Index, Puller

aten = torch.ops.aten
QUERY, KEY = name("$m"), name("$n")
PAIR = {QUERY, KEY}
_COORDINATES = {QUERY, KEY, name("$i"), name("$d")}
_DISTANCE = name("$t")


@dataclass(frozen=True)
class Reached:
    """Values at all diagonals, each [M + N - 1], [1] or [], by what they were asked for; `position` is the pair's diagonal."""

    values: dict[int, Node]
    position: Expr


def along_diagonals(puller: Puller, wanted: dict[int, tuple[Node, Index]]) -> Reached | None:
    """The wanted integers, (node, index) each, along diagonals; None if they are no function of key - query."""
    if puller.partial or not all(is_of_difference(puller.pull(*w)) for w in wanted.values()):
        return None  # in a partial write the index leaves the matrix
    points = _Points(puller)
    if points.rows is None or points.keys is None:
        return None
    values = {d: points.value(*w) for d, w in wanted.items()}
    if any(v is None for v in values.values()) or not any(_varies(v) for v in values.values()):  # type: ignore[arg-type]
        return None
    rows = puller.indexer.sizes[QUERY]
    return Reached(values, ix.add(ix.sub(KEY, QUERY), ix.sub(rows, ix.ONE)))  # type: ignore[arg-type]


def is_of_difference(e: Expr) -> bool:
    """Is this, by exact integer arithmetic, a function of key - query alone?"""
    if any(isinstance(n, Load) for n in walk(e)):
        return False
    return not _COORDINATES & {*walk(_normal(substitute(e, {KEY: QUERY + _DISTANCE})))}


def _normal(e: Expr) -> Expr:
    """Integer sums as polynomials, comparisons of integers as those of their difference with 0."""
    done: dict[Expr, Expr] = {}
    for node in walk(e):
        new = rebuild(node, tuple(done[a] for a in node.args))
        if isinstance(new, Op) and new.head in ("add", "sub", "mul", "neg") and kind_of(new) == "int":
            new = ix.from_poly(ix.to_poly(new))
        elif isinstance(new, Op) and new.head in COMPARISONS and all(kind_of(a) == "int" for a in new.args):
            new = op(new.head, ix.sub(*new.args), ix.ZERO)
        done[node] = new
    return done[e]


def _varies(value: Node) -> bool:
    held = value.meta["val"]
    return bool(held.dim()) and not (isinstance(held.shape[0], int) and held.shape[0] == 1)


class _Points:
    """Values of twin nodes at one pair of each diagonal."""

    def __init__(self, puller: Puller) -> None:
        self.puller, self.extra = puller, puller.extra
        self.rows, self.keys = (self._length(puller.indexer.sizes[c]) for c in (QUERY, KEY))
        self.pairs: dict[torch.device, dict[Expr, Node]] = {}
        self.memo: dict[tuple[Node, Index], Node | None] = {}

    def value(self, node: Node, index: Index) -> Node | None:
        """The node's elements at an index made of queries and keys: [M + N - 1], or [1] or [] where neither occurs in it."""
        if (node, index) not in self.memo:
            self.memo[node, index] = self._value(node, index)
        return self.memo[node, index]

    def _value(self, node: Node, index: Index) -> Node | None:
        if (viewed := self.puller.view(node, index)) is not None:
            return self.value(*viewed)
        operation = table.name_of(node)
        if operation == "arange":
            return self._arange(node, index[0])
        if operation in table.GENERATORS or node.op == "get_attr":
            return self._constant(node, operation or node.op)
        if operation in table.CASTS or operation in table.POINTWISE or operation in ("where", "masked_fill"):
            return self._pointwise(node, index)
        return None

    def _pointwise(self, node: Node, index: Index) -> Node | None:
        args = []
        for a in node.args:
            if isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor):
                a = self._ranked(self.value(a, self.puller.unexpand(a, index)), a)
                if a is None:
                    return None
            args.append(a)
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("memory_format", "layout", "pin_memory")}
        return self.extra.call(node.target, *args, **kwargs)

    def _ranked(self, value: Node | None, node: Node) -> Node | None:
        """A tensor without dimensions promotes no other: so it has some where, and only where, the user's has."""
        if value is None or (value.meta["val"].dim() == 0) == (node.meta["val"].dim() == 0):
            return value
        return self.extra.call(aten.reshape.default, value, [1] if node.meta["val"].dim() else [])

    def _arange(self, node: Node, at: Expr) -> Node | None:
        held = node.meta["val"]
        numbers = [self.puller._integer(a) for a in node.args]
        if held.is_floating_point() or any(n is None for n in numbers):
            return None
        start, step = ix.ZERO if len(numbers) < 2 else numbers[0], numbers[2] if len(numbers) > 2 else ix.ONE
        made = self._sum(ix.to_poly(ix.add(start, ix.mul(at, step))), held.device)  # type: ignore[arg-type]
        if made is None or held.dtype is torch.int64:
            return made
        return self.extra.call(aten._to_copy.default, made, dtype=held.dtype)

    def _constant(self, node: Node, operation: str) -> Node | None:
        """The one number that fills the tensor."""
        kind = operation.removesuffix("_like").split("_")[-1]
        value: Any = {"zeros": 0, "ones": 1}.get(kind)
        at = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(operation)
        if at is not None:
            value = node.args[at]
        elif operation == "get_attr" and (found := self.puller._constant_attribute(node)) is not None:
            value = found.head
        return None if value is None else self._full(value, node.meta["val"])

    def _full(self, value: Any, like: torch.Tensor) -> Node:
        return self.extra.call(aten.full.default, [], value, dtype=like.dtype, device=like.device)

    # *** coordinates ***

    def _sum(self, p: ix.Poly, device: torch.device) -> Node | None:
        """A sum of products of query, key and sizes, int64."""
        vectors: list[Node] = []
        offset: Any = 0
        for atoms, coefficient in p.items():
            factor = self._size([a for a in atoms if a not in PAIR], coefficient)
            if factor is None:
                return None
            places = [self._pairs(device)[a] for a in atoms if a in PAIR]
            if places:
                scaled = [] if isinstance(factor, int) and factor == 1 else [factor]
                vectors.append(
                    functools.reduce(functools.partial(self.extra.call, aten.mul.Tensor), [*places, *scaled])
                )
            else:
                offset = offset + factor
        if not vectors:
            return self.extra.call(aten.full.default, [], offset, dtype=torch.int64, device=device)
        scaled = [] if isinstance(offset, int) and offset == 0 else [offset]
        return functools.reduce(functools.partial(self.extra.call, aten.add.Tensor), [*vectors, *scaled])

    def _size(self, atoms: Iterable[Expr], coefficient: Any = 1) -> Any:
        """A product of run-time sizes; None if something else is in it."""
        for a in atoms:
            factor = self._factor(a)
            if factor is None:
                return None
            coefficient = coefficient * factor
        return coefficient

    def _factor(self, e: Expr) -> Any:
        if e in self.puller.shapes.symbols:
            return self.puller.shapes.symbols[e]
        if not isinstance(e, Op) or e.head not in ("floordiv", "mod"):
            return None
        x, y = (self._length(a) for a in e.args)
        return None if x is None or y is None else x // y if e.head == "floordiv" else x % y

    def _length(self, e: Expr) -> Any:
        """A number, a run-time size or None."""
        terms = [self._size(*term) for term in ix.to_poly(e).items()]
        return None if any(t is None for t in terms) else sum(terms)

    def _pairs(self, device: torch.device) -> dict[Expr, Node]:
        """Query and key of one pair of each diagonal, from the lower left to the upper right."""
        if device not in self.pairs:
            call = self.extra.call
            count = self.rows + self.keys - 1
            distance = call(aten.sub.Tensor, call(aten.arange.default, count, device=device), self.rows - 1)
            opposite = call(aten.neg.default, distance)
            self.pairs[device] = {
                KEY: call(aten.clamp_min.default, distance, 0),
                QUERY: call(aten.clamp_min.default, opposite, 0),
            }
        return self.pairs[device]
