"""Scores that are a sum of two products become one product of longer rows: a . b + c . d = [a, c] . [b, d].

Works on the twin, once every softmax is one node. Content and position that are projected apart (`q @ k.mT + p @ r.mT`)
would otherwise leave one of the two matrices to be captured, as large as the scores and with a gradient as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from .. import compat
from ..limits import WIDE
from ..score.expr import Expr, name
from . import aten as table
from . import index as ix
from .additions import Additions
from .normalize import Twin, closure
from .pull import Index, Puller
from .shapes import Shapes, UnknownSizeError

aten = torch.ops.aten
_FOLDS = frozenset({"view", "_unsafe_view", "reshape"})
_STEPS = _FOLDS | {"permute", "transpose", "t", "unsqueeze", "squeeze", "alias", "clone", "contiguous"}


@dataclass(frozen=True)
class _Term:
    """A product, the views and constant factors that lead from it to one side of a sum, and the product's index there.

    `factor` is that of the path, `sign` that of the sum.
    """

    product: Node
    path: tuple[Node, ...]
    factor: float
    sign: float
    index: Index

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.product, *self.path


def join_products(twin: Twin) -> None:
    """Replace sums of products in the scores of a softmax, where nobody needs the products apart."""
    while _join_pairs(twin):
        pass  # what was joined may itself be one side of a sum


def _join_pairs(twin: Twin) -> bool:
    anchors = [n for n in twin.graph.nodes if n.target in table.SOFTMAX]
    scores = _reached(a for anchor in anchors for a in anchor.all_input_nodes)
    sums = {n: pair for n in twin.graph.nodes if n in scores and (pair := _pair(twin, n)) is not None}
    inside = set(sums).union(*(t.nodes for pair in sums.values() for t in pair))
    outside = closure(twin.roots) - inside
    extra, joined = Additions(twin), False
    for node, pair in sums.items():
        parts = [n for t in pair for n in t.nodes]
        if twin.roots.isdisjoint(parts) and all(outside.isdisjoint(n.users) for n in parts):
            twin.replace(node, _joined(extra, *pair))
            joined = True
    return joined


def _reached(start: Iterable[Node]) -> set[Node]:
    """The nodes from which a product leads to `start` with nothing but what scores are made of in between."""
    return closure(start, lambda n: n.all_input_nodes if _is_transparent(n) else ())


def _is_transparent(node: Node) -> bool:
    return table.name_of(node) in table.TRANSPARENT - table.SHAPE_ONLY


# *** what can be joined ***


def _pair(twin: Twin, node: Node) -> tuple[_Term, _Term] | None:
    """Both sides of a sum of two products at the same positions; the one with the greater factor first."""
    operation = table.name_of(node)
    if operation not in ("add", "sub") or node.kwargs or _stops(node):
        return None
    if not all(isinstance(a, Node) and _is_alike(a, node) for a in node.args):
        return None
    x, y = _term(twin, node.args[0], 1.0), _term(twin, node.args[1], 1.0 if operation == "add" else -1.0)  # type: ignore[arg-type]
    if x is None or y is None or not _at_the_same_positions(x, y) or not _pays(x, y):
        return None
    # factors above 1 could overflow a narrow dtype
    return (x, y) if abs(x.factor) >= abs(y.factor) else (y, x)


def _term(twin: Twin, node: Node, sign: float) -> _Term | None:
    dtype, shape, factor = node.meta["val"].dtype, node, 1.0
    path: list[Node] = []
    while node.target is not table.BMM:
        scale = _scale(node)
        if _stops(node) or (scale is None and table.name_of(node) not in _STEPS):
            return None
        factor *= 1.0 if scale is None else scale
        path.append(node)
        node = node.args[0]  # type: ignore[assignment]
    usable = not _stops(node) and node.meta["val"].dtype == dtype and math.isfinite(factor) and factor != 0
    if not usable or _reads_weights(node):
        return None
    index = _position(twin, shape, path)
    return None if index is None else _Term(node, tuple(reversed(path)), factor, sign, index)


def _stops(node: Node) -> bool:
    """Does eager stop a gradient here?"""
    return bool(node.meta.get("stop"))


def _scale(node: Node) -> float | None:
    """c of `x * c` and `1 / c` of `x / c`"""
    operation = table.name_of(node)
    if operation not in ("mul", "div") or node.kwargs or not isinstance(node.args[1], (int, float)):
        return None
    number = float(node.args[1])
    return number if operation == "mul" else 1 / number if number else math.inf


def _reads_weights(product: Node) -> bool:
    """Is it a value product, which is to be an attention itself?"""
    return any(n.target in table.SOFTMAX for n in _reached(product.all_input_nodes))


def _position(twin: Twin, node: Node, path: list[Node]) -> Index | None:
    """The product's index at each position of the node."""
    shapes = Shapes()
    try:
        sizes: dict[Expr, Expr] = {name(f"$axis{i}"): size for i, size in enumerate(shapes.of(node))}
        puller = Puller(twin, shapes, ix.Indexer(sizes, shapes.hints))
        index: Index = tuple(ix.ZERO if size is ix.ONE else i for i, size in sizes.items())
        for step in path:
            viewed = puller.view(step, index)
            index = index if viewed is None else viewed[1]
    except UnknownSizeError:
        return None
    return index


