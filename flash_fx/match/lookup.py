"""Tables of relative positions: `table[index]`, `nn.Embedding(buckets)`, `table.index_select(0, index.view(-1))`.

A bias that is looked up has as many elements as the scores of all heads, and training would save it. Two ways lead
around it (docs/design.md, Tables):

    along diagonals    the positions depend on key - query alone: the user's own lookup, at one pair for each diagonal
    row numbers        any other positions: the same lookup reads row numbers instead of rows, and the program the table

Either way the user's own operation sees every position it would have seen, so it wraps negative ones and raises for
those beyond the table as it always did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ..score.expr import Expr, load, walk
from .additions import Additions
from .aten import name_of
from .diagonal import PAIR, along_diagonals

if TYPE_CHECKING:
    from .pull import Index, Puller

aten = torch.ops.aten
_SAME_ELEMENTS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze", "squeeze", "alias", "clone"}
)  # fmt: skip


@dataclass(frozen=True)
class Lookup:
    """`at[d]` holds positions in dimension d of the table; the result has their common dimensions at `first`."""

    node: Node
    table: Node
    at: dict[int, Node]
    first: int
    rank: int

    def positions(self, index: Index) -> Index:
        """The part of an index into the result that is an index into the positions."""
        return index[self.first : self.first + self.rank]

    def others(self, index: Index) -> Index:
        """The part that is an index into the dimensions of the table that are not looked up, in their order."""
        return index[: self.first] + index[self.first + self.rank :]

    def again(self, extra: Additions, table: Node, at: dict[int, Node]) -> Node:
        """The same operation on another table or other positions."""
        operation = name_of(self.node)
        if operation == "embedding":
            return extra.call(self.node.target, table, at[0], *self.node.args[2:])
        if operation == "index_select":
            ((dim, positions),) = at.items()
            return extra.call(self.node.target, table, dim, positions)
        return extra.call(self.node.target, table, [at.get(d) for d in range(max(at) + 1)])


def lookup_of(node: Node) -> Lookup | None:
    """The node as a Lookup; None if it is none, or one whose gradient is not the plain sum."""
    if node.kwargs:
        return None
    read = _READERS.get(name_of(node))
    found = None if read is None else read(node)
    plain = found is not None and all(p.meta["val"].dtype in (torch.int32, torch.int64) for p in found.at.values())
    return found if plain else None


def _embedding(node: Node) -> Lookup | None:
    weight, positions, *more = node.args
    if any(more[1:]):
        return None  # scaled by frequency, or sparse
    return Lookup(node, weight, {0: positions}, 0, positions.meta["val"].dim())  # type: ignore[arg-type, union-attr]


def _index_select(node: Node) -> Lookup | None:
    source, dim, positions = node.args
    if positions.meta["val"].dim() != 1:  # type: ignore[union-attr]
        return None
    at = dim % source.meta["val"].dim()  # type: ignore[operator, union-attr]
    return Lookup(node, source, {at: positions}, at, 1)  # type: ignore[arg-type, dict-item]


def _index(node: Node) -> Lookup | None:
    source, listed = node.args
    at: dict[int, Node] = {d: p for d, p in enumerate(listed) if p is not None}  # type: ignore[arg-type, union-attr]
    dims = sorted(at)
    if not dims:
        return None
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    rank = max(p.meta["val"].dim() for p in at.values())
    return Lookup(node, source, at, dims[0] if adjacent else 0, rank)  # type: ignore[arg-type]


_READERS = {"embedding": _embedding, "index_select": _index_select, "index": _index}


def look_up(puller: Puller, node: Node, index: Index) -> Expr | None:
    """The value of a lookup at pairs of query and key; None where it is better read as a tensor."""
    found = lookup_of(node)
    if found is None or any(n in puller.cone for n in (found.table, *found.at.values())):
        return None
    if not _names(found.positions(index)) >= PAIR or _names(found.others(index)) & PAIR:
        return None
    return _along_diagonals(puller, found, index) or _by_row_numbers(puller, found, index)


def _along_diagonals(puller: Puller, found: Lookup, index: Index) -> Expr | None:
    """A load from the rows of all diagonals, in order, as the last dimension of a new tensor."""
    wanted = {d: (p, puller.unexpand(p, found.positions(index))) for d, p in found.at.items()}
    reached = along_diagonals(puller, wanted)
    if reached is None:
        return None
    rows = found.again(puller.extra, found.table, reached.values)
    last = rows.meta["val"].dim() - 1
    if found.first != last:  # neighbouring keys are read together
        order = [d for d in range(last + 1) if d != found.first] + [found.first]
        rows = puller.extra.call(aten.permute.default, rows, order)
        rows = puller.extra.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    return load(puller.capture_as(rows), *found.others(index), reached.position)


def _by_row_numbers(puller: Puller, found: Lookup, index: Index) -> Expr | None:
    """`c0[c1[q_idx, kv_idx], h]`, where training would save more than the positions."""
    skips_a_row = name_of(found.node) == "embedding" and found.node.args[2:3] not in ((), (-1,))  # it has no gradient
    if skips_a_row or not puller.gradients or not found.others(index):
        return None
    places: dict[int, Expr] = {}
    for dim, positions in found.at.items():
        source, at = _at_source(puller, positions, puller.unexpand(positions, found.positions(index)))
        places[dim] = load(puller.capture_as(_row_numbers(puller.extra, found, dim, source)), *at)
    others = iter(found.others(index))
    rank = found.table.meta["val"].dim()
    return load(puller.capture_as(found.table), *(places[d] if d in places else next(others) for d in range(rank)))


def _row_numbers(extra: Additions, found: Lookup, dim: int, positions: Node) -> Node:
    """The positions, checked and wrapped as the lookup does it: int32, in the shape of `positions`."""
    held = found.table.meta["val"]
    rows = extra.call(aten.arange.default, held.shape[dim], dtype=torch.int32, device=held.device)
    if name_of(found.node) == "index":
        return extra.call(aten.index.Tensor, rows, [positions])
    column = extra.call(aten.unsqueeze.default, rows, 1)  # unlike an index, these take no negative positions
    return extra.call(aten.squeeze.dim, extra.call(aten.embedding.default, column, positions), -1)


def _at_source(puller: Puller, node: Node, index: Index) -> tuple[Node, Index]:
    """Back to the tensor that the positions are a view of, as long as it holds no others."""
    while name_of(node) in _SAME_ELEMENTS and (step := puller.view(node, index)) is not None:
        node, index = step
    return node, index


def _names(index: Index) -> set[Expr]:
    return {n for i in index for n in walk(i)}
