"""Softmax in the exponent.

    exp(log_softmax(x)), exp(x - logsumexp(x)), exp(x - (c + log(sum(exp(x - c)))))
    exp(x - logaddexp(logsumexp(x), y))             with a sink
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import aten as table
from ..normalize import Twin, numbers_in
from .columns import column_of
from .editing import softmax_for
from .looking import (
    is_op,
    is_row_constant,
    is_same_value,
    peel,
    peel_broadcast,
    rank_of,
    reduction_of,
    same_shape,
    terms_of,
)
from .quotients import Row, floored_at, normalised_row


def replace_logarithms(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if table.name_of(node) != "exp":
            continue
        inner = peel(node.args[0])
        if is_op(inner, "_log_softmax"):
            x, dim = inner.args[0], int(inner.args[1]) % rank_of(node)  # type: ignore[arg-type]
            twin.take_place(node, softmax_for(twin, node, x, dim), (inner,))  # type: ignore[arg-type]
        elif is_op(inner, "sub") and not inner.kwargs:
            x, total = inner.args
            if not isinstance(x, Node) or not same_shape(x, node):
                continue
            found = None if _loses_logarithm(x) else _log_total(total, x)
            if found is not None:
                twin.take_place(node, softmax_for(twin, node, x, *found), (inner,))
            elif (row := _less_logarithm(twin, x, total, node)) is not None:
                new = softmax_for(twin, node, row.x, row.dim, row.sink, traits=row.traits)
                twin.take_place(node, new, (inner,))


def _log_total(total: Any, x: Node) -> tuple[int, Any] | None:
    """(dimension, sink) where the node is the logarithm of sum(exp(x)), or of this and exp(sink)."""
    reduced = reduction_of(total, ("logsumexp",))
    if reduced is not None:
        source, dim = reduced
        column = column_of(source, dim)
        if column is not None and peel(column.scores) is peel(x):
            return dim, column.sink
        return (dim, None) if peel(source) is peel(x) else None
    total = peel_broadcast(total)
    if not is_op(total, "logaddexp"):
        return None
    for inner, sink in (total.args, reversed(total.args)):
        found = _log_total(inner, x)
        if found is not None and found[1] is None and is_row_constant(sink, x, found[0]):
            return found[0], sink
    return None


def _less_logarithm(twin: Twin, z: Node, total: Any, before: Node) -> Row | None:
    """exp(z - log(d)) is exp(z) / d, and exp(z - (c + log(d))) is exp(z - c) / d."""
    terms = list(terms_of(peel_broadcast(total)))
    logarithms = [t for t in map(peel_broadcast, terms) if is_op(t, "log")]
    if len(logarithms) != 1 or len(terms) > 2:
        return None
    shifts = [t for t in terms if peel_broadcast(t) is not logarithms[0]]
    if shifts and _loses_logarithm(z):
        return None
    denominator: Node = logarithms[0].args[0]
    summed = [peel(r[0]) for t in terms_of(floored_at(denominator)[0]) if (r := reduction_of(t, ("sum",)))]
    exponential = next((e for e in summed if is_op(e, "exp") and _is_shifted(e.args[0], z, shifts)), None)
    row = None if exponential is None else normalised_row(twin, exponential, denominator, before)
    if row is None or not same_shape(row.exponential, before) or (shifts and "raw" in row.traits):
        return None
    return replace(row, traits=tuple("logged" if trait == "raw" else trait for trait in row.traits))


def _is_shifted(exponent: Any, z: Node, shifts: list[Any]) -> bool:
    """Is the exponent z less the shift, or z itself where there is none?"""
    if not shifts:
        return is_same_value(exponent, z)
    inner = peel(exponent)
    return (
        is_op(inner, "sub")
        and not inner.kwargs
        and is_same_value(inner.args[0], z)
        and is_same_value(peel_broadcast(inner.args[1]), peel_broadcast(shifts[0]))
    )


def _loses_logarithm(x: Node) -> bool:
    """Are scores filled with numbers beside which log(n) vanishes? Rows of such fills have weights of 1 each, not 1 / n."""
    greatest = 0.01 / torch.finfo(x.meta["val"].dtype).eps
    return any(greatest < abs(a) < math.inf for a in numbers_in([x]))
