"""Value products whose rows are several axes of the weights, folded: all but the query become axes of the batch.

    softmax(q @ k.mT) @ v                                     v [N, Dv]: rows are batch, head and query
    einsum("bhmn,bnd->bmhd", weights, v)                      v without heads: rows are query and head

A matrix product folds every axis that its second operand lacks into its rows. Queries of one head are then no axis of
their own, and score and value product may fold them in different orders. In the twin such a product becomes one of
`weights [.., M, N]` with v broadcast over what was folded, and views lead back to what it gave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..score.expr import Expr, Op, name, walk
from . import aten as table
from . import index as ix
from .additions import Additions
from .normalize import Twin
from .pull import Index, Puller
from .shapes import Shapes

aten = torch.ops.aten
BATCH, ROW, KEY = name("$batch"), name("$row"), name("$key")
_NEAR = 40  # nodes between a product and its softmax


@dataclass(frozen=True)
class _Digit:
    """An axis of the weights that the product's row counts: `row // divisor % size`."""

    axis: int
    size: Expr
    divisor: Expr


def unfold_rows(twin: Twin) -> None:
    for product in [n for n in twin.graph.nodes if n.target is table.BMM]:
        found = _folded(twin, product)
        if found is not None:
            _unfold(twin, product, *found)


def _folded(twin: Twin, product: Node) -> tuple[Node, list[int], list[_Digit]] | None:
    """(the weights before they were folded, their batch axes, what the rows count from the most significant on)."""
    shapes = Shapes()
    weights: Any = product.args[0]
    batch, rows, keys = shapes.of(weights)
    if rows is ix.ONE or keys is ix.ONE:
        return None
    puller = Puller(twin, shapes, ix.Indexer({BATCH: batch, ROW: rows, KEY: keys}, shapes.hints))
    index: Index = (BATCH if batch is not ix.ONE else ix.ZERO, ROW, KEY)
    while weights not in twin.stops and (step := puller.view(weights, index)) is not None:
        weights, index = step
    shape = shapes.of(weights)
    if index[-1] is not KEY or not ix.same(shape[-1], keys) or not _comes_from_softmax(weights):
        return None  # or a slice of them
    digits = [_digit(at, shape[at], i, rows) for at, i in enumerate(index) if any(n is ROW for n in walk(i))]
    rest = [at for at, i in enumerate(index[:-1]) if shape[at] is not ix.ONE and not any(n is ROW for n in walk(i))]
    if len(digits) < 2 or None in digits or not _counts(index, shape, rest, batch):
        return None
    ordered = sorted(digits, key=lambda d: -puller.indexer.hint(d.divisor))  # type: ignore[union-attr]
    return (weights, rest, ordered) if _is_complete(ordered, rows) else None  # type: ignore[arg-type, return-value]


def _digit(axis: int, size: Expr, i: Expr, rows: Expr) -> _Digit | None:
    """`row // c`, `row % size` or `row // c % size`."""
    is_remainder = isinstance(i, Op) and i.head == "mod" and ix.same(i.args[1], size)
    divisor = _divisor(i.args[0] if is_remainder else i)
    if divisor is None or not (is_remainder or ix.same(ix.mul(size, divisor), rows)):
        return None
    return _Digit(axis, size, divisor)


def _divisor(e: Expr) -> Expr | None:
    """c of `row // c`, also of `row // a // b`"""
    if e is ROW:
        return ix.ONE
    inner = _divisor(e.args[0]) if isinstance(e, Op) and e.head == "floordiv" else None
    return None if inner is None else ix.mul(inner, e.args[1])


def _is_complete(digits: list[_Digit], rows: Expr) -> bool:
    below: Expr = ix.ONE
    for digit in reversed(digits):
        if not ix.same(digit.divisor, below):
            return False
        below = ix.mul(below, digit.size)
    return ix.same(below, rows)


def _counts(index: Index, shape: tuple[Expr, ...], axes: list[int], batch: Expr) -> bool:
    """Do these axes, in their order, count the product's batch?"""
    position: Expr = ix.ZERO
    size: Expr = ix.ONE
    for at in axes:
        position, size = ix.add(ix.mul(position, shape[at]), index[at]), ix.mul(size, shape[at])
    if not ix.same(size, batch):
        return False
    recombined = ix.Indexer({BATCH: batch}, {}).renormalise(position)
    return batch is ix.ONE if not axes else recombined is BATCH or (len(axes) == 1 and index[axes[0]] is BATCH)


def _comes_from_softmax(node: Node) -> bool:
    """Is a softmax over the last axis close above, with nothing but changes of weights between?"""
    stack: list[Node] = [node]
    seen: set[Node] = set()
    while stack and len(seen) < _NEAR:
        n = stack.pop()
        if n.target in table.SOFTMAX:
            return int(n.args[1]) % n.meta["val"].dim() == n.meta["val"].dim() - 1  # type: ignore[arg-type]
        if n not in seen and table.name_of(n) in table.TRANSPARENT:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return False


def _unfold(twin: Twin, product: Node, weights: Node, batch_axes: list[int], digits: list[_Digit]) -> None:
    val, value = weights.meta["val"], product.args[1]
    held = value.meta["val"]  # type: ignore[union-attr]
    query = val.dim() - 2  # of [.., heads, queries, keys]; if it was not folded, the least significant one
    query = query if any(d.axis == query for d in digits) else digits[-1].axis
    folded = [d.axis for d in digits if d.axis != query]
    sizes = {at: val.shape[at] for at in range(val.dim())}
    lead = [sizes[at] for at in folded]
    batch, keys, dim = held.shape
    count = math.prod(lead)
    squeezed = [at for at in range(val.dim() - 1) if at not in (*batch_axes, *folded, query)]

    new = Additions(twin, product).call
    turned = new(aten.permute.default, weights, [*squeezed, *batch_axes, *folded, query, val.dim() - 1])
    left = new(aten.reshape.default, turned, [batch * count, sizes[query], keys])
    spread = new(aten.expand.default, new(aten.unsqueeze.default, value, 1), [batch, count, keys, dim])
    right = new(aten.reshape.default, spread, [batch * count, keys, dim])
    apart = new(aten.view.default, new(table.BMM, left, right), [batch, *lead, sizes[query], dim])
    order = [1 + (len(folded) if d.axis == query else folded.index(d.axis)) for d in digits]
    back = new(aten.permute.default, apart, [0, *order, len(order) + 1])
    rows = new(aten.reshape.default, back, list(product.meta["val"].shape))
    twin.take_place(product, rows)
