"""What traces, in-place operations and late dimensions leave behind becomes what people would have written."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .. import aten as table
from ..normalize import Twin, constant_of_trace
from .editing import insert_node
from .looking import REDUCTIONS, argument_of, is_op, number_of, peel, rank_of, same_shape, size_texts

aten = torch.ops.aten


def fill_constants(twin: Twin) -> None:
    """`torch.tensor(1e-6)`, which the trace keeps as an attribute, becomes a tensor filled with the number."""
    for node in list(twin.graph.nodes):
        number = constant_of_trace(twin.graph, node)
        if number is not None:
            val = node.meta["val"]
            new = insert_node(
                twin, node, aten.full.default, list(val.shape), number, dtype=val.dtype, device=val.device, val=val, like=node
            )
            twin.take_place(node, new)


def drop_neutral(twin: Twin) -> None:
    """`x + 0` and `x * 1` are x: the `sum` of Python begins so, `1 / x` is `reciprocal(x) * 1`, an epsilon may be 0."""
    for node in list(twin.graph.nodes):
        x = _less_neutral(node)
        same = x is not None and same_shape(x, node) and x.meta["val"].dtype == node.meta["val"].dtype
        if x is not None and same and node not in twin.stops:
            twin.take_place(node, x)


def _less_neutral(node: Node) -> Node | None:
    """x of x + 0, 0 + x, x - 0, x * 1, 1 * x or x / 1"""
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(table.name_of(node))
    if neutral is None or node.kwargs:
        return None
    x, y = node.args
    if isinstance(x, Node) and number_of(y) == neutral:
        return x
    commutes = table.name_of(node) in ("add", "mul")
    return y if isinstance(y, Node) and number_of(x) == neutral and commutes else None


def replace_copies(twin: Twin) -> None:
    """`copy(x, y)` is y with the shape and dtype of x, whose values nobody reads; nor do `fill(x, 0)` and `zero(x)`."""
    for node in list(twin.graph.nodes):
        if node.meta.get("stop"):
            continue
        if node.target in (aten.fill.Scalar, aten.zero.default):
            twin.take_place(node, _expanded(twin, node, argument_of(node, 1) if len(node.args) > 1 else 0))
        if node.target not in (aten.copy.default, aten.fill.Tensor):
            continue
        val, source = node.meta["val"], node.args[1]
        if source.meta["val"].dtype != val.dtype:
            narrowed = source.meta["val"].to(val.dtype)
            source = insert_node(twin, node, aten._to_copy.default, source, dtype=val.dtype, val=narrowed, like=source)
        if size_texts(source) != size_texts(node):
            source = insert_node(twin, node, aten.expand.default, source, _sizes(val), val=val, like=source)
        twin.take_place(node, source)


def _sizes(val: torch.Tensor) -> list[int]:
    """For the text of a node whose shape is read from its value: PyTorch warns of symbols among arguments."""
    return [n if isinstance(n, int) else -1 for n in val.shape]


def _expanded(twin: Twin, node: Node, number: Any) -> Node:
    """A number in the shape and dtype of the node."""
    val = node.meta["val"]
    scalar = insert_node(twin, node, aten.scalar_tensor.default, number, dtype=val.dtype, val=val.new_empty(()), like=node)
    new = insert_node(twin, node, aten.expand.default, scalar, _sizes(val), val=val, like=node)
    twin.requires_grad -= {scalar, new}
    return new


def replace_dropouts(twin: Twin) -> None:
    """Dropout in place: `x * (bernoulli(p) / p)` is native_dropout with probability 1 - p."""
    for node in list(twin.graph.nodes):
        if table.name_of(node) != "mul" or not all(isinstance(a, Node) for a in node.args):
            continue
        x, noise = node.args
        keep = _survival(noise)
        if keep is None or len(noise.users) != 1 or not same_shape(noise, x):
            continue  # noise that is broadcast drops whole heads or rows at once, as dropout2d does
        val = node.meta["val"]
        both = (val, val.new_empty(val.shape, dtype=torch.bool))
        args = (x, round(1.0 - keep, 12), True)
        pair = insert_node(twin, node, aten.native_dropout.default, *args, val=both, like=node)  # type: ignore[arg-type]
        twin.take_place(node, insert_node(twin, node, operator.getitem, pair, 0, val=val, like=node))


def _survival(noise: Node) -> float | None:
    """p where the node is bernoulli(p) / p"""
    if table.name_of(noise) != "div" or noise.kwargs or not isinstance(noise.args[0], Node):
        return None
    drawn, p = noise.args[0], noise.args[1]
    same = table.name_of(drawn) == "bernoulli" and len(drawn.args) > 1 and drawn.args[1] == p
    return p if same and isinstance(p, float) and len(drawn.users) == 1 else None


def put_dimensions_back(twin: Twin) -> None:
    """`(1 / x.sum(-1)).unsqueeze(-1)` is `1 / x.sum(-1).unsqueeze(-1)`: the dimension is put back where it was reduced."""
    pending = [n for n in twin.graph.nodes if table.name_of(n) == "unsqueeze"]
    while pending:
        node = pending.pop()
        inner = node.args[0]
        if not is_op(node, "unsqueeze") or not is_op(inner, *table.POINTWISE) or not _is_of_reductions(inner):
            continue
        moved = [_unsqueezed(twin, a, node) if isinstance(a, Node) else a for a in inner.args]
        new = insert_node(twin, node, inner.target, *moved, val=node.meta["val"], like=inner, **inner.kwargs)
        twin.take_place(node, new, (inner,))
        pending += [a for a in moved if isinstance(a, Node) and table.name_of(a) == "unsqueeze"]


def _is_of_reductions(node: Any) -> bool:
    """Is it computed, number by number, from reductions of its own shape that drop their dimension?"""
    operation, inner = table.name_of(node), peel(node)
    if inner is not node:
        return _is_of_reductions(inner)
    if operation == "getitem":
        return node.args[1] == 0 and node.args[0].target is aten.max.dim and not argument_of(node.args[0], 2)
    if node.target in REDUCTIONS:
        return not argument_of(node, 2)
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    plain = operation in table.POINTWISE and bool(tensors) and all(isinstance(v, torch.Tensor) for v in _values(node))
    return plain and all(rank_of(a) == 0 or (same_shape(a, node) and _is_of_reductions(a)) for a in tensors)


def _values(node: Node) -> list[Any]:
    return [a.meta.get("val") for a in node.all_input_nodes]


def _unsqueezed(twin: Twin, x: Node, like: Node) -> Node:
    if rank_of(x) == 0:
        return x
    dim = like.args[1]
    return insert_node(twin, like, aten.unsqueeze.default, x, dim, val=x.meta["val"].unsqueeze(dim), like=x)
