"""Lifting: the value of a twin node at an index, as a score expression.

`Puller.pull(node, index)` walks from a node to its operands. A view changes the index, a pointwise operation becomes
an operation of the score language, a generator (`arange`, `tril`, `full`) becomes arithmetic on the index, a lookup in
a table a load at computed positions (`lookup`). What remains is a load of a captured tensor.

*What is captured.* A tensor that spans both the query and the key axis is inlined as far as possible, so that masks
and biases made from small tensors are never materialised; anything smaller is captured as it is, as close to its
source as views reach. Nodes of the `cone` (those that depend on the anchor) must be inlined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..reject import Reason, Reject
from ..score.expr import FALSE, TRUE, Const, Expr, Load, Op, const, load, map_loads, name, op, walk, where
from . import aten as table
from . import index as ix
from .additions import Additions
from .lookup import look_up
from .normalize import Twin, constant_of_trace, leaf_value
from .shapes import Shapes

I, M, N, D = (name(n) for n in ("$i", "$m", "$n", "$d"))  # noqa: E741  product coordinates: folded batch, query, key, head_dim
Index = tuple[Expr, ...]


class Puller:
    """`heads` maps the nodes at which a walk ends (softmax, score product) to a function of the index."""

    def __init__(self, twin: Twin, shapes: Shapes, indexer: ix.Indexer) -> None:
        self.twin, self.shapes, self.indexer = twin, shapes, indexer
        self.extra = Additions(twin)
        self.defined = set(twin.defined())
        self.weights = True  # in the first of the two walks: from the value product to the softmax
        self.gradients = True  # False where eager differentiates nothing here
        self.cone: set[Node] = set()
        self.ends: dict[Node, Callable[[Index], Expr]] = {}
        self.captures: list[Node] = []
        self.visited: set[Node] = set()  # cone nodes the expression stands for
        self.partial = 0  # inside of what is written into a part of a tensor: how deep
        self._memo: dict[tuple[Node, Index], Expr | None] = {}

    # *** the walk ***

    def pull(self, node: Node, index: Index) -> Expr:
        if node in self.cone or node in self.ends:
            found = self.inline(node, index)
            if found is None:
                raise Reject(self._reason(), node, f"through {_describe(node)}")
            return found
        found = self._inline_if_small(node, index)
        return self._capture(node, index) if found is None else found

    def _reason(self) -> Reason:
        return Reason.WEIGHT if self.weights else Reason.SCORE

    def _spans(self, i: Expr, size: Expr) -> bool:
        """Does the index run over exactly this dimension, as one coordinate or as its part along a folded axis?"""
        if i in self.indexer.sizes or i is ix.ZERO:
            return ix.same(size, self.indexer.sizes.get(i, ix.ONE))
        if not isinstance(i, Op) or i.head not in ("floordiv", "mod"):
            return False
        if i.head == "mod":
            return ix.same(size, i.args[1])
        whole = self.indexer.sizes.get(i.args[0])
        return whole is not None and ix.same(ix.mul(size, i.args[1]), whole)

    def _inline_if_small(self, node: Node, index: Index) -> Expr | None:
        """The value as arithmetic, unless a tensor of fewer axes than the scores would do as well."""
        spans = M in _names(index) and N in _names(index)
        found = self.inline(node, index)
        if found is None or (not spans and _has_load(found)):
            return None
        return None if self._is_sum_of_matrices(node, found) else found

    def _is_sum_of_matrices(self, node: Node, found: Expr) -> bool:
        """Made from several tensors as large as itself: reading the one result is cheaper."""
        read = {n.head for n in walk(found) if isinstance(n, Load) and {M, N} <= _names(n.args)}
        size = str(node.meta["val"].numel()) if len(read) > 1 and node not in self.cone else ""
        return bool(size) and all(str(self.captures[i].meta["val"].numel()) == size for i in read)

    def inline(self, node: Node, index: Index) -> Expr | None:
        """The value by what it is made from, None where it can only be read."""
        key = (node, index)
        if key not in self._memo:
            self._memo[key] = self._inline_uncached(node, index)
        return self._memo[key]

    def _inline_uncached(self, node: Node, index: Index) -> Expr | None:
        if node in self.ends:
            if self.partial and not all(map(self._spans, index, self.shapes.of(node))):
                raise Reject(self._reason(), node, "it is written into a part of a larger tensor")
            return self.ends[node](index)
        if node in self.cone:
            if self.gradients and node in self.twin.stops:
                raise Reject(Reason.GRADIENT, node, f"at {_describe(node)}")
            self.visited.add(node)
        elif self.gradients and node in self.twin.stops:
            return None
        if (viewed := self.view(node, index)) is not None:
            inside = viewed[0] in self.cone or viewed[0] in self.ends
            return self.pull(*viewed) if inside else self._inline_if_small(*viewed)
        if node.op == "get_attr":
            return self._constant_attribute(node)
        operation = table.name_of(node)
        if operation == "getitem":
            return self._dropout(node, index)
        if node not in self.cone and _reads_float64(node):
            return None  # a program computes in float32
        if operation in table.CASTS:
            return self._cast(node, index)
        if node in self.cone and node.meta["val"].dtype is torch.float64:
            # 1e12 + x, or a fill with the least float64, would lose x, or be -inf
            raise Reject(Reason.DTYPE, node, f"{_describe(node)} computes in float64")
        if operation in table.GENERATORS:
            return self._generate(node, operation, index)
        if operation in ("tril", "triu"):
            return self._triangle(node, operation, index)
        if operation in ("where", "masked_fill"):
            return self._where(node, operation, index)
        if operation in table.WRITES:
            found = self._written(node, operation, index)
            # a whole matrix has to be read anyway: then the one that was written into
            return found if node in self.cone or found is None or not _reads_matrix(found) else None
        if operation in table.JOINS and node in self.cone:
            return self._joined(node, operation, index)
        if operation == "nan_to_num":
            return self._without_nan(node, index)
        if operation in table.LOOKUPS:
            return look_up(self, node, index)
        if operation in table.POINTWISE:
            return self._pointwise(node, operation, index)
        return None

    # *** captures ***

    def _capture(self, node: Node, index: Index) -> Expr:
        """A load, from as near the source as index arithmetic reaches, of a tensor that the user's graph holds."""
        held = (node, index)
        while True:
            step = self.view(node, index)
            if step is None and table.name_of(node) in table.CASTS and _widens(node):
                step = (node.args[0], index)  # type: ignore[assignment]
            if step is None or node in self.twin.stops or not self._may_descend(node, step):
                break
            node, index = step
            if node in self.defined or held[0] not in self.defined:
                held = step
        node, index = held
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Reject(self._reason(), node, f"a captured value comes from {_describe(node)}")
        return load(self.capture_as(node), *index)

    def capture_as(self, node: Node) -> int:
        """The number of the capture that is this node's value."""
        number = next((i for i, c in enumerate(self.captures) if _is_same(c, node)), len(self.captures))
        if number == len(self.captures):
            self.captures.append(node)
        return number

    def _may_descend(self, node: Node, step: tuple[Node, Index]) -> bool:
        """Where a gradient is wanted, every index must stay one position of one axis."""
        if node not in self.twin.requires_grad:
            return True
        seen: list[Expr] = []
        for i in step[1]:
            if isinstance(i, Const):
                continue
            base = i.args[0] if isinstance(i, Op) and i.head in ("floordiv", "mod") else i
            if base not in (I, M, N) or i in seen:
                return False
            seen.append(i)
        return True

    # *** views ***

    def view(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """(source, index into it), or None if the node is no view."""
        operation = table.name_of(node)
        if operation == "getitem":
            return self._piece(node, index)
        if operation not in table.VIEWS or node.op != "call_function":
            return None
        source: Node = node.args[0]  # type: ignore[assignment]
        rule = getattr(self, f"_view_{operation.strip('_')}", None)
        if operation in ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_as"):
            return source, self.indexer.view(self.shapes.of(source), self.shapes.of(node), index)
        if operation in ("expand", "expand_as"):
            return source, self.unexpand(source, index)
        if rule is not None:
            new = rule(node, source, index)
            return None if new is None else (source, new)
        return source, index  # alias, clone, contiguous, detach, lift_fresh

    def unexpand(self, source: Node, index: Index) -> Index:
        """Index into a tensor that is broadcast to the index."""
        shape = self.shapes.of(source)
        if not shape:
            return ()
        return tuple(ix.ZERO if s is ix.ONE else i for s, i in zip(shape, index[-len(shape) :], strict=True))

    def _view_permute(self, node: Node, source: Node, index: Index) -> Index:
        rank = len(index)
        out: list[Expr] = [ix.ZERO] * rank
        for position, dim in enumerate(node.args[1]):  # type: ignore[arg-type]
            out[dim % rank] = index[position]
        return tuple(out)

    def _view_transpose(self, node: Node, source: Node, index: Index) -> Index:
        out = list(index)
        a, b = (int(d) % len(out) for d in node.args[1:3])  # type: ignore[arg-type]
        out[a], out[b] = out[b], out[a]
        return tuple(out)

    def _view_t(self, node: Node, source: Node, index: Index) -> Index:
        return tuple(reversed(index))

    def _view_unsqueeze(self, node: Node, source: Node, index: Index) -> Index:
        at = int(node.args[1]) % len(index)  # type: ignore[arg-type]
        return index[:at] + index[at + 1 :]

    def _view_squeeze(self, node: Node, source: Node, index: Index) -> Index:
        return self.indexer.view(self.shapes.of(source), self.shapes.of(node), index)

    def _view_select(self, node: Node, source: Node, index: Index) -> Index | None:
        rank = len(index) + 1
        at, chosen = int(node.args[1]) % rank, self._integer(node.args[2])  # type: ignore[arg-type]
        if chosen is None:
            return None
        if isinstance(chosen, Const) and chosen.head < 0:
            chosen = ix.add(chosen, self.shapes.of(source)[at])
        return (*index[:at], chosen, *index[at:])

    def _view_slice(self, node: Node, source: Node, index: Index) -> Index | None:
        args = [*node.args[1:], *[None] * 4]
        at, start, step = int(args[0] or 0) % len(index), args[1], args[3] or 1
        size = self.shapes.of(source)[at]
        first = ix.ZERO if start is None else self._integer(start)
        if first is None:
            return None
        first = self._clamped_start(first, size, self.shapes.of(node)[at])
        if first is None or not isinstance(step, int):
            return None
        moved = ix.add(first, ix.mul(index[at], const(step)))
        return (*index[:at], moved, *index[at + 1 :])

    def _clamped_start(self, first: Expr, size: Expr, taken: Expr) -> Expr | None:
        """The first position a slice takes, given how many it takes; None where that depends on run-time sizes."""
        if ix.same(taken, size):
            return ix.ZERO
        coefficients = list(ix.to_poly(first).values())
        if all(c >= 0 for c in coefficients):
            return first  # beyond the end nothing is taken
        start = ix.add(first, size)
        if isinstance(start, Const):
            return const(max(0, start.head))
        counted_from_end = all(c <= 0 for c in coefficients) and ix.same(taken, ix.sub(ix.ZERO, first))
        return start if counted_from_end else None

    def _view_repeat(self, node: Node, source: Node, index: Index) -> Index:
        shape = self.shapes.of(source)
        tail = index[len(index) - len(shape) :]
        return tuple(ix.ZERO if s is ix.ONE else self.indexer.mod(i, s) for i, s in zip(tail, shape, strict=True))

    def _view_flip(self, node: Node, source: Node, index: Index) -> Index:
        dims = {int(d) % len(index) for d in node.args[1]}  # type: ignore[arg-type, union-attr]
        shape = self.shapes.of(source)
        return tuple(
            ix.sub(ix.sub(s, ix.ONE), i) if p in dims else i for p, (i, s) in enumerate(zip(index, shape, strict=True))
        )

    def _piece(self, node: Node, index: Index) -> tuple[Node, Index] | None:
        """getitem of split, split_with_sizes or unbind."""
        parent: Node = node.args[0]  # type: ignore[assignment]
        which: int = node.args[1]  # type: ignore[assignment]
        operation = table.name_of(parent)
        source: Node = parent.args[0]  # type: ignore[assignment]
        if operation == "unbind":
            rank = len(index) + 1
            at = int(parent.args[1] if len(parent.args) > 1 else 0) % rank  # type: ignore[arg-type]
            return source, (*index[:at], const(which), *index[at:])
        if operation not in ("split", "split_with_sizes", "chunk"):
            return None
        at = int(parent.args[2] if len(parent.args) > 2 else 0) % len(index)  # type: ignore[arg-type]
        start: Expr = ix.ZERO
        for earlier in parent.meta["val"][:which]:
            start = ix.add(start, self.shapes.dim(earlier.shape[at]))
        return source, (*index[:at], ix.add(index[at], start), *index[at + 1 :])

    # *** numbers ***

    def _integer(self, value: Any) -> Expr | None:
        if isinstance(value, Node):
            value = value.meta.get("val")
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self.shapes.dim(value)
        return None

    def _operand(self, value: Any, index: Index) -> tuple[Expr, str] | None:
        """Expression and kind of one argument, broadcast to the index."""
        if isinstance(value, Node):
            held = value.meta.get("val")
            if isinstance(held, torch.Tensor):
                return self.pull(value, self.unexpand(value, index)), table.kind_of_dtype(held.dtype)
            value = held
        if isinstance(value, torch.SymInt):
            return self.shapes.dim(value), "int"
        if isinstance(value, (bool, int, float)):
            return const(value), type(value).__name__
        return None

    def _constant_attribute(self, node: Node) -> Expr | None:
        """A 0-d tensor constant of the trace."""
        number = constant_of_trace(self.twin.graph, node)
        return None if number is None else const(number)

    # *** values ***

    def _cast(self, node: Node, index: Index) -> Expr | None:
        source: Node = node.args[0]  # type: ignore[assignment]
        inner = self.pull(source, index)
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if before == after:
            return inner
        if after.is_floating_point and before.is_floating_point:
            return inner if node in self.cone or _widens(node) else _narrow(inner, after)
        if after is torch.int64 and node not in self.cone and _is_half(before) and not _is_exact(inner):
            return None
        if not after.is_floating_point and after not in (torch.bool, torch.int64):
            return None if before is not torch.bool else cast(inner, "bool", "int")  # int32 may wrap around
        if after.itemsize == 2 and not before.is_floating_point and before is not torch.bool:
            return _narrow(inner, after) if isinstance(inner, Const) else None  # half holds few integers
        return cast(inner, table.kind_of_dtype(before), table.kind_of_dtype(after))

    def _generate(self, node: Node, operation: str, index: Index) -> Expr | None:
        dtype = node.meta["val"].dtype
        kind = table.kind_of_dtype(dtype)
        if operation == "arange":
            numbers = [self._integer(a) for a in node.args]
            if any(n is None for n in numbers) or kind == "bool" or dtype.itemsize < 4:
                return None
            start, step = (ix.ZERO if len(numbers) < 2 else numbers[0]), (numbers[2] if len(numbers) > 2 else ix.ONE)
            return cast(ix.add(start, ix.mul(index[0], step)), "int", kind)  # type: ignore[arg-type]
        if operation == "eye":
            return cast(compare("eq", index[0], index[1]), "bool", kind)
        value: Any = {"zeros": 0, "ones": 1}.get(operation.split("_")[-1].removesuffix("_like"))
        if operation in ("zeros_like", "ones_like"):
            value = 0 if operation == "zeros_like" else 1
        elif operation in ("full", "full_like", "new_full"):
            value = node.args[2 if operation == "new_full" else 1]
        elif operation == "scalar_tensor":
            value = node.args[0]
        found = self._operand(value, ())
        if found is None:
            return None
        return _narrow(cast(*found, kind), dtype) if kind == "float" else cast(*found, kind)

    def _triangle(self, node: Node, operation: str, index: Index) -> Expr | None:
        diagonal = self._integer(node.args[1] if len(node.args) > 1 else 0)
        if diagonal is None:
            return None
        inner = self.pull(node.args[0], index)  # type: ignore[arg-type]
        edge = ix.add(index[-2], diagonal)
        kept = compare("le" if operation == "tril" else "ge", index[-1], edge)
        zero: Any = {"bool": False, "int": 0, "float": 0.0}[table.kind_of_dtype(node.meta["val"].dtype)]
        return choose(kept, inner, const(zero))

    def _where(self, node: Node, operation: str, index: Index) -> Expr | None:
        condition, a, b = node.args[:3] if operation == "where" else (node.args[1], node.args[2], node.args[0])
        dtype = node.meta["val"].dtype
        kind = table.kind_of_dtype(dtype)
        found = [self._operand(x, index) for x in (condition, a, b)]
        if any(f is None for f in found):
            return None
        (c, c_kind), (x, x_kind), (y, y_kind) = found  # type: ignore[misc]
        x, y = cast(x, x_kind, kind), cast(y, y_kind, kind)
        if kind == "float":
            x, y = (_narrow_constant(v, dtype) if isinstance(v, Const) else v for v in (x, y))
        return choose(cast(c, c_kind, "bool"), x, y)

    def _written(self, node: Node, operation: str, index: Index) -> Expr | None:
        """`x[mask] = number`, `x[..., a:b] = y`, `x[..., i] = y` as they are without writing in place."""
        if operation == "index_put":
            return self._masked_write(node, index)
        if operation == "diagonal_scatter":
            return choose(*self._diagonal_write(node, index), self.pull(node.args[0], index))  # type: ignore[arg-type]
        axis = int(node.args[2] if len(node.args) > 2 else 0) % len(index)  # type: ignore[arg-type]
        found = (self._slice_write if operation == "slice_scatter" else self._select_write)(node, axis, index)
        return None if found is None else choose(*found, self.pull(node.args[0], index))  # type: ignore[arg-type]

    def _select_write(self, node: Node, axis: int, index: Index) -> tuple[Expr, Expr] | None:
        """(where the new value is, the new value)"""
        at = self._integer(node.args[3])
        if at is None:
            return None
        if isinstance(at, Const) and at.head < 0:
            at = ix.add(at, self.shapes.of(node)[axis])
        new = self.pull(node.args[1], (*index[:axis], *index[axis + 1 :]))  # type: ignore[arg-type]
        return compare("eq", index[axis], at), new

    def _diagonal_write(self, node: Node, index: Index) -> tuple[Expr, Expr]:
        given: list[Any] = list(node.args[2:])
        offset, first, second = given + [0, 0, 1][len(given) :]
        rank = len(index)
        row, column = index[first % rank], index[second % rank]  # type: ignore[operator]
        inside = compare("eq", column, ix.add(row, const(offset)))  # type: ignore[arg-type]
        rest = [i for p, i in enumerate(index) if p not in (first % rank, second % rank)]  # type: ignore[operator]
        self.partial += 1
        new = self.pull(node.args[1], (*rest, row if offset >= 0 else column))  # type: ignore[arg-type, operator]
        self.partial -= 1
        return inside, _read_only_where(inside, new)

    def _slice_write(self, node: Node, axis: int, index: Index) -> tuple[Expr, Expr] | None:
        first, _, step = [*node.args[3:], *[None] * 3][:3]
        taken = self.shapes.of(node.args[1])[axis]  # type: ignore[arg-type]
        start = ix.ZERO if first is None else self._integer(first)
        start = None if start is None else self._clamped_start(start, self.shapes.of(node)[axis], taken)
        if start is None or step not in (None, 1):
            return None
        stop, size = ix.add(start, taken), self.shapes.of(node)[axis]
        above = TRUE if start is ix.ZERO else compare("ge", index[axis], start)
        below = TRUE if ix.same(stop, size) else compare("lt", index[axis], stop)
        inside = logical("logical_and", [above, below])
        moved = (*index[:axis], ix.sub(index[axis], start), *index[axis + 1 :])
        self.partial += inside is not TRUE
        new = self.pull(node.args[1], moved)  # type: ignore[arg-type]
        self.partial -= inside is not TRUE
        return inside, _read_only_where(inside, new)

    def _joined(self, node: Node, operation: str, index: Index) -> Expr | None:
        """`cat([x, y], dim)` and `pad(x, ...)`: whichever piece the index lies in, read where it begins."""
        if operation == "cat":
            axis = int(node.args[1] if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
            return self._piecewise(node.args[0], axis, index)  # type: ignore[arg-type]
        source, pads, *number = node.args
        widths: list[Any] = list(pads)  # type: ignore[arg-type]  # before and after, the last dimension first
        padded = [d for d in range(len(widths) // 2) if any(widths[2 * d : 2 * d + 2])]
        fill = self._operand(number[0] if number else 0.0, ())
        if fill is None or len(padded) != 1 or not all(isinstance(w, int) and w >= 0 for w in widths):
            return None
        outside = cast(*fill, table.kind_of_dtype(node.meta["val"].dtype))
        axis, before = len(index) - 1 - padded[0], const(widths[2 * padded[0]])
        return self._inside(source, axis, before, index, outside)  # type: ignore[arg-type]

    def _piecewise(self, pieces: list[Node], axis: int, index: Index) -> Expr | None:
        if any(p.meta["val"].dim() != len(index) for p in pieces):
            return None  # `cat` skips tensors of shape [0]
        starts: list[Expr] = [ix.ZERO]
        for piece in pieces[:-1]:
            starts.append(ix.add(starts[-1], self.shapes.of(piece)[axis]))
        found = self._inside(pieces[-1], axis, starts[-1], index, None)
        for piece, start in zip(reversed(pieces[:-1]), reversed(starts[:-1]), strict=True):
            found = self._inside(piece, axis, start, index, found)
        return found

    def _inside(self, piece: Node, axis: int, start: Expr, index: Index, outside: Expr | None) -> Expr:
        """The piece where the index lies in it, else `outside`: what lies on either side (None: nothing does)."""
        at, end = index[axis], ix.add(start, self.shapes.of(piece)[axis])
        above = TRUE if start is ix.ZERO else compare("ge", at, start)
        inside = above if outside is None else logical("logical_and", [above, compare("lt", at, end)])
        self.partial += inside is not TRUE
        new = self.pull(piece, (*index[:axis], ix.sub(at, start), *index[axis + 1 :]))
        self.partial -= inside is not TRUE
        new = _read_only_where(inside, new)
        return new if outside is None else choose(inside, new, outside)

    def _masked_write(self, node: Node, index: Index) -> Expr | None:
        masks = [(at, m) for at, m in enumerate(node.args[1]) if m is not None]  # type: ignore[arg-type]
        if len(masks) != 1 or (len(node.args) > 3 and node.args[3]):
            return None
        at, mask = masks[0]
        value: Node = node.args[2]  # type: ignore[assignment]
        if mask.meta["val"].dtype is not torch.bool or value.meta["val"].numel() != 1:
            return None
        kind = table.kind_of_dtype(node.meta["val"].dtype)
        held = value.meta["val"]
        new = cast(self.pull(value, (ix.ZERO,) * held.dim()), table.kind_of_dtype(held.dtype), kind)
        if isinstance(new, Const) and kind == "float":
            new = _narrow_constant(new, node.meta["val"].dtype)
        where_mask = self.pull(mask, index[at : at + mask.meta["val"].dim()])
        return choose(where_mask, new, self.pull(node.args[0], index))  # type: ignore[arg-type]

    def _pointwise(self, node: Node, operation: str, index: Index) -> Expr | None:
        how, build = table.POINTWISE[operation]
        dtype = node.meta["val"].dtype
        if dtype is torch.float16 and node not in self.cone and how == "result":
            return None  # it may overflow, where float32 does not
        kwargs = dict(node.kwargs)
        values = list(node.args)
        if operation == "clamp":
            values += [kwargs.pop(k, None) for k in ("min", "max")][len(values) - 1 :]
        found = [(None if v is None else self._operand(v, index)) for v in values]
        if any(f is None and v is not None for f, v in zip(found, values, strict=True)):
            return None
        kind = self._operand_kind(how, dtype, [f[1] for f in found if f is not None])
        if kind is None or (kind == "int" and how == "result" and dtype is not torch.int64):
            return None
        args = [None if f is None else cast(f[0], f[1], kind) for f in found]
        if kind == "bool" and how == "result":
            meaning = {"mul": "and", "add": "or", "maximum": "or", "minimum": "and"}.get(operation)
            return None if meaning is None or kwargs else logical(f"logical_{meaning}", args)  # type: ignore[arg-type]
        if kind == "int" and operation in ("add", "sub", "mul", "rsub", "floor_divide", "remainder"):
            return self._integer_arithmetic(operation, args, kwargs)
        if how == "common" and node not in self.cone and _compares_rounded(values, found):
            return None
        if how == "common" and operation in ("lt", "le", "gt", "ge", "eq", "ne"):
            return compare(operation, *args) if kind != "float" else compare_float(operation, *args)  # type: ignore[arg-type]
        if how in ("bool", "only-bool"):
            return logical(operation, args)  # type: ignore[arg-type]
        if operation == "add" and not kwargs and any(isinstance(a, Const) and a.head == 0 for a in args):
            return args[0] if isinstance(args[1], Const) and args[1].head == 0 else args[1]
        try:
            return build(*args, **kwargs)
        except TypeError:  # a keyword this table does not know
            return None

    def _without_nan(self, node: Node, index: Index) -> Expr | None:
        """`nan_to_num(x, nan, posinf, neginf)`, by default 0 and the greatest and the least number of the dtype."""
        dtype, source = node.meta["val"].dtype, node.args[0]
        if not dtype.is_floating_point or (dtype is torch.float16 and node not in self.cone):
            return None
        given = [*node.args[1:], None, None, None][:3]
        defaults = (0.0, torch.finfo(dtype).max, torch.finfo(dtype).min)
        numbers = [const(float(d if g is None else g)) for g, d in zip(given, defaults, strict=True)]  # type: ignore[arg-type]
        return _replace_non_numbers(self.pull(source, index), *numbers)  # type: ignore[arg-type]

    @staticmethod
    def _operand_kind(how: str, dtype: torch.dtype, kinds: list[str]) -> str | None:
        if how == "result":
            return table.kind_of_dtype(dtype)
        if how == "bool":
            return "bool"
        if how == "only-bool":
            return "bool" if all(k == "bool" for k in kinds) else None
        return "float" if "float" in kinds else "int" if "int" in kinds else "bool"

    def _integer_arithmetic(self, operation: str, args: list, kwargs: dict) -> Expr | None:
        x, y = args
        alpha = kwargs.pop("alpha", 1)
        if kwargs or not isinstance(alpha, int):
            return None
        if operation == "rsub":
            x, y, operation = y, x, "sub"
        if operation in ("add", "sub") and alpha != 1:
            y = ix.mul(y, const(alpha))
        if operation in ("floor_divide", "remainder"):
            return (self.indexer.floordiv if operation == "floor_divide" else self.indexer.mod)(x, y)
        return {"add": ix.add, "sub": ix.sub, "mul": ix.mul}[operation](x, y)

    def _dropout(self, node: Node, index: Index) -> Expr | None:
        """The first result of native_dropout on the weights, as a factor `$drop` of known probability."""
        parent: Node = node.args[0]  # type: ignore[assignment]
        if (
            table.name_of(parent) != "native_dropout"
            or node.args[1] != 0
            or parent not in self.cone
            or not self.weights
        ):
            return None
        self.visited.add(parent)
        inner = self.pull(parent.args[0], index)  # type: ignore[arg-type]
        p, train = parent.args[1], parent.args[2]
        if train is False or p == 0.0:
            return inner
        if not isinstance(p, float) or not 0.0 <= p < 1.0:
            raise Reject(Reason.DROPOUT, node, f"p = {p}")
        return op("mul", inner, name(f"$drop:{p!r}"))


# *** small algebra that keeps what is lifted readable ***


def cast(e: Expr, before: str, after: str) -> Expr:
    if before == after:
        return e
    if isinstance(e, Const):
        return const({"bool": bool, "int": int, "float": float}[after](e.head))
    if isinstance(e, Op) and e.head == "where" and isinstance(e.args[1], Const) and isinstance(e.args[2], Const):
        return choose(e.args[0], cast(e.args[1], before, after), cast(e.args[2], before, after))
    if before == "bool":
        return where(e, 1 if after == "int" else 1.0, 0 if after == "int" else 0.0)
    return op(after, e)


def choose(condition: Expr, x: Expr, y: Expr) -> Expr:
    if condition is TRUE or x is y:
        return x
    if condition is FALSE:
        return y
    if x is TRUE and y is FALSE:
        return condition
    if x is FALSE and y is TRUE:
        return negate(condition)
    if y is FALSE:
        return logical("logical_and", [condition, x])
    if x is TRUE:
        return logical("logical_or", [condition, y])
    if x is FALSE:
        return logical("logical_and", [negate(condition), y])
    return where(condition, x, y)


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def negate(e: Expr) -> Expr:
    if isinstance(e, Const):
        return const(not e.head)
    if isinstance(e, Op) and e.head == "not":
        return e.args[0]
    if isinstance(e, Op) and e.head in _NEGATED and _is_index(e):
        return op(_NEGATED[e.head], *e.args)
    if isinstance(e, Op) and e.head in ("and", "or"):
        return logical("logical_or" if e.head == "and" else "logical_and", [negate(a) for a in e.args])
    return op("not", e)


def _is_index(e: Expr) -> bool:
    """A comparison of integers made of coordinates alone (no NaN can make its negation differ)."""
    return all(
        not isinstance(n, Load) and (not isinstance(n, Const) or isinstance(n.head, int)) for n in walk(e)
    ) and all(
        not isinstance(n, Op) or n.head in ("add", "sub", "mul", "floordiv", "mod", "neg")
        for a in e.args
        for n in walk(a)
    )


def logical(operation: str, args: list[Expr]) -> Expr:
    kind = operation.strip("_").split("_")[-1]
    if kind == "not":
        return negate(args[0])
    x, y = args
    if kind in ("and", "or"):
        absorbing, neutral = (FALSE, TRUE) if kind == "and" else (TRUE, FALSE)
        if absorbing in (x, y):
            return absorbing
        if x is neutral or x is y:
            return y
        if y is neutral:
            return x
    return op(kind, x, y)


def compare(operation: str, x: Expr, y: Expr) -> Expr:
    """A comparison of integers or bools in canonical form: key index alone on the left, else the query index."""
    folded = _fold_branches(operation, x, y)
    if folded is not None:
        return folded
    if isinstance(x, Const) and isinstance(y, Const):
        return const(_apply(operation, x.head, y.head))
    if any(isinstance(v, Op) and v.head in ("where", "not", "and", "or", "xor", *_NEGATED) for v in (x, y)):
        return op(operation, x, y)
    difference = ix.to_poly(ix.sub(x, y))
    for pivot in (N, M, I):
        coefficient = difference.get((pivot,), 0)
        if abs(coefficient) == 1 and not any(pivot in atoms for atoms in difference if atoms != (pivot,)):
            rest = {k: -v * coefficient for k, v in difference.items() if k != (pivot,)}
            decided = _by_sign(operation if coefficient == 1 else _FLIPPED.get(operation, operation), rest)
            if decided is not None:
                return decided
            operation, rest = _without_one(operation if coefficient == 1 else _FLIPPED.get(operation, operation), rest)
            return op(operation, pivot, ix.from_poly(rest))
    return op(operation, x, y)


_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _by_sign(operation: str, rest: ix.Poly) -> Expr | None:
    """Indices are never negative, which decides comparisons with constants below zero."""
    if any(atoms for atoms in rest):
        return None
    bound = rest.get((), 0)
    if (operation == "ge" and bound <= 0) or (operation in ("gt", "ne") and bound < 0):
        return TRUE
    if (operation == "lt" and bound <= 0) or (operation in ("le", "eq") and bound < 0):
        return FALSE
    return None


def _without_one(operation: str, rest: ix.Poly) -> tuple[str, ix.Poly]:
    """`x < y + 1` is `x <= y`, and so on: the form without a constant is the one people write."""
    constant = rest.get((), 0)
    better = {("lt", 1): "le", ("ge", 1): "gt", ("gt", -1): "ge", ("le", -1): "lt"}.get((operation, constant))
    if better is None or len(rest) == 1:
        return operation, rest
    return better, {k: v for k, v in rest.items() if k != ()}


def compare_float(operation: str, x: Expr, y: Expr) -> Expr:
    folded = _fold_branches(operation, x, y)
    if folded is not None:
        return folded
    if isinstance(x, Const) and isinstance(y, Const):
        return const(_apply(operation, x.head, y.head))
    return op(operation, x, y)


def _fold_branches(operation: str, x: Expr, y: Expr) -> Expr | None:
    """`where(c, 1.0, 0.0) == 0.0` is `~c`: compare each constant branch."""
    for e, swap in ((x, False), (y, True)):
        other = x if swap else y
        if isinstance(e, Op) and e.head == "where" and isinstance(other, Const):
            branches = [b for b in e.args[1:] if isinstance(b, Const) or (isinstance(b, Op) and b.head == "where")]
            if len(branches) == 2:
                judge = compare_float if isinstance(other.head, float) else compare
                results = [judge(operation, *((other, b) if swap else (b, other))) for b in branches]
                return choose(e.args[0], *results)
    return None


def _apply(operation: str, x: Any, y: Any) -> bool:
    return {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[operation]


def _reads_float64(node: Node) -> bool:
    values = [a.meta.get("val") for a in node.all_input_nodes]
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 and v.dim() > 0 for v in values)


def _widens(node: Node) -> bool:
    """A float cast that keeps every value."""
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if not (before.is_floating_point and after.is_floating_point):
        return before == after
    return before == after or torch.promote_types(before, after) == after


def _narrow_constant(e: Const, dtype: torch.dtype) -> Expr:
    """A float literal as the dtype holds it: -3.4e38 is -inf in float16."""
    value = float(e.head)
    return const(torch.tensor(value, dtype=torch.float64).to(dtype).item() if math.isfinite(value) else value)


def _narrow(e: Expr, dtype: torch.dtype) -> Expr | None:
    """Constants as the narrower dtype holds them; None if a load would have to be rounded."""
    if isinstance(e, Const):
        return _narrow_constant(e, dtype)
    if isinstance(e, Op) and e.head == "where":
        branches = [_narrow(a, dtype) for a in e.args[1:]]
        return None if None in branches else choose(e.args[0], *branches)  # type: ignore[arg-type]
    return None if _has_load(e) else e


def _compares_rounded(values: list[Any], found: list[tuple[Expr, str] | None]) -> bool:
    """Does a comparison see numbers rounded to 16 bits, where a program would compare what they were before?

    `torch.arange(600) > limit` with a bfloat16 limit does not tell 257 from 256.
    """
    held = [v.meta.get("val") if isinstance(v, Node) else v for v in values]
    if not any(isinstance(h, torch.Tensor) and _is_half(h.dtype) for h in held):
        return False
    common = torch.result_type(*held)
    for value, operand in zip(held, found, strict=True):
        if operand is None or _is_exact(operand[0]):
            continue
        half = isinstance(value, torch.Tensor) and _is_half(value.dtype)
        if half or (_is_half(common) and operand[1] == "int"):
            return True
    return False


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 2


def _is_exact(e: Expr) -> bool:
    """A number that is held as it is, or a choice of such numbers."""
    if isinstance(e, Op) and e.head == "where":
        return all(_is_exact(a) for a in e.args[1:])
    return isinstance(e, (Const, Load))


def _names(index: Index) -> set[Expr]:
    return {n for i in index for n in walk(i)}


def _replace_non_numbers(e: Expr, nan: Const, high: Const, low: Const) -> Expr:
    """The expression with other numbers for NaN, infinity and minus infinity, known ones replaced at once."""
    if isinstance(e, Const):
        return nan if math.isnan(e.head) else high if e.head == math.inf else low if e.head == -math.inf else e
    if isinstance(e, Op) and e.head == "where":
        return choose(e.args[0], *(_replace_non_numbers(a, nan, high, low) for a in e.args[1:]))
    finite = where(op("eq", e, const(math.inf)), high, where(op("eq", e, const(-math.inf)), low, e))
    return where(op("isnan", e), nan, finite)


def _read_only_where(inside: Expr, e: Expr) -> Expr:
    """Loads at element 0 outside of the part that was written, where their index would lie beyond the tensor."""
    if inside is TRUE:
        return e
    return map_loads(e, lambda n: load(n.head, *(i if isinstance(i, Const) else where(inside, i, 0) for i in n.args)))


def _is_same(x: Any, y: Any, depth: int = 4) -> bool:
    """The same node, or the same operation on the same arguments."""
    if x is y:
        return True
    if isinstance(x, Node) and isinstance(y, Node):
        pure = x.op == "call_function" and table.name_of(x) in table.TRANSPARENT - {"native_dropout"}
        alike = depth > 0 and pure and x.target is y.target and x.kwargs.keys() == y.kwargs.keys()
        arguments = zip((*x.args, *x.kwargs.values()), (*y.args, *y.kwargs.values()), strict=False)
        return alike and len(x.args) == len(y.args) and all(_is_same(a, b, depth - 1) for a, b in arguments)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(_is_same(a, b, depth) for a, b in zip(x, y, strict=True))
    return type(x) is type(y) and isinstance(x, (int, float, str, bool, torch.dtype, torch.device)) and x == y


def _reads_matrix(e: Expr) -> bool:
    """Is a tensor read whose element depends on query and key?"""
    return any(isinstance(n, Load) and {M, N} <= _names(n.args) for n in walk(e))


def _has_load(e: Expr) -> bool:
    return any(isinstance(n, Load) for n in walk(e))


def _describe(node: Node) -> str:
    if node.target is leaf_value:
        return str(node.args[0])
    if table.name_of(node) == "getitem":
        return _describe(node.args[0])  # type: ignore[arg-type]
    return table.name_of(node) or str(getattr(node.target, "__name__", node.target))
