"""Products with sums of weights.

    (a - c * (b + d)) @ v                           a @ v - (c * b) @ v - (c * d) @ v, where a, b and d are weights
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import aten as table
from ..normalize import Twin
from .editing import insert_node, once_more
from .looking import is_op, same_shape, walk_up


def split_sums_of_weights(twin: Twin) -> None:
    """(a - c * (b + d)) @ v with a softmax in each of a, b and d becomes a @ v - (c * b) @ v - (c * d) @ v."""
    for product in [n for n in twin.graph.nodes if n.target is table.BMM]:
        if _sum_of_weights(product.args[0]) is not None:
            parts: list[Node] = []
            new = _multiplied(twin, product.args[0], [], product, parts)  # type: ignore[arg-type]
            twin.take_place(product, new)
            twin.sums.update(dict.fromkeys(parts, new))


_Step = tuple[Node, int]  # an operation that is linear in the argument at the position


def _sum_of_weights(node: Any) -> tuple[Node, list[_Step]] | None:
    """A sum or difference of weights, and the views, casts and factors that lead from it to the node."""
    node, views = walk_up(node)
    path = [(step, 0) for step in views]
    if is_op(node, "add", "sub"):
        summed = not node.kwargs and len(node.users) == 1 and all(_is_summand(a, node) for a in node.args)
        return (node, path) if summed else None
    if is_op(node, "mul", "div", "neg") and not node.kwargs and len(node.users) == 1:
        for position in range(2 if is_op(node, "mul") else 1):
            found = _sum_of_weights(node.args[position])
            if found is not None:
                return found[0], [*found[1], (node, position), *path]
    return None


def _is_summand(node: Any, total: Node) -> bool:
    if not isinstance(node, Node) or not same_shape(node, total):
        return False
    return _is_weight(node) or _sum_of_weights(node) is not None


def _multiplied(twin: Twin, node: Node, path: list[_Step], product: Node, parts: list[Node]) -> Node:
    """The product with what the path makes of the node, as a sum of products, which are added to `parts`."""
    val = product.meta["val"]
    found = _sum_of_weights(node)
    if found is None:
        for step, position in path:
            node = once_more(twin, step, position, node, product)
        parts.append(insert_node(twin, product, table.BMM, node, product.args[1], val=val, like=product))
        return parts[-1]
    total, steps = found
    terms = [_multiplied(twin, a, [*steps, *path], product, parts) for a in total.args]  # type: ignore[arg-type]
    return insert_node(twin, product, total.target, *terms, val=val, like=product)


def _is_weight(node: Node) -> bool:
    """A softmax, perhaps times something."""
    node, _ = walk_up(node)
    if node.target in table.SOFTMAX:
        return True
    if table.name_of(node) in ("mul", "div", "neg"):
        return any(_is_weight(a) for a in node.args if isinstance(a, Node))
    return table.name_of(node) == "getitem" and table.name_of(node.args[0]) == "native_dropout"  # type: ignore[arg-type]