def _at_the_same_positions(x: _Term, y: _Term) -> bool:
    """Perhaps with query and key exchanged."""
    alike = _texts(x.product)[0] == _texts(y.product)[0] and x.index[0] == y.index[0]
    rows, others = _rows(x), _rows(y)
    return alike and (rows == others or rows == others[::-1])


def _rows(term: _Term) -> list[tuple[str, Expr]]:
    return list(zip(_texts(term.product)[1:], term.index[1:], strict=True))


def _pays(x: _Term, y: _Term) -> bool:
    """Are the scores larger than the rows that have to be copied? For one query over many keys they are not."""
    m, n = (compat.sym_hint(size) for size in x.product.meta["val"].shape[1:])
    try:  # kernels are made for one head dimension, so it is guarded on
        length = sum(compat.specialise(t.product.args[0].meta["val"].shape[2]) for t in (x, y))  # type: ignore[union-attr]
    except ValueError:
        return False
    return length <= WIDE and m * n > (m + n) * length


def _is_alike(x: Node, y: Node) -> bool:
    return _texts(x) == _texts(y) and x.meta["val"].dtype == y.meta["val"].dtype


def _texts(node: Node) -> list[str]:
    """The sizes as text: comparing run-time sizes would add guards."""
    return [str(size) for size in node.meta["val"].shape]


# *** the joined product ***


def _joined(extra: Additions, x: _Term, y: _Term) -> Node:
    (a, b), (c, d) = x.product.args, y.product.args
    exchanged = _rows(x) != _rows(y)
    if exchanged:
        c, d = d, c
    scales = (x.sign, y.sign * y.factor / x.factor)
    left, right = _beside(extra, a, c, 2, exchanged, scales), _beside(extra, b, d, 1, exchanged)
    product = extra.call(table.BMM, left, right)
    for step in x.path:
        product = extra.call(step.target, product, *step.args[1:], **step.kwargs)
    return product


def _beside(
    extra: Additions, x: Node, y: Node, dim: int, exchanged: bool, scales: tuple[float, float] = (1.0, 1.0)
) -> Node:
    """`x` and, turned if need be, `y` along `dim`: where batch and heads are still two axes, if they ever were."""
    parts = [_unfolded(n) for n in (x, y)]
    unfolded = _texts(parts[0])[:-2] == _texts(parts[1])[:-2]
    if not unfolded:
        parts = [x, y]
    if exchanged:
        parts[1] = extra.call(aten.transpose.int, parts[1], -1, -2)
    parts = [n if s == 1 else extra.call(aten.mul.Tensor, n, s) for n, s in zip(parts, scales, strict=True)]
    joined = extra.call(aten.cat.default, parts, dim - 3)
    if not unfolded:
        return joined
    shape = list(x.meta["val"].shape)
    shape[dim] = joined.meta["val"].shape[dim - 3]
    return extra.call(aten.view.default, joined, shape)


def _unfolded(node: Node) -> Node:
    """What was viewed as one batch of matrices."""
    if table.name_of(node) not in _FOLDS or _stops(node):
        return node
    source: Node = node.args[0]  # type: ignore[assignment]
    return source if _texts(source)[-2:] == _texts(node)[-2:] else node
