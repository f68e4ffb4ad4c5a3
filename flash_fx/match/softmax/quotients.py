"""exp over its sum: what a quotient says about scores, shift and the extra term of its denominator.

    exp(x - c) / (sum(exp(x - c)) + exp(y - c))     softmax with one more term y in the denominator (a sink)
    exp(x) / (sum(exp(x)) + 1e-6)                   the same with y = log(1e-6)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import aten as table
from ..normalize import Twin
from .editing import insert_node
from .looking import (
    argument_of,
    is_op,
    is_row_constant,
    is_same_value,
    number_of,
    peel,
    peel_broadcast,
    peel_item,
    rank_of,
    reduction_of,
    same_shape,
    shape_of,
    terms_of,
    zeroed_by,
)
from .shifts import may_be_infinite, split_shift

aten = torch.ops.aten


@dataclass(frozen=True)
class Row:
    """exp(z) over its sum: the exponential, the score x with no shift, the sink, the dimension.

    Traits: `raw`, z has not its maximum subtracted, so that a row of large negative scores is 0 / 0 (`lift.UNDERFLOW`);
    `logged`, the same under a logarithm, by which such a row is exp(inf);
    `unsaved`, a row of -inf less its maximum is NaN in spite of the sink.
    """

    exponential: Node
    x: Node
    sink: Any
    dim: int
    traits: tuple[str, ...]


def quotient(node: Node) -> tuple[Node, Node] | None:
    operation = table.name_of(node)
    if operation in ("div", "true_divide") and not node.kwargs and all(isinstance(a, Node) for a in node.args):
        return node.args  # type: ignore[return-value]
    if operation == "mul":
        for a, b in (node.args, reversed(node.args)):
            inverse = peel(b)
            inverts = is_op(inverse, "reciprocal") or (is_op(inverse, "pow") and inverse.args[1] == -1)
            if inverts and isinstance(a, Node):
                return a, inverse.args[0]  # type: ignore[return-value]
    return None


def normalised_row(twin: Twin, numerator: Node, denominator: Node, before: Node) -> Row | None:
    exponential = peel(numerator)
    z = _exponent(twin, exponential, before)
    if z is None:
        return None
    total, others = None, []
    for term in terms_of(_without_floor(denominator, exponential)):
        reduced = reduction_of(term, ("sum",)) or _absolute_sum(term)
        if total is None and reduced is not None and is_same_value(reduced[0], exponential):
            total = reduced
        else:
            others.append(term)
    if total is None or len(others) > 1:
        return None
    dim = total[1]
    x, shift = split_shift(z, dim)
    sink = _sink(others[0], z, shift, dim) if others else None
    if others and sink is None:
        return None
    traits = ("raw",) if shift is None else ("unsaved",) if others and may_be_infinite(shift) else ()
    return Row(exponential, x, sink, dim, traits)


def _exponent(twin: Twin, node: Any, before: Node) -> Node | None:
    """z where the node is exp(z), or exp(z) with zeros where a mask says so, which is exp(-inf)."""
    if is_op(node, "exp"):
        return node.args[0]
    if is_op(node, "exp2"):
        z: Node = node.args[0]
        return insert_node(twin, before, aten.mul.Tensor, z, math.log(2), val=z.meta["val"], like=z)
    if not is_op(node, "masked_fill", "where", "mul"):
        return None
    found = zeroed_by(node)
    if found is None:
        return None
    kept, condition, inverted = found
    inner = peel(kept)
    if not is_op(inner, "exp"):
        return None
    z = inner.args[0]  # type: ignore[assignment]
    val = z.meta["val"]
    fill = insert_node(twin, before, aten.scalar_tensor.default, -math.inf, dtype=val.dtype, val=val.new_empty(()), like=z)
    twin.requires_grad.discard(fill)
    branches = (fill, z) if inverted else (z, fill)
    return insert_node(twin, before, aten.where.self, condition, *branches, val=val.expand(shape_of(node)), like=z)


_LOST = 2.0**-25  # added to a float32 number of at least 1 it changes nothing


def _without_floor(denominator: Node, exponential: Node) -> Any:
    """max(sum, eps), or sum + eps with an eps that is lost, is the sum where the greatest term is exp(0) = 1."""
    total, floor = floored_at(denominator)
    if floor is None:
        total, floor = _less_lost(denominator)
    z: Any = peel(exponential.args[0]) if is_op(exponential, "exp") else None
    if floor is None or floor >= 1 or not is_op(z, "sub") or z.kwargs:
        return denominator
    greatest = reduction_of(peel_item(z.args[1]), ("amax", "max"))
    return total if greatest is not None and peel(greatest[0]) is peel(z.args[0]) else denominator


def _less_lost(node: Any) -> tuple[Any, float | None]:
    """(x, number) of x + number where the number vanishes beside 1; (the node, None) otherwise."""
    inner = peel_broadcast(node)
    if is_op(inner, "add") and not inner.kwargs:
        for x, number in (inner.args, reversed(inner.args)):
            if 0 <= (number_of(number) or math.inf) <= _LOST:
                return x, number_of(number)
    return node, None


def floored_at(node: Any) -> tuple[Any, float | None]:
    """(x, number) of max(x, number); (the node, None) otherwise."""
    inner = peel_broadcast(node)
    if is_op(inner, "clamp_min", "clamp") and len(inner.args) + len(inner.kwargs) == 2:
        floor = inner.args[1] if len(inner.args) > 1 else inner.kwargs.get("min")
        return inner.args[0], number_of(floor)
    if is_op(inner, "maximum"):
        for x, floor in (inner.args, reversed(inner.args)):
            if number_of(floor) is not None and same_shape(x, inner):
                return x, number_of(floor)
    return node, None


def _absolute_sum(node: Any) -> tuple[Node, int] | None:
    """(what is summed, over which dimension) where the node is a norm of order 1, for an exponential its sum."""
    node = peel_broadcast(node)
    dims = argument_of(node, 2) if is_op(node, "linalg_vector_norm") else None
    if not dims or len(dims) != 1 or argument_of(node, 1) != 1 or not argument_of(node, 3):
        return None
    return node.args[0], int(dims[0]) % rank_of(node)


def _sink(term: Any, z: Node, shift: Node | None, dim: int) -> Any:
    """The logit, relative to the unshifted score, of one more term of the denominator; None where it has none."""
    value, number = peel(term), number_of(term)
    if number is not None:
        return math.log(number) if shift is None and number > 0 else None
    if not is_row_constant(value, z, dim) or not is_op(value, "exp"):
        return None
    logit: Node = value.args[0]  # type: ignore[assignment]
    if shift is None:
        return logit
    inner, c = peel(logit), peel_broadcast(shift)
    if is_op(inner, "neg") and peel_broadcast(inner.args[0]) is c:
        return 0.0
    if is_op(inner, "sub") and not inner.kwargs and peel_broadcast(inner.args[1]) is c:
        return inner.args[0]
    return None
