"""Conditions on weights: `where(c, softmax(s), 0)`, and what they say about rows without a key.

A condition that is false in every row without a key replaces the NaN that softmax gives there. It may be the mask itself
(or more than it), or say of a whole row whether it has a key:

    keep.any(-1), ~drop.all(-1), keep.sum(-1) > 0
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..score.expr import TRUE, Const, Expr, Load, Op, op, rebuild, walk
from . import aten as table
from . import index as ix
from .pull import I, Index, M, N, Puller, compare, negate


class Guards:
    """What conditions on weights mean where `keep` says which keys a row has."""

    def __init__(self, puller: Puller, keep: Expr | None) -> None:
        self.puller, self.keep = puller, keep
        self._needed = self._conjuncts(keep)

    def hold_only_at_keys(self, condition: Expr) -> bool:
        """Is the condition false throughout every row without a key?"""
        covers = any(self._needed <= self._conjuncts(e) for e in (condition, *self._somewhere(condition)))
        return covers or self._first_key_where(condition)

    def _first_key_where(self, condition: Expr) -> bool:
        """Is key 0 kept in every row where the condition holds, as under a causal mask in every row?"""
        needed = {_bound(_at_first_key(e)) for e in self._needed} - {TRUE}
        return bool(self._needed) and needed <= {_bound(e) for e in self._conjuncts(condition)}

    def always_hold(self, condition: Expr | None) -> bool:
        """Does it hold wherever the weight is not 0 already? A row with a key has one, so a test for one says nothing."""
        if condition is None:
            return False
        return all(any(self._conjuncts(e) <= self._needed for e in (c, *self._somewhere(c))) for c in _parts(condition))

    def _conjuncts(self, e: Expr | None) -> set[Expr]:
        return set() if e is None else _parts(self._unfold(e))

    def _unfold(self, e: Expr) -> Expr:
        """Small masks as what they are made from: one may have been captured as it is, and another as its negation."""
        if isinstance(e, Load):
            inside = self.puller.inline(self.puller.captures[e.head], e.args)
            return e if inside is None or inside is e else self._unfold(inside)
        if isinstance(e, Op) and e.head == "not":
            return negate(self._unfold(e.args[0]))
        return rebuild(e, tuple(self._unfold(a) for a in e.args))

    def _somewhere(self, condition: Expr) -> list[Expr]:
        """The e for which the condition, or a part that it needs, says: there is a key where e holds."""
        found = []
        for part in _parts(condition):
            negated = isinstance(part, Op) and part.head == "not"
            read = part.args[0] if negated else part
            if isinstance(read, Load):
                e = self._exists(self.puller.captures[read.head], read.args, not negated)
                found += [] if e is None else [e]
        return found

    def _exists(self, node: Node, index: Index, holds: bool) -> Expr | None:
        """e where the value at the index is `holds` exactly if e holds for some key of the row."""
        operation = table.name_of(node)
        if (step := self.puller.view(node, index)) is not None:
            return self._exists(*step, holds)
        if operation in ("logical_not", "bitwise_not") and _is_bool(node.args[0]):
            return self._exists(node.args[0], index, not holds)  # type: ignore[arg-type]
        if operation in ("any", "all") and (operation == "any") is holds and _is_bool(node.args[0]):
            each = self._each(node, index)
            return None if each is None else each if holds else negate(each)
        if holds is _COUNTED.get((operation, node.args[-1] if len(node.args) == 2 else None)):  # type: ignore[arg-type]
            return self._counted(node.args[0], index)  # type: ignore[arg-type]
        return None

    def _each(self, reduction: Node, index: Index) -> Expr | None:
        """The value, for one key, of what is reduced over all keys; None where the axis is another."""
        source: Node = reduction.args[0]  # type: ignore[assignment]
        dims = reduction.args[1] if len(reduction.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, (list, tuple)) or len(dims) != 1:
            return None
        shape = self.puller.shapes.of(source)
        dim = int(dims[0]) % len(shape)  # type: ignore[arg-type]
        kept_dim = len(index) == len(shape)
        rest = (*index[:dim], *index[dim + 1 :]) if kept_dim else index
        rows_by_key = any(n is N for i in rest for n in walk(i))
        if rows_by_key or not ix.same(shape[dim], self.puller.indexer.sizes[N]):
            return None
        return self.puller.pull(source, (*rest[:dim], N, *rest[dim:]))

    def _counted(self, total: Node, index: Index) -> Expr | None:
        """c where the node is the sum of c, or of 1 where c and 0 elsewhere, over all keys."""
        while (step := self.puller.view(total, index)) is not None:
            total, index = step
        each = self._each(total, index) if table.name_of(total) == "sum" else None
        if each is None or _may_wrap(total):
            return None
        if _is_bool(total.args[0]):
            return each
        if not isinstance(each, Op) or each.head != "where" or not all(isinstance(a, Const) for a in each.args[1:]):
            return None
        numbers = [a.head for a in each.args[1:]]
        return each.args[0] if numbers == [1, 0] else negate(each.args[0]) if numbers == [0, 1] else None


# Comparisons of a number of keys: what they are where there is one.
_COUNTED: dict[tuple[str, Any], bool] = {
    ("gt", 0): True, ("ne", 0): True, ("ge", 1): True, ("eq", 0): False, ("lt", 1): False, ("le", 0): False,
}  # fmt: skip


def _may_wrap(total: Node) -> bool:
    """Is it a sum in a narrow integer type, in which 256 keys may count as none?"""
    dtype = total.meta["val"].dtype
    return table.kind_of_dtype(dtype) == "int" and dtype.itemsize < 4


def _is_bool(node: object) -> bool:
    return isinstance(node, Node) and table.kind_of_dtype(node.meta["val"].dtype) == "bool"


def _at_first_key(e: Expr) -> Expr:
    if e is N:
        return ix.ZERO
    args = tuple(map(_at_first_key, e.args))
    is_comparison = isinstance(e, Op) and e.head in ("lt", "le", "gt", "ge", "eq", "ne")
    return compare(e.head, *args) if is_comparison and not any(_is_real(a) for a in args) else rebuild(e, args)


def _is_real(e: Expr) -> bool:
    """May it be another number than an integer?"""
    return any(isinstance(n, Load) or (isinstance(n, Const) and isinstance(n.head, float)) for n in walk(e))


def _bound(e: Expr) -> Expr:
    """`x > 2` and `~(x < 3)` as `x >= 3`, and `q != 0` as `q >= 1`: one form for bounds of integers."""
    if isinstance(e, Op) and e.head == "not" and not _is_real(e):
        return _bound(negate(e.args[0]))
    number = e.args[1].head if isinstance(e, Op) and len(e.args) == 2 and isinstance(e.args[1], Const) else None
    if type(number) is int and (e.head == "gt" or (e.head == "ne" and number == 0 and e.args[0] in (I, M, N))):
        return op("ge", e.args[0], number + 1)
    return e


def _parts(e: Expr) -> set[Expr]:
    return _parts(e.args[0]) | _parts(e.args[1]) if isinstance(e, Op) and e.head == "and" else {e}
