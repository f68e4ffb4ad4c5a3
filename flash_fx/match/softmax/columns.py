"""A sink as one more column of the scores, which is cut off again.

    softmax(cat([x, y]))[..., :-1]                  last or first, also by padding
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import aten as table
from ..normalize import Twin
from .editing import softmax_for, traits_of
from .looking import SAME_VALUE, argument_of, is_one, is_op, peel, rank_of, shape_of
from .shifts import split_shift

aten = torch.ops.aten


@dataclass(frozen=True)
class _Column:
    """Scores with one more column, the sink: the first one or the last."""

    scores: Node
    sink: Any
    first: bool


def column_of(joined: Any, dim: int) -> _Column | None:
    """Scores and sink where the node is both side by side along `dim`, joined or padded with a number."""
    joined = peel(joined)
    if is_op(joined, "constant_pad_nd"):
        scores, pads, *value = joined.args
        back = 2 * (rank_of(joined) - 1 - dim)  # pads count from the last dimension
        number, fixed = float(value[0]) if value else 0.0, all(isinstance(p, int) for p in pads)
        if not fixed or sum(map(abs, pads)) != 1 or 1 not in pads[back : back + 2] or not math.isfinite(number):
            return None
        return None if is_one(shape_of(scores)[dim]) else _Column(scores, number, first=pads[back] == 1)
    if not is_op(joined, "cat") or int(argument_of(joined, 1)) % rank_of(joined) != dim or len(joined.args[0]) != 2:
        return None
    pieces = joined.args[0]
    if any(rank_of(p) != rank_of(joined) for p in pieces):
        return None  # `cat` skips tensors of shape [0]
    single = [is_one(shape_of(p)[dim]) for p in pieces]
    if sum(single) != 1:
        return None
    return _Column(pieces[single.index(False)], pieces[single.index(True)], first=single[0])


def replace_columns(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if node.target is not aten._softmax.default:
            continue
        dim = int(node.args[1]) % max(rank_of(node), 1)
        z, _ = split_shift(node.args[0], dim)  # type: ignore[arg-type]
        column = column_of(z, dim)
        if column is None:
            continue
        users = [n for n in _users_of_value(node) if n.users or n in twin.roots]
        if users and all(_drops_sink(u, dim, column) for u in users):
            for u in users:
                new = softmax_for(twin, u, column.scores, dim, sink=column.sink, traits=traits_of(node))
                twin.take_place(u, new, (node, peel(z)))


def _users_of_value(node: Node) -> list[Node]:
    """Who reads the value, the pieces of it where it is split."""
    out: list[Node] = []
    for user in node.users:
        through = is_op(user, *SAME_VALUE) or table.name_of(user) in ("split", "split_with_sizes")
        out += _users_of_value(user) if through else [user]
    return out


def _drops_sink(node: Node, dim: int, column: _Column) -> bool:
    """Is the node all of the value along `dim` but the sink: x[..., :-1], x[..., 1:], or that piece of a split?"""
    part = shape_of(node)[dim] if isinstance(node.meta["val"], torch.Tensor) and rank_of(node) > dim else None
    if str(part) != str(shape_of(column.scores)[dim]):
        return False
    if is_op(node, "getitem"):
        split: Node = node.args[0]  # type: ignore[assignment]
        rank = rank_of(split.args[0])  # type: ignore[arg-type]
        start = _start_of_piece(split, dim, int(node.args[1]))  # type: ignore[call-overload]
        return int(argument_of(split, 2)) % rank == dim and start == int(column.first)
    if table.name_of(node) != "slice" or int(argument_of(node, 1)) % rank_of(node) != dim:
        return False
    start, step, whole = argument_of(node, 2) or 0, argument_of(node, 4), shape_of(node.args[0])[dim]  # type: ignore[arg-type]
    if isinstance(start, int) and isinstance(whole, int) and start < 0:
        start += whole
    return start == int(column.first) and step == 1


def _start_of_piece(split: Node, dim: int, position: int) -> int | None:
    """Where the piece begins; None where a size before it is known at run time only."""
    sizes = [piece.shape[dim] for piece in split.meta["val"][:position]]
    return sum(sizes) if all(isinstance(s, int) for s in sizes) else None
