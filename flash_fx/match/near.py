"""Near misses that the twin does not show, because it does not look into something on the way.

A convolution or a linear layer over the heads, a layer norm of the scores and a softmax inside an autograd function are
leaves of the twin, so the softmax and a product lie on different sides. They are searched for in the user's graph, by
shapes: what is between the two products keeps the key axis and one more axis of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from ..reject import Reason, Reject
from . import aten as table
from .normalize import Twin, example_value, is_product, leaf_value, target_name

_Sizes = list[str]


def unseen(twin: Twin, reported: Iterable[Node]) -> list[tuple[Node, Node, Reject]]:
    """(softmax, value product, why it is left), nodes of the user's, for every softmax that no twin node reported.

    `reported` are the twin's softmax nodes that have a verdict.
    """
    known = {twin.origin[n] for n in reported if n in twin.origin}
    found = []
    for node in twin.order:
        hidden = hides_softmax(node)
        if node not in known and (hidden or _is_softmax(node)):
            near = _between_products(twin, node, known, hidden)
            found += [] if near is None else [near]
    return found


def hides_softmax(node: Node) -> bool:
    """A higher-order operation whose body holds a softmax but no product, such as a softmax with a backward of its own."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    bodies = [_attribute(a) for a in node.all_input_nodes if a.op == "get_attr"]
    inside = [n for b in bodies if isinstance(b, GraphModule) for n in b.graph.nodes]
    return any(_is_softmax(n) for n in inside) and not any(is_product(n) for n in inside)


def _attribute(node: Node) -> Any:
    return getattr(node.graph.owning_module, str(node.target), None)


def names_softmax(name: str) -> bool:
    return "softmax" in name or "softmin" in name


def _is_softmax(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and names_softmax(target_name(node))


def _between_products(twin: Twin, softmax: Node, known: set[Node], hidden: bool) -> tuple[Node, Node, Reject] | None:
    keys = _keys(twin, softmax)
    if keys is None:
        return None

    def belongs(node: Node) -> bool:
        return any(_keeps(keys, _sizes(softmax), sizes) for sizes in map(_texts, _tensors(node)))

    after = _path(softmax, lambda n: n.users, belongs)
    before = _path(softmax, lambda n: n.all_input_nodes, belongs)
    if after is None or before is None or known.intersection(after + before):
        return None  # the other softmax says it
    if hidden:
        return softmax, after[-1], Reject(Reason.HIDDEN, softmax, f"in {target_name(softmax)}")
    for reason, path in ((Reason.WEIGHT, after), (Reason.SCORE, before)):
        odd = next((n for n in path[:-1] if _is_closed(twin, n)), None)
        if odd is not None:
            return softmax, after[-1], Reject(reason, odd, f"through {target_name(odd)}")
    logarithm = target_name(softmax).startswith(("log_softmax", "_log_softmax"))
    return (softmax, after[-1], Reject(Reason.WEIGHT, softmax, "they are logarithms")) if logarithm else None


def _is_closed(twin: Twin, node: Node) -> bool:
    """Is it the twin that does not look further here?"""
    entries = twin.history.get(node)
    return not entries or entries[0][1].target is leaf_value


def _path(
    start: Node, following: Callable[[Node], Iterable[Node]], belongs: Callable[[Node], bool]
) -> list[Node] | None:
    """The nodes from `start` to the nearest product, `start` left out, the product last.

    The value product itself has lost the key axis, so only what leads to a product must belong to the scores.
    """
    came_from = {start: start}
    queue = [start]
    for node in queue:  # grows while it is walked
        for n in following(node):
            if n in came_from or target_name(n) in table.SHAPE_ONLY:
                continue
            came_from[n] = node
            if is_product(n):
                path = [n]
                while came_from[path[-1]] is not start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if belongs(n):
                queue.append(n)
    return None


# *** shapes ***


def _keys(twin: Twin, softmax: Node) -> str | None:
    """The size of the axis that is normalised, the last one where the twin does not know."""
    sizes = _sizes(softmax)
    inside = [t for t, user in twin.origin.items() if user is softmax and t.target in table.SOFTMAX]
    dim = int(inside[0].args[1]) if inside else -1  # type: ignore[arg-type]
    return sizes[dim] if len(sizes) > max(dim, 1) else None


def _keeps(keys: str, scores: _Sizes, sizes: _Sizes) -> bool:
    """Does a value of these sizes still have the key axis, and one more axis of the scores?"""
    if keys not in sizes:
        return False
    rest, others = list(scores), list(sizes)
    rest.remove(keys)
    others.remove(keys)
    return any(s in others for s in rest if s != "1")


def _sizes(node: Node) -> _Sizes:
    tensors = _tensors(node)
    return _texts(tensors[0]) if tensors else []


def _texts(tensor: torch.Tensor) -> _Sizes:
    """The sizes as text: comparing run-time sizes would add guards."""
    return [str(s) for s in tensor.shape]


def _tensors(node: Node) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(example_value(node)) if isinstance(v, torch.Tensor)]
