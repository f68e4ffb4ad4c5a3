"""The quotient becomes a softmax where it stands, or before the value product that stands between.

    exp(x - c) / sum(exp(x - c)) @ v
    (exp(x - c) @ v) / sum(exp(x - c))
"""

from __future__ import annotations

from torch.fx import Node

from ...score.expr import Expr, name
from .. import aten as table
from .. import index as ix
from ..normalize import Twin
from ..pull import Index, Puller
from ..shapes import Shapes
from .editing import insert_node, repeat_steps, softmax_for
from .looking import (
    is_one,
    peel,
    peel_broadcast,
    rank_of,
    reduction_of,
    same_shape,
    shape_of,
    size_texts,
    terms_of,
    walk_up,
)
from .quotients import normalised_row, quotient


def replace_quotients(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        parts = quotient(node)
        if parts is None:
            continue
        numerator, denominator = parts
        row = normalised_row(twin, numerator, denominator, node)
        if row is not None and same_shape(node, row.exponential):
            new = softmax_for(twin, node, row.x, row.dim, row.sink, traits=row.traits)
            twin.take_place(node, new, (row.exponential,))
        else:
            _normalise_before_product(twin, node, numerator, denominator)


def _normalise_before_product(twin: Twin, node: Node, numerator: Node, denominator: Node) -> None:
    """(exp(z) @ v) / sum(exp(z)) becomes softmax(z) @ v, the views between product and quotient repeated."""
    path, product = _to_product(numerator)
    if product is None:
        return
    exponential, views = walk_up(product.args[0])
    sums = [r for t in terms_of(denominator) if (r := reduction_of(t, ("sum",))) and peel(r[0]) is exponential]
    if not isinstance(exponential, Node) or not sums or sums[0][1] != rank_of(exponential) - 1:
        return
    row = normalised_row(twin, exponential, denominator, product)
    quotient = (peel_broadcast(denominator), numerator, exponential)
    if row is None or not _divides_own_rows(twin, quotient, path, views):
        return
    weights = softmax_for(twin, product, row.x, row.dim, row.sink, traits=row.traits)
    args = (repeat_steps(twin, views, weights, product), product.args[1])
    new = insert_node(twin, product, table.BMM, *args, val=product.meta["val"], like=product)
    twin.take_place(node, repeat_steps(twin, path, new, node), (row.exponential, product))


def _divides_own_rows(twin: Twin, quotient: tuple[Node, Node, Node], path: list[Node], views: list[Node]) -> bool:
    """Is every row of the numerator [.., M, Dv] divided by the sum [.., M, 1] of its own weights [.., M, N]?

    An index of the numerator is followed up the views to the product and on to the weights.
    """
    total, numerator, weights = quotient
    alike = size_texts(total)[:-1] == size_texts(numerator)[:-1] == size_texts(weights)[:-1]
    if not alike or not is_one(shape_of(total)[-1]):
        return False
    shapes, key = Shapes(), name("$key")
    sizes: dict[Expr, Expr] = {name(f"$axis{i}"): size for i, size in enumerate(shapes.of(numerator))}
    sizes[key] = shapes.of(weights)[-1]
    puller = Puller(twin, shapes, ix.Indexer(sizes, shapes.hints))
    rows = tuple(ix.ZERO if size is ix.ONE else i for i, size in list(sizes.items())[:-1])
    index = _follow(puller, path, rows)
    reached = None if index is None else _follow(puller, views, (*index[:-1], key))
    return reached is not None and reached[:-1] == rows[:-1] and reached[-1] is key


def _follow(puller: Puller, path: list[Node], index: Index) -> Index | None:
    """The index of what the views start from."""
    for step in reversed(path):
        viewed = puller.view(step, index)
        if viewed is None and table.name_of(step) not in table.CASTS:
            return None
        index = index if viewed is None else viewed[1]
    return index


def _to_product(node: Node) -> tuple[list[Node], Node | None]:
    """The views and casts from a product to the node, and the product."""
    node, path = walk_up(node)
    return path, node if node.target is table.BMM else None
