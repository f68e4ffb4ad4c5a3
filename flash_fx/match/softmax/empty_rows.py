"""Rows without a key, whose NaN is replaced by 0: `_safe_softmax`.

    nan_to_num(softmax(x)), where(isnan(w), 0, w)   isnan is also w != w, and any of its row
    where((x == -inf).all(), 0, softmax(x))
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import aten as table
from ..normalize import Twin
from .editing import softmax_for, traits_of
from .looking import (
    argument_of,
    is_minus_infinity,
    peel,
    peel_broadcast,
    peel_item,
    rank_of,
    reduction_of,
    same_shape,
    zeroed_by,
)


def replace_guards(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        weights = _guarded(node)
        inner = peel(weights)
        found = isinstance(inner, Node) and inner.target in table.SOFTMAX and inner not in twin.sinks
        if found and same_shape(inner, node):
            dim = int(inner.args[1]) % max(rank_of(inner), 1)  # type: ignore[arg-type]
            new = softmax_for(twin, node, inner.args[0], dim, safe=True, traits=traits_of(inner))  # type: ignore[arg-type]
            twin.take_place(node, new, (inner,))


def _guarded(node: Node) -> Any:
    """w where the node is w with 0 for NaN, or for the rows of -inf that make it NaN."""
    operation = table.name_of(node)
    if operation == "nan_to_num":
        return node.args[0] if not argument_of(node, 1) else None
    found = zeroed_by(node) if operation in ("masked_fill", "where") else None
    if found is None:
        return None
    value, condition, marks_zeros = found
    softmax = peel(value)
    if not isinstance(softmax, Node) or softmax.target not in table.SOFTMAX:
        return None
    test, marks_zeros = _without_not(condition, marks_zeros)
    dim = int(softmax.args[1]) % max(rank_of(softmax), 1)  # type: ignore[arg-type]
    found_empty = (_is_row_of_nan(test, softmax, dim), _is_empty_row(test, softmax.args[0], dim))
    return value if marks_zeros in found_empty else None


def _is_row_of_nan(test: Node, softmax: Node, dim: int) -> bool | None:
    """True where the test says that a weight is NaN, False where it says the opposite, None where it is no such test.

    All weights of a row are NaN or none, so that any and all of them say the same.
    """
    holds, row = True, reduction_of(test, ("any", "all"))
    if row is not None and row[1] == dim:
        test, holds = _without_not(row[0], True)
    compared = _compared_with_itself(test)
    same = compared is not None and peel(compared[0]) is softmax
    return compared[1] is holds if same and compared is not None else None


def _compared_with_itself(test: Node) -> tuple[Any, bool] | None:
    """(x, True) where the test holds where x is NaN: isnan(x) or x != x; (x, False) where the opposite does."""
    operation = table.name_of(test)
    if operation == "isnan":
        return test.args[0], True
    if operation in ("ne", "eq") and test.args[0] is test.args[1]:
        return test.args[0], operation == "ne"
    return None


def _without_not(condition: Any, holds: bool) -> tuple[Node, bool]:
    """(test, whether the condition holds where the test does)"""
    test = peel_broadcast(condition)
    while table.name_of(test) in ("logical_not", "bitwise_not"):
        test, holds = peel_broadcast(test.args[0]), not holds
    return test, holds


def _is_empty_row(test: Node, x: Any, dim: int) -> bool | None:
    """True where the test says that a row of x is all -inf, False where it says the opposite, None where it is no such test."""
    greatest = _compared_with_minus_infinity(test)
    if greatest is not None:
        reduced = reduction_of(peel_item(greatest[0]), ("amax", "max"))
        return greatest[1] if reduced is not None and peel(reduced[0]) is peel(x) and reduced[1] == dim else None
    for reduction, wanted in (("all", True), ("any", False)):
        reduced = reduction_of(test, (reduction,))
        if reduced is not None and reduced[1] == dim:
            each, holds = _without_not(reduced[0], True)
            compared = _compared_with_minus_infinity(each)
            same = compared is not None and peel(compared[0]) is peel(x)
            return wanted if same and compared is not None and (compared[1] is holds) is wanted else None
    return None


def _compared_with_minus_infinity(test: Node) -> tuple[Any, bool] | None:
    """(x, True) where the test is x == -inf; (x, False) where it is x != -inf or x > -inf."""
    operation = table.name_of(test)
    if operation == "isneginf":
        return test.args[0], True
    if operation not in ("eq", "ne", "gt") or not is_minus_infinity(test.args[1]):
        return None
    return test.args[0], operation == "eq"
