"""Looking through what changes no value: views, casts and copies; reductions, numbers and terms behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .. import aten as table

aten = torch.ops.aten


PATH = (table.VIEWS | table.CASTS) - {"split", "split_with_sizes", "unbind", "chunk", "repeat"}
SAME_VALUE = frozenset({"alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "_to_copy", "detach"})


def peel(node: Any) -> Any:
    """The node that first has this value, whatever its float dtype and memory.

    Stops where eager stops the gradient: a part that is detached is no part of a softmax.
    """
    while is_op(node, *SAME_VALUE, *_IN_PLACE) and not _is_integer_cast(node) and not _moves(node):
        node = node.args[0]
    return node


# Views that einsum and broadcasting leave behind where there is nothing to do.
_IN_PLACE = ("permute", "expand", "view")


def _moves(node: Node) -> bool:
    """Is it a view by which values come to stand elsewhere?"""
    if table.name_of(node) == "permute":
        return list(node.args[1]) != list(range(rank_of(node)))  # type: ignore[arg-type]
    return table.name_of(node) in _IN_PLACE and not same_shape(node, node.args[0])  # type: ignore[arg-type]


def is_op(node: Any, *names: str) -> bool:
    """One of these operations, and no stop of the gradient."""
    return isinstance(node, Node) and table.name_of(node) in names and not node.meta.get("stop")


def _is_integer_cast(node: Node) -> bool:
    values = [n.meta["val"] for n in (node, node.args[0])]  # type: ignore[union-attr]
    return not all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values) and is_op(node, "_to_copy")


def peel_broadcast(node: Any) -> Any:
    node = peel(node)
    while is_op(node, "expand", "expand_as"):
        node = peel(node.args[0])
    return node


def peel_item(node: Any) -> Any:
    """`max(dim)` gives values and indices: its first item counts as the reduction."""
    node = peel_broadcast(node)
    if is_op(node, "getitem") and node.args[1] == 0:
        return node.args[0]
    return node


def walk_up(node: Any) -> tuple[Any, list[Node]]:
    path: list[Node] = []
    while is_op(node, *PATH) and not _is_integer_cast(node):
        path.append(node)
        node = node.args[0]
    return node, path[::-1]


def shape_of(node: Node) -> Any:
    return node.meta["val"].shape


def rank_of(node: Node) -> int:
    return len(shape_of(node))


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def size_texts(node: Node) -> list[str]:
    """The sizes as text: comparing run-time sizes would add guards."""
    return [str(size) for size in shape_of(node)]


def same_shape(a: Node, b: Node) -> bool:
    return size_texts(a) == size_texts(b)


def is_row_constant(value: Any, like: Node, dim: int) -> bool:
    """Broadcast against `like`, does the value stay the same along `dim`?"""
    value = peel_broadcast(value)
    if not isinstance(value, Node):
        return isinstance(value, (int, float))
    held = value.meta.get("val")
    if not isinstance(held, torch.Tensor):
        return isinstance(held, (int, float, torch.SymInt, torch.SymFloat))
    if held.dim() > rank_of(like):
        return False
    at = dim - (rank_of(like) - held.dim())
    return at < 0 or (is_one(held.shape[at]) and not is_one(shape_of(like)[dim]))


REDUCTIONS = (
    aten.sum.dim_IntList, aten.amax.default, aten.max.dim, aten.logsumexp.default, aten.any.dim, aten.all.dim,
)  # fmt: skip


def reduction_of(node: Any, names: tuple[str, ...]) -> tuple[Node, int] | None:
    """(what is reduced, over which dimension) where the node is such a reduction, its dimension kept or put back."""
    node = peel_broadcast(node)
    put_back = None
    if is_op(node, "unsqueeze"):
        put_back = int(node.args[1]) % rank_of(node)  # type: ignore[arg-type]
        node = peel(node.args[0])
    if not is_op(node, *names) or node.target not in REDUCTIONS:
        return None
    source, dims, keeps = node.args[0], argument_of(node, 1), bool(argument_of(node, 2))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(source, Node) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    dim = int(dims[0]) % rank_of(source)
    return (source, dim) if (keeps and put_back is None) or (not keeps and put_back == dim) else None


def argument_of(node: Node, position: int) -> Any:
    """A positional argument, also where it was given by name or left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    argument = node.target._schema.arguments[position]
    return node.args[position] if len(node.args) > position else node.kwargs.get(argument.name, argument.default_value)


def number_of(value: Any) -> float | None:
    """The one number that a literal or a filled tensor holds."""
    value = peel(value)
    if isinstance(value, Node):
        at = {"scalar_tensor": 0, "full": 1}.get(table.name_of(value))
        value = 0 if table.name_of(value) in ("zeros", "zeros_like") else None if at is None else value.args[at]
    return value if isinstance(value, (int, float)) else None


def _is_zero(value: Any) -> bool:
    return number_of(value) == 0


def is_minus_infinity(value: Any) -> bool:
    return number_of(value) == -math.inf


def terms_of(node: Any) -> Iterator[Any]:
    inner = peel(node)
    if is_op(inner, "add") and not inner.kwargs:
        yield from terms_of(inner.args[0])
        yield from terms_of(inner.args[1])
    else:
        yield node


def zeroed_by(node: Node) -> tuple[Node, Node, bool] | None:
    """(value, bool condition, whether the condition marks the zeros)"""
    if table.name_of(node) == "masked_fill":
        return (node.args[0], node.args[1], True) if _is_zero(node.args[2]) else None  # type: ignore[return-value]
    if table.name_of(node) == "where":
        condition, x, y = node.args
        if _is_zero(y):
            return x, condition, False  # type: ignore[return-value]
        return (y, condition, True) if _is_zero(x) else None  # type: ignore[return-value]
    for value, mask in (node.args, reversed(node.args)):
        if is_op(mask, "_to_copy"):
            mask = mask.args[0]
        if isinstance(value, Node) and isinstance(mask, Node) and mask.meta["val"].dtype is torch.bool:
            return value, mask, False
    return None


def is_same_value(a: Any, b: Any, depth: int = 8) -> bool:
    """The same node but for memory and dtype, or the same operations on such nodes."""
    a, b = peel(a), peel(b)
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a is b or (type(a) is type(b) and isinstance(a, (int, float, bool)) and a == b)
    kept = table.name_of(a) in ("expand", "getitem", "unsqueeze")
    known = kept or table.name_of(a) in table.POINTWISE or a.target in REDUCTIONS
    alike = (
        depth > 0 and known and a.target is b.target and not a.kwargs and not b.kwargs and len(a.args) == len(b.args)
    )
    stopped = any(n.meta.get("stop") for n in (a, b))
    return alike and not stopped and all(_same_argument(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _same_argument(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_argument, a, b, [depth] * len(a)))
    return is_same_value(a, b, depth)


def depends_on_product(node: Node, limit: int = 1000) -> bool:
    """Is the value made from a matrix product nearby (so that it is no tensor one could capture)?"""
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) < limit:
        n = stack.pop()
        if n.target is table.BMM:
            return True
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return False
