"""Shifts by hand, constant along a row, change nothing and go.

    softmax((x - max(x)) * alpha)                   a mean or a minimum too, where nothing masks x
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import aten as table
from ..normalize import Twin, closure
from .editing import insert_node, traits_of
from .looking import (
    PATH,
    depends_on_product,
    is_minus_infinity,
    is_op,
    is_row_constant,
    peel,
    peel_item,
    rank_of,
    same_shape,
)

aten = torch.ops.aten


def split_shift(z: Node, dim: int) -> tuple[Node, Node | None]:
    """(x, c) of x - c with c constant along the row and made from the scores; (z, None) otherwise."""
    inner = peel(z)
    if is_op(inner, "sub") and not inner.kwargs and isinstance(inner.args[0], Node):
        x, c = inner.args
        if isinstance(c, Node) and is_row_constant(c, x, dim) and depends_on_product(c) and _is_maximum(c):
            return x, c  # type: ignore[return-value]
    return z, None


def _is_maximum(shift: Node) -> bool:
    """A maximum is finite where the row has a key; a mean or a minimum of a masked row is not."""
    node = peel_item(shift)
    while isinstance(node, Node) and table.name_of(node) in (*PATH, "clamp", "clamp_min", "maximum", "detach"):
        node = peel_item(node.args[0])
    return isinstance(node, Node) and table.name_of(node) in ("amax", "max", "logsumexp")


def may_be_infinite(shift: Node) -> bool:
    """Is the maximum of a row of -inf itself -inf? Not where it is kept above another number."""
    node = peel_item(shift)
    while isinstance(node, Node) and table.name_of(node) in PATH | {"detach"}:
        node = peel_item(node.args[0])
    return table.name_of(node) in ("amax", "max", "logsumexp")


def drop_shifts(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if node.target in table.SOFTMAX:
            dim = int(node.args[1]) % max(rank_of(node), 1)  # type: ignore[arg-type]
            x = _without_shift(twin, node.args[0], dim, node)
            if x is not None:
                new = insert_node(twin, node, node.target, x, *node.args[1:], val=node.meta["val"], like=node)
                if node in twin.sinks:
                    continue  # the sink would have to shift too
                new.meta.update(dict.fromkeys(traits_of(node), True))
                twin.take_place(node, new)


def _without_shift(twin: Twin, z: Any, dim: int, before: Node) -> Node | None:
    """z less a shift that is constant along the row, anywhere in a sum, under factors and -inf masks; None: no shift."""
    if not isinstance(z, Node) or not z.args or rank_of(z) != rank_of(before):
        return None
    x, shift = split_shift(z, dim) if table.name_of(z) == "sub" else (z, None)
    if shift is not None or (x := _less_finite_shift(z, dim)) is not None:  # type: ignore[assignment]
        return x
    if (turned := _subtracted_from_shift(z, dim)) is not None:
        return insert_node(twin, before, aten.neg.default, turned, val=z.meta["val"], like=z)
    for position in _shiftable(z, dim):
        inner = _without_shift(twin, z.args[position], dim, before)
        if inner is not None:
            args = [*z.args]
            args[position] = inner
            new = insert_node(twin, before, z.target, *args, val=z.meta["val"], like=z, **z.kwargs)
            if z.meta.get("stop"):
                new.meta["stop"] = True
                twin.stops.add(new)
            return new
    return None


def _less_finite_shift(z: Node, dim: int) -> Node | None:
    """x of x - c where c is a mean, say, of scores that nothing masks: constant along the row, and certainly finite.

    Nor may x be masked before: the gradient of a row without a key is NaN in x, and reaches all of its scores by c.
    """
    if not is_op(z, "sub") or z.kwargs or not all(isinstance(a, Node) for a in z.args):
        return None
    x, c = z.args
    harmless = is_row_constant(c, x, dim) and depends_on_product(c) and _is_unmasked(z)  # type: ignore[arg-type]
    return x if harmless and same_shape(x, z) else None  # type: ignore[arg-type, return-value]


_FINITE_OF_ONE = table.VIEWS | table.CASTS | {"neg", "mean", "sum", "amin", "amax"}


def _is_unmasked(node: Node) -> bool:
    """Is the value made of matrix products and moderate numbers alone, by what leaves them finite?"""

    def values(n: Node) -> list[Node]:
        read = () if n.target is table.BMM else n.all_input_nodes
        return [a for a in read if isinstance(a.meta.get("val"), torch.Tensor)]  # no run-time sizes

    made = closure([node], values)
    return all(n.target is table.BMM or _keeps_finite(n) for n in made)


def _keeps_finite(node: Node) -> bool:
    operation = table.name_of(node)
    if operation in _FINITE_OF_ONE:
        return True
    if operation not in ("add", "sub", "mul", "div") or node.kwargs:
        return False
    moderate = all(1e-3 <= abs(a) <= 1e3 for a in node.args if isinstance(a, (int, float)))
    return moderate and not (operation == "div" and isinstance(node.args[1], Node))


def _subtracted_from_shift(z: Node, dim: int) -> Node | None:
    """x of c - x"""
    if not is_op(z, "sub") or z.kwargs or not all(isinstance(a, Node) for a in z.args):
        return None
    c, x = z.args
    shifts = is_row_constant(c, x, dim) and depends_on_product(c) and _is_maximum(c)  # type: ignore[arg-type]
    return x if shifts and same_shape(x, z) else None  # type: ignore[arg-type, return-value]


def _shiftable(z: Node, dim: int) -> tuple[int, ...]:
    """Arguments to which a constant along the row may be added without changing the softmax of the result."""
    operation = table.name_of(z)
    if operation == "add" and not z.kwargs:
        return 0, 1
    if operation == "sub" and not z.kwargs:
        return (0,)
    if operation in ("mul", "div") and is_row_constant(z.args[1], z, dim):
        return (0,)
    if operation in ("_to_copy", "clone", "alias"):
        return (0,)
    if operation == "masked_fill" and is_minus_infinity(z.args[2]):
        return (0,)
    if operation == "where":
        if is_minus_infinity(z.args[2]):
            return (1,)
        return (2,) if is_minus_infinity(z.args[1]) else ()
    return ()
