"""Where the operator's result goes: the dimensions and the order in memory of the tensor it replaces.

Users' graphs hold literal `view`s, and two tensors of theirs may share memory, so the result has eager's strides. Only where
its one consumer copies or reads it whatever the strides does the kernel write [B, M, H, D], which makes that copy free.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .match import aten as table
from .match import index as ix
from .match.normalize import Twin, may_mutate
from .match.shapes import Shapes
from .match.site import Site
from .score.expr import Expr

_SIZE_OF = {"b": "B", "h": "H", "m": "M", "d": "DV"}
_COPIES = ("contiguous", "reshape", "flatten")


@dataclass(frozen=True)
class Placement:
    """`order`: letters of the dimensions; `memory`: their order in memory; `replay`: twin views still to be applied.

    `reached` is the twin node with these dimensions; `has_shape` says that its shape is one dimension a letter.
    """

    order: str
    memory: str
    reached: Node
    has_shape: bool
    replay: tuple[Node, ...] = ()


def place(twin: Twin, site: Site, target: Node, result: Node) -> Placement:
    """How to turn [B, H, M, Dv] into the value of `result`, which the user's node `target` holds."""
    path = _path(site.product, result)
    start = "".join(site.out_labels)
    labels: list[str] | None = list(site.out_labels)
    memory = start
    for step in path:
        labels = _follow(step, labels, site.dims)
        if labels is None:
            return Placement(start, start, site.product, False, tuple(path))
        if table.name_of(step) in ("clone", "contiguous"):
            memory = "".join(labels)
    assert labels is not None
    order = "".join(labels)
    if _strides_are_free(twin, target):
        memory = "bmhd" if order == "bmhd" or (order == "bhmd" and all(map(_swaps_heads, target.users))) else "bhmd"
    return Placement(order, memory, result, _one_each(labels, result, site.dims))


def _path(product: Node, result: Node) -> list[Node]:
    path = []
    while result is not product:
        path.append(result)
        result = result.args[0]  # type: ignore[assignment]
    return path[::-1]


def _one_each(labels: list[str], result: Node, dims: dict[str, Expr]) -> bool:
    shapes = Shapes()
    return [shapes.dim(s) for s in result.meta["val"].shape] == [dims[_SIZE_OF[c]] for c in labels if len(c) == 1]


def _strides_are_free(twin: Twin, target: Node) -> bool:
    """One consumer, through at most one transposition, that copies or does not care; and no in-place write afterwards."""
    if len(target.users) != 1:
        return False
    (user,) = target.users
    if _name(user).startswith(("transpose", "permute", "swapaxes")):
        if len(user.users) != 1:
            return False
        (user,) = user.users
    moment = twin.order[target]
    writes_later = any(may_mutate(n) and when > moment for n, when in twin.order.items())
    return not writes_later and (_name(user) in _COPIES or _name(user).endswith("linear"))


def _name(node: Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def _swaps_heads(user: Node) -> bool:
    args = [a for a in user.args[1:] if not isinstance(a, Node)]
    flat = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if _name(user) in ("transpose", "swapaxes"):
        return sorted(d % 4 for d in flat if isinstance(d, int)) == [1, 2]
    return _name(user) == "permute" and [d % 4 for d in flat if isinstance(d, int)] == [0, 2, 1, 3]


def _follow(step: Node, labels: list[str] | None, dims: dict[str, Expr]) -> list[str] | None:
    """Labels of the dimensions after one view, or None if it splits or merges them in another way."""
    assert labels is not None
    operation = table.name_of(step)
    rank = len(labels)
    if operation in ("clone", "alias", "contiguous", "_to_copy"):
        return labels
    if operation == "permute":
        return [labels[d % rank] for d in step.args[1]]  # type: ignore[union-attr, operator, misc]
    if operation == "transpose":
        a, b = (int(d) % rank for d in step.args[1:3])  # type: ignore[arg-type]
        labels = list(labels)
        labels[a], labels[b] = labels[b], labels[a]
        return labels
    if operation in ("view", "_unsafe_view", "reshape"):
        return _regroup("".join(labels), step, dims)
    return None


def _regroup(letters: str, step: Node, dims: dict[str, Expr]) -> list[str] | None:
    left = list(letters)
    out: list[str] = []
    shapes = Shapes()
    for size in step.meta["val"].shape:
        wanted = shapes.dim(size)
        group = ""
        have: Expr = ix.ONE
        while not ix.same(have, wanted):
            if not left:
                return None
            letter = left.pop(0)
            group += letter
            have = ix.mul(have, dims[_SIZE_OF[letter]])
        out.append(group)
    if any(dims[_SIZE_OF[c]] is not ix.ONE for c in left):
        return None
    if left:
        out[-1] += "".join(left)
    return out
