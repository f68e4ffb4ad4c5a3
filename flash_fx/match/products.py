"""Products written as a multiplication and a sum become batched matrix products.

    (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)             q @ k.mT
    (weights.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)       weights @ v
    (memory * q.unsqueeze(1)).sum(2)                        one query

Works on the twin, before softmax is looked for, and only on scores and on what multiplies weights. A matrix product needs
an axis that both factors carry and that is summed, and for each of them one that the other does not carry. What is carried
is told by an index that is followed up the views: broadcast, expanded and repeated axes are not.

Queries, or rows of weights, may be a single one: where every query has keys of its own, all queries are batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..score.expr import Expr, name, walk
from . import aten as table
from . import index as ix
from .additions import Additions
from .normalize import Twin, closure, made_of
from .pull import Puller
from .shapes import Shapes, UnknownSizeError

aten = torch.ops.aten
_EXPONENTIALS = frozenset({"exp", "exp2", "_log_softmax"})


@dataclass(frozen=True)
class _Sum:
    """`node` is the sum of `left * right` over `axis`; `steps` multiply or divide by numbers in between, first to last."""

    node: Node
    left: Node
    right: Node
    axis: int
    steps: tuple[Node, ...]
    multiplication: Node


@dataclass(frozen=True)
class _Axes:
    """Axes of the multiplication: those each factor carries, those of the batch, a row of the left and a column of the right.

    An axis that only one factor carries, beyond its row or column, is one of the batch along which the other is expanded.
    """

    carried: tuple[set[int], set[int]]
    shared: set[int]
    batch: list[int]
    row: int | None
    column: int | None


def multiply_matrices(twin: Twin) -> None:
    """Replace sums of products by matrix products where they are scores or multiply weights."""
    sums = [s for n in twin.graph.nodes if (s := _sum_of_products(n)) is not None]
    if not sums:
        return
    anchors = [n for n in twin.graph.nodes if n.target in table.SOFTMAX or table.name_of(n) in _EXPONENTIALS]
    weights = closure(anchors, lambda n: [u for u in n.users if table.name_of(u) in table.TRANSPARENT])
    scores = made_of([a for n in anchors for a in n.all_input_nodes])
    for s in sums:
        s = _sum_of_products(s.node) or s  # what it was made of may have been replaced
        weighing = [n in weights for n in (s.left, s.right)]
        if s.node in scores or any(weighing):
            _multiply(twin, _turned(s) if weighing == [False, True] else s, weighs=any(weighing))


def _multiply(twin: Twin, s: _Sum, *, weighs: bool) -> None:
    """`weighs`: the factor on the left is made of weights, so that a single row is one of theirs."""
    try:
        axes = _axes(twin, s)
        if axes is not None and axes.row is not None and axes.column is None and not weighs:
            s, axes = _turned(s), _axes(twin, _turned(s))  # one query is a row
    except UnknownSizeError:
        return
    if axes is None or axes.column is None:
        return
    new = _product(Additions(twin, s.node), s, axes)
    twin.take_place(s.node, new, (*s.steps, s.multiplication))


# *** what is summed ***


def _sum_of_products(node: Node) -> _Sum | None:
    """None where it is no sum along one axis of the product of two floating tensors of its own dtype."""
    if node.target is not aten.sum.dim_IntList:
        return None
    source, dims = node.args[:2]
    steps: list[Node] = []
    while _is_scaled(source):
        steps.append(source)  # type: ignore[arg-type]
        source = source.args[0]  # type: ignore[union-attr]
    if table.name_of(source) != "mul" or not isinstance(dims, (list, tuple)) or len(dims) != 1:  # type: ignore[arg-type]
        return None
    left, right = source.args  # type: ignore[union-attr]
    held = [n.meta["val"] for n in (node, *steps, source, left, right) if isinstance(n, Node)]
    tensors = [v for v in held if isinstance(v, torch.Tensor)]
    if len(tensors) != 4 + len(steps) or len({v.dtype for v in tensors}) != 1 or not tensors[0].is_floating_point():
        return None
    axis = int(dims[0]) % max(source.meta["val"].dim(), 1)  # type: ignore[union-attr, call-overload]
    return _Sum(node, left, right, axis, tuple(reversed(steps)), source)  # type: ignore[arg-type]


def _is_scaled(node: Any) -> bool:
    return table.name_of(node) in ("mul", "div") and not node.kwargs and isinstance(node.args[1], (int, float))


def _turned(s: _Sum) -> _Sum:
    return _Sum(s.node, s.right, s.left, s.axis, s.steps, s.multiplication)


# *** who carries what ***


def _axes(twin: Twin, s: _Sum) -> _Axes | None:
    left, right = (_carried_by(twin, s.multiplication, n) for n in (s.left, s.right))
    if s.axis not in left & right:
        return None
    rows, columns, shared = sorted(left - right), sorted(right - left), (left & right) - {s.axis}
    batch = sorted(shared.union(rows[:-1], columns[:-1]))
    return _Axes((left, right), shared, batch, rows[-1] if rows else None, columns[-1] if columns else None)


def _carried_by(twin: Twin, whole: Node, factor: Node) -> set[int]:
    """The axes of `whole` along which the factor may differ."""
    shapes = Shapes()
    sizes: dict[Expr, Expr] = {name(f"$axis{i}"): size for i, size in enumerate(shapes.of(whole))}
    puller = Puller(twin, shapes, ix.Indexer(sizes, shapes.hints))
    step: Any = (factor, puller.unexpand(factor, tuple(ix.ZERO if size is ix.ONE else i for i, size in sizes.items())))
    while step is not None:
        node, index = step
        step = (node.args[0], index) if table.name_of(node) in table.CASTS else puller.view(node, index)
    used = {n for i in index for n in walk(i)}
    return {axis for axis, n in enumerate(sizes) if n in used}


# *** the matrix product ***


def _product(extra: Additions, s: _Sum, axes: _Axes) -> Node:
    rank, sizes = s.multiplication.meta["val"].dim(), s.multiplication.meta["val"].shape
    left = _matrices(extra, s, 0, axes, (axes.row, s.axis))
    right = _matrices(extra, s, 1, axes, (s.axis, axes.column))
    held = [a for a in (*axes.batch, axes.row, axes.column) if a is not None]
    new = _viewed(extra, extra.call(table.BMM, left, right), [sizes[a] for a in held])
    order = [held.index(a) for a in range(rank) if a in held]
    if order != sorted(order):
        new = extra.call(aten.permute.default, new, order)
        new = extra.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    for step in s.steps:
        new = extra.call(step.target, new, step.args[1])
    return _viewed(extra, new, list(s.node.meta["val"].shape))


def _matrices(
    extra: Additions, s: _Sum, which: int, axes: _Axes, matrix: tuple[int | None, int | None]
) -> Node:
    """One factor as [batch, .., ..]"""
    node, carried = (s.left, s.right)[which], axes.carried[which]
    sizes = s.multiplication.meta["val"].shape
    missing = len(sizes) - node.meta["val"].dim()  # in front: it is broadcast
    for broadcast in sorted({*range(missing, len(sizes))} - carried, reverse=True):
        node = extra.call(aten.select.int, node, broadcast - missing, 0)
    held, wanted = sorted(carried), [*axes.batch, *matrix]
    order = [held.index(a) for a in wanted if a in carried]  # type: ignore[arg-type]
    if order != sorted(order):
        node = extra.call(aten.permute.default, node, order)
    for position, axis in enumerate(wanted):
        if axis not in carried:
            node = extra.call(aten.unsqueeze.default, node, position)
    if not carried.issuperset(axes.batch):
        node = extra.call(aten.expand.default, node, [*(sizes[a] for a in axes.batch), -1, -1])
    return extra.call(aten.reshape.default, node, [-1, *node.meta["val"].shape[-2:]]) if len(axes.batch) != 1 else node


def _viewed(extra: Additions, node: Node, shape: list[Any]) -> Node:
    alike = list(map(str, node.meta["val"].shape)) == list(map(str, shape))
    return node if alike else extra.call(aten.view.default, node, shape)
