"""Every spelling of softmax becomes one node: `_softmax(x, dim)`, or `_safe_softmax` where rows without a key give 0.

Works on the twin alone, before anything is searched for. Recognised, for a row-constant shift c of any kind:

    exp(x - c) / (sum(exp(x - c)) + exp(y - c))     softmax with one more term y in the denominator (a sink)
    exp(x) / (sum(exp(x)) + 1e-6)                   the same with y = log(1e-6)
    (exp(x - c) @ v) / sum(exp(x - c))              divided after the value product
    exp(log_softmax(x)), exp(x - logsumexp(x)), exp(x - (c + log(sum(exp(x - c)))))
    exp(x - logaddexp(logsumexp(x), y))             a sink again
    softmax(cat([x, y]))[..., :-1]                  a sink as an extra column, last or first, also by padding
    softmax((x - max(x)) * alpha)                   a shift by hand, which changes nothing; a mean where nothing masks x
    nan_to_num(softmax(x)), where(isnan(w), 0, w)   rows without a key give 0; isnan is also w != w, and any of its row
    where((x == -inf).all(), 0, softmax(x))         the same
    (a - c * (b + d)) @ v                           a @ v - (c * b) @ v - (c * d) @ v, where a, b and d are weights
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..score.expr import Expr, name
from . import aten as table
from . import index as ix
from .normalize import Twin, closure, constant_of_trace, example_value, numbers_in
from .products import multiply_matrices
from .pull import Index, Puller
from .shapes import Shapes

aten = torch.ops.aten
_PATH = (table.VIEWS | table.CASTS) - {"split", "split_with_sizes", "unbind", "chunk", "repeat"}
_SAME_VALUE = frozenset({"alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "_to_copy", "detach"})


def canonicalise(twin: Twin) -> None:
    """Replace every recognised spelling in the twin; `twin.sinks` gets the extra terms of denominators."""
    for node in twin.stops & _before_gradients(twin):
        node.meta["stop"] = True
    rules = (
        _constants, _copies, _neutral, multiply_matrices, _dropouts, _unsqueezes, _quotients, _logarithms, _columns, _shifts,
        _guards,
    )  # fmt: skip
    for rule in rules:
        rule(twin)
    _split_sums_of_weights(twin)


_REDUCTIONS = (
    aten.sum.dim_IntList, aten.amax.default, aten.max.dim, aten.logsumexp.default, aten.any.dim, aten.all.dim,
)  # fmt: skip


def _before_gradients(twin: Twin) -> set[Node]:
    """What a tensor of the user's that requires a gradient is computed from: stops elsewhere, as in inference, stop nothing."""
    values = {entries[0][1]: example_value(user) for user, entries in twin.history.items()}
    needing = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad]
    return closure(a for n in needing for a in n.all_input_nodes)


# *** looking through ***


def peel(node: Any) -> Any:
    """The node that first has this value, whatever its float dtype and memory.

    Stops where eager stops the gradient: a part that is detached is no part of a softmax.
    """
    while _is(node, *_SAME_VALUE, *_IN_PLACE) and not _is_integer_cast(node) and not _moves(node):
        node = node.args[0]
    return node


# Views that einsum and broadcasting leave behind where there is nothing to do.
_IN_PLACE = ("permute", "expand", "view")


def _moves(node: Node) -> bool:
    """Is it a view by which values come to stand elsewhere?"""
    if table.name_of(node) == "permute":
        return list(node.args[1]) != list(range(_rank(node)))  # type: ignore[arg-type]
    return table.name_of(node) in _IN_PLACE and not _same_shape(node, node.args[0])  # type: ignore[arg-type]


def _is(node: Any, *names: str) -> bool:
    """One of these operations, and no stop of the gradient."""
    return isinstance(node, Node) and table.name_of(node) in names and not node.meta.get("stop")


def _is_integer_cast(node: Node) -> bool:
    values = [n.meta["val"] for n in (node, node.args[0])]  # type: ignore[union-attr]
    return not all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values) and _is(node, "_to_copy")


def _peel_broadcast(node: Any) -> Any:
    node = peel(node)
    while _is(node, "expand", "expand_as"):
        node = peel(node.args[0])
    return node


def _shape(node: Node) -> Any:
    return node.meta["val"].shape


def _rank(node: Node) -> int:
    return len(_shape(node))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_row_constant(value: Any, like: Node, dim: int) -> bool:
    """Broadcast against `like`, does the value stay the same along `dim`?"""
    value = _peel_broadcast(value)
    if not isinstance(value, Node):
        return isinstance(value, (int, float))
    held = value.meta.get("val")
    if not isinstance(held, torch.Tensor):
        return isinstance(held, (int, float, torch.SymInt, torch.SymFloat))
    if held.dim() > _rank(like):
        return False
    at = dim - (_rank(like) - held.dim())
    return at < 0 or (_is_one(held.shape[at]) and not _is_one(_shape(like)[dim]))


def _reduction(node: Any, names: tuple[str, ...]) -> tuple[Node, int] | None:
    """(what is reduced, over which dimension) where the node is such a reduction, its dimension kept or put back."""
    node = _peel_broadcast(node)
    put_back = None
    if _is(node, "unsqueeze"):
        put_back = int(node.args[1]) % _rank(node)  # type: ignore[arg-type]
        node = peel(node.args[0])
    if not _is(node, *names) or node.target not in _REDUCTIONS:
        return None
    source, dims, keeps = node.args[0], _argument(node, 1), bool(_argument(node, 2))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(source, Node) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    dim = int(dims[0]) % _rank(source)
    return (source, dim) if (keeps and put_back is None) or (not keeps and put_back == dim) else None


def _argument(node: Node, position: int) -> Any:
    """A positional argument, also where it was given by name or left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    argument = node.target._schema.arguments[position]
    return node.args[position] if len(node.args) > position else node.kwargs.get(argument.name, argument.default_value)


# *** editing ***


def _insert(twin: Twin, before: Node, target: Any, *args: Any, val: torch.Tensor, like: Node, **kwargs: Any) -> Node:
    """A new twin node; gradients flow through it as through `like`."""
    with twin.graph.inserting_before(before):
        new = twin.graph.call_function(target, args, kwargs)
    new.meta["val"] = val
    if like in twin.origin:
        twin.origin[new] = twin.origin[like]
    if like in twin.requires_grad:
        twin.requires_grad.add(new)
    return new


def _softmax_for(
    twin: Twin, old: Node, x: Node, dim: int, sink: Any = None, *, safe: bool = False, traits: Iterable[str] = ()
) -> Node:
    """A softmax of `x` with the dtype of `old`, before `old`."""
    target = aten._safe_softmax.default if safe else aten._softmax.default
    args = (x, dim) if safe else (x, dim, False)
    new = _insert(twin, old, target, *args, val=x.meta["val"], like=old)
    if sink is not None:
        twin.sinks[new] = sink
    new.meta.update(dict.fromkeys(traits, True))
    dtype = old.meta["val"].dtype
    if dtype == x.meta["val"].dtype:
        return new
    return _insert(twin, old, aten._to_copy.default, new, dtype=dtype, val=x.meta["val"].to(dtype), like=old)


# *** numbers ***


def _constants(twin: Twin) -> None:
    """`torch.tensor(1e-6)`, which the trace keeps as an attribute, becomes a tensor filled with the number."""
    for node in list(twin.graph.nodes):
        number = constant_of_trace(twin.graph, node)
        if number is not None:
            val = node.meta["val"]
            new = _insert(
                twin, node, aten.full.default, list(val.shape), number, dtype=val.dtype, device=val.device, val=val, like=node
            )
            twin.take_place(node, new)


def _neutral(twin: Twin) -> None:
    """`x + 0` and `x * 1` are x: the `sum` of Python begins so, `1 / x` is `reciprocal(x) * 1`, an epsilon may be 0."""
    for node in list(twin.graph.nodes):
        x = _less_neutral(node)
        same = x is not None and _same_shape(x, node) and x.meta["val"].dtype == node.meta["val"].dtype
        if x is not None and same and node not in twin.stops:
            twin.take_place(node, x)


def _less_neutral(node: Node) -> Node | None:
    """x of x + 0, 0 + x, x - 0, x * 1, 1 * x or x / 1"""
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(table.name_of(node))
    if neutral is None or node.kwargs:
        return None
    x, y = node.args
    if isinstance(x, Node) and _number(y) == neutral:
        return x
    commutes = table.name_of(node) in ("add", "mul")
    return y if isinstance(y, Node) and _number(x) == neutral and commutes else None


# *** what in-place operations leave behind ***


def _copies(twin: Twin) -> None:
    """`copy(x, y)` is y with the shape and dtype of x, whose values nobody reads; nor do `fill(x, 0)` and `zero(x)`."""
    for node in list(twin.graph.nodes):
        if node.meta.get("stop"):
            continue
        if node.target in (aten.fill.Scalar, aten.zero.default):
            twin.take_place(node, _expanded(twin, node, _argument(node, 1) if len(node.args) > 1 else 0))
        if node.target not in (aten.copy.default, aten.fill.Tensor):
            continue
        val, source = node.meta["val"], node.args[1]
        if source.meta["val"].dtype != val.dtype:
            narrowed = source.meta["val"].to(val.dtype)
            source = _insert(twin, node, aten._to_copy.default, source, dtype=val.dtype, val=narrowed, like=source)
        if _texts(source) != _texts(node):
            source = _insert(twin, node, aten.expand.default, source, _sizes(val), val=val, like=source)
        twin.take_place(node, source)


def _sizes(val: torch.Tensor) -> list[int]:
    """For the text of a node whose shape is read from its value: PyTorch warns of symbols among arguments."""
    return [n if isinstance(n, int) else -1 for n in val.shape]


def _expanded(twin: Twin, node: Node, number: Any) -> Node:
    """A number in the shape and dtype of the node."""
    val = node.meta["val"]
    scalar = _insert(twin, node, aten.scalar_tensor.default, number, dtype=val.dtype, val=val.new_empty(()), like=node)
    new = _insert(twin, node, aten.expand.default, scalar, _sizes(val), val=val, like=node)
    twin.requires_grad -= {scalar, new}
    return new


def _dropouts(twin: Twin) -> None:
    """Dropout in place: `x * (bernoulli(p) / p)` is native_dropout with probability 1 - p."""
    for node in list(twin.graph.nodes):
        if table.name_of(node) != "mul" or not all(isinstance(a, Node) for a in node.args):
            continue
        x, noise = node.args
        keep = _survival(noise)
        if keep is None or len(noise.users) != 1 or not _same_shape(noise, x):
            continue  # noise that is broadcast drops whole heads or rows at once, as dropout2d does
        val = node.meta["val"]
        both = (val, val.new_empty(val.shape, dtype=torch.bool))
        args = (x, round(1.0 - keep, 12), True)
        pair = _insert(twin, node, aten.native_dropout.default, *args, val=both, like=node)  # type: ignore[arg-type]
        twin.take_place(node, _insert(twin, node, operator.getitem, pair, 0, val=val, like=node))


def _survival(noise: Node) -> float | None:
    """p where the node is bernoulli(p) / p"""
    if table.name_of(noise) != "div" or noise.kwargs or not isinstance(noise.args[0], Node):
        return None
    drawn, p = noise.args[0], noise.args[1]
    same = table.name_of(drawn) == "bernoulli" and len(drawn.args) > 1 and drawn.args[1] == p
    return p if same and isinstance(p, float) and len(drawn.users) == 1 else None


# *** statistics of a row, whose dimension is put back later ***


def _unsqueezes(twin: Twin) -> None:
    """`(1 / x.sum(-1)).unsqueeze(-1)` is `1 / x.sum(-1).unsqueeze(-1)`: the dimension is put back where it was reduced."""
    pending = [n for n in twin.graph.nodes if table.name_of(n) == "unsqueeze"]
    while pending:
        node = pending.pop()
        inner = node.args[0]
        if not _is(node, "unsqueeze") or not _is(inner, *table.POINTWISE) or not _is_of_reductions(inner):
            continue
        moved = [_unsqueezed(twin, a, node) if isinstance(a, Node) else a for a in inner.args]
        new = _insert(twin, node, inner.target, *moved, val=node.meta["val"], like=inner, **inner.kwargs)
        twin.take_place(node, new, (inner,))
        pending += [a for a in moved if isinstance(a, Node) and table.name_of(a) == "unsqueeze"]


def _is_of_reductions(node: Any) -> bool:
    """Is it computed, number by number, from reductions of its own shape that drop their dimension?"""
    operation, inner = table.name_of(node), peel(node)
    if inner is not node:
        return _is_of_reductions(inner)
    if operation == "getitem":
        return node.args[1] == 0 and node.args[0].target is aten.max.dim and not _argument(node.args[0], 2)
    if node.target in _REDUCTIONS:
        return not _argument(node, 2)
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    plain = operation in table.POINTWISE and bool(tensors) and all(isinstance(v, torch.Tensor) for v in _values(node))
    return plain and all(_rank(a) == 0 or (_same_shape(a, node) and _is_of_reductions(a)) for a in tensors)


def _values(node: Node) -> list[Any]:
    return [a.meta.get("val") for a in node.all_input_nodes]


def _unsqueezed(twin: Twin, x: Node, like: Node) -> Node:
    if _rank(x) == 0:
        return x
    dim = like.args[1]
    return _insert(twin, like, aten.unsqueeze.default, x, dim, val=x.meta["val"].unsqueeze(dim), like=x)


# *** exp over its sum ***


@dataclass(frozen=True)
class _Row:
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


def _traits(softmax: Node) -> list[str]:
    """Those of `_Row` that the node has."""
    return [trait for trait in ("raw", "logged", "unsaved") if trait in softmax.meta]


def _quotients(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        parts = quotient(node)
        if parts is None:
            continue
        numerator, denominator = parts
        row = _normalised(twin, numerator, denominator, node)
        if row is not None and _same_shape(node, row.exponential):
            new = _softmax_for(twin, node, row.x, row.dim, row.sink, traits=row.traits)
            twin.take_place(node, new, (row.exponential,))
        else:
            _normalise_before_product(twin, node, numerator, denominator)


def quotient(node: Node) -> tuple[Node, Node] | None:
    operation = table.name_of(node)
    if operation in ("div", "true_divide") and not node.kwargs and all(isinstance(a, Node) for a in node.args):
        return node.args  # type: ignore[return-value]
    if operation == "mul":
        for a, b in (node.args, reversed(node.args)):
            inverse = peel(b)
            inverts = _is(inverse, "reciprocal") or (_is(inverse, "pow") and inverse.args[1] == -1)
            if inverts and isinstance(a, Node):
                return a, inverse.args[0]  # type: ignore[return-value]
    return None


def _normalised(twin: Twin, numerator: Node, denominator: Node, before: Node) -> _Row | None:
    exponential = peel(numerator)
    z = _exponent(twin, exponential, before)
    if z is None:
        return None
    total, others = None, []
    for term in _terms(_without_floor(denominator, exponential)):
        reduced = _reduction(term, ("sum",)) or _absolute_sum(term)
        if total is None and reduced is not None and _is_same_value(reduced[0], exponential):
            total = reduced
        else:
            others.append(term)
    if total is None or len(others) > 1:
        return None
    dim = total[1]
    x, shift = _split_shift(z, dim)
    sink = _sink(others[0], z, shift, dim) if others else None
    if others and sink is None:
        return None
    traits = ("raw",) if shift is None else ("unsaved",) if others and _may_be_infinite(shift) else ()
    return _Row(exponential, x, sink, dim, traits)


def _exponent(twin: Twin, node: Any, before: Node) -> Node | None:
    """z where the node is exp(z), or exp(z) with zeros where a mask says so, which is exp(-inf)."""
    if _is(node, "exp"):
        return node.args[0]
    if _is(node, "exp2"):
        z: Node = node.args[0]
        return _insert(twin, before, aten.mul.Tensor, z, math.log(2), val=z.meta["val"], like=z)
    if not _is(node, "masked_fill", "where", "mul"):
        return None
    found = _zeroed(node)
    if found is None:
        return None
    kept, condition, inverted = found
    inner = peel(kept)
    if not _is(inner, "exp"):
        return None
    z = inner.args[0]  # type: ignore[assignment]
    val = z.meta["val"]
    fill = _insert(twin, before, aten.scalar_tensor.default, -math.inf, dtype=val.dtype, val=val.new_empty(()), like=z)
    twin.requires_grad.discard(fill)
    branches = (fill, z) if inverted else (z, fill)
    return _insert(twin, before, aten.where.self, condition, *branches, val=val.expand(_shape(node)), like=z)


def _is_same_value(a: Any, b: Any, depth: int = 8) -> bool:
    """The same node but for memory and dtype, or the same operations on such nodes."""
    a, b = peel(a), peel(b)
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a is b or (type(a) is type(b) and isinstance(a, (int, float, bool)) and a == b)
    kept = table.name_of(a) in ("expand", "getitem", "unsqueeze")
    known = kept or table.name_of(a) in table.POINTWISE or a.target in _REDUCTIONS
    alike = (
        depth > 0 and known and a.target is b.target and not a.kwargs and not b.kwargs and len(a.args) == len(b.args)
    )
    stopped = any(n.meta.get("stop") for n in (a, b))
    return alike and not stopped and all(_same_argument(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def _same_argument(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same_argument, a, b, [depth] * len(a)))
    return _is_same_value(a, b, depth)


def _zeroed(node: Node) -> tuple[Node, Node, bool] | None:
    """(value, bool condition, whether the condition marks the zeros)"""
    if table.name_of(node) == "masked_fill":
        return (node.args[0], node.args[1], True) if _is_zero(node.args[2]) else None  # type: ignore[return-value]
    if table.name_of(node) == "where":
        condition, x, y = node.args
        if _is_zero(y):
            return x, condition, False  # type: ignore[return-value]
        return (y, condition, True) if _is_zero(x) else None  # type: ignore[return-value]
    for value, mask in (node.args, reversed(node.args)):
        if _is(mask, "_to_copy"):
            mask = mask.args[0]
        if isinstance(value, Node) and isinstance(mask, Node) and mask.meta["val"].dtype is torch.bool:
            return value, mask, False
    return None


def _is_zero(value: Any) -> bool:
    return _number(value) == 0


def _number(value: Any) -> float | None:
    """The one number that a literal or a filled tensor holds."""
    value = peel(value)
    if isinstance(value, Node):
        at = {"scalar_tensor": 0, "full": 1}.get(table.name_of(value))
        value = 0 if table.name_of(value) in ("zeros", "zeros_like") else None if at is None else value.args[at]
    return value if isinstance(value, (int, float)) else None


def _terms(node: Any) -> Iterator[Any]:
    inner = peel(node)
    if _is(inner, "add") and not inner.kwargs:
        yield from _terms(inner.args[0])
        yield from _terms(inner.args[1])
    else:
        yield node


_LOST = 2.0**-25  # added to a float32 number of at least 1 it changes nothing


def _without_floor(denominator: Node, exponential: Node) -> Any:
    """max(sum, eps), or sum + eps with an eps that is lost, is the sum where the greatest term is exp(0) = 1."""
    total, floor = _floored(denominator)
    if floor is None:
        total, floor = _less_lost(denominator)
    z: Any = peel(exponential.args[0]) if _is(exponential, "exp") else None
    if floor is None or floor >= 1 or not _is(z, "sub") or z.kwargs:
        return denominator
    greatest = _reduction(_peel_item(z.args[1]), ("amax", "max"))
    return total if greatest is not None and peel(greatest[0]) is peel(z.args[0]) else denominator


def _less_lost(node: Any) -> tuple[Any, float | None]:
    """(x, number) of x + number where the number vanishes beside 1; (the node, None) otherwise."""
    inner = _peel_broadcast(node)
    if _is(inner, "add") and not inner.kwargs:
        for x, number in (inner.args, reversed(inner.args)):
            if 0 <= (_number(number) or math.inf) <= _LOST:
                return x, _number(number)
    return node, None


def _floored(node: Any) -> tuple[Any, float | None]:
    """(x, number) of max(x, number); (the node, None) otherwise."""
    inner = _peel_broadcast(node)
    if _is(inner, "clamp_min", "clamp") and len(inner.args) + len(inner.kwargs) == 2:
        floor = inner.args[1] if len(inner.args) > 1 else inner.kwargs.get("min")
        return inner.args[0], _number(floor)
    if _is(inner, "maximum"):
        for x, floor in (inner.args, reversed(inner.args)):
            if _number(floor) is not None and _same_shape(x, inner):
                return x, _number(floor)
    return node, None


def _absolute_sum(node: Any) -> tuple[Node, int] | None:
    """(what is summed, over which dimension) where the node is a norm of order 1, for an exponential its sum."""
    node = _peel_broadcast(node)
    dims = _argument(node, 2) if _is(node, "linalg_vector_norm") else None
    if not dims or len(dims) != 1 or _argument(node, 1) != 1 or not _argument(node, 3):
        return None
    return node.args[0], int(dims[0]) % _rank(node)


def _peel_item(node: Any) -> Any:
    """`max(dim)` gives values and indices: its first item counts as the reduction."""
    node = _peel_broadcast(node)
    if _is(node, "getitem") and node.args[1] == 0:
        return node.args[0]
    return node


def _split_shift(z: Node, dim: int) -> tuple[Node, Node | None]:
    """(x, c) of x - c with c constant along the row and made from the scores; (z, None) otherwise."""
    inner = peel(z)
    if _is(inner, "sub") and not inner.kwargs and isinstance(inner.args[0], Node):
        x, c = inner.args
        if isinstance(c, Node) and _is_row_constant(c, x, dim) and _depends_on_product(c) and _is_maximum(c):
            return x, c  # type: ignore[return-value]
    return z, None


def _is_maximum(shift: Node) -> bool:
    """A maximum is finite where the row has a key; a mean or a minimum of a masked row is not."""
    node = _peel_item(shift)
    while isinstance(node, Node) and table.name_of(node) in (*_PATH, "clamp", "clamp_min", "maximum", "detach"):
        node = _peel_item(node.args[0])
    return isinstance(node, Node) and table.name_of(node) in ("amax", "max", "logsumexp")


def _may_be_infinite(shift: Node) -> bool:
    """Is the maximum of a row of -inf itself -inf? Not where it is kept above another number."""
    node = _peel_item(shift)
    while isinstance(node, Node) and table.name_of(node) in _PATH | {"detach"}:
        node = _peel_item(node.args[0])
    return table.name_of(node) in ("amax", "max", "logsumexp")


def _depends_on_product(node: Node, limit: int = 1000) -> bool:
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


def _sink(term: Any, z: Node, shift: Node | None, dim: int) -> Any:
    """The logit, relative to the unshifted score, of one more term of the denominator; None where it has none."""
    value, number = peel(term), _number(term)
    if number is not None:
        return math.log(number) if shift is None and number > 0 else None
    if not _is_row_constant(value, z, dim) or not _is(value, "exp"):
        return None
    logit: Node = value.args[0]  # type: ignore[assignment]
    if shift is None:
        return logit
    inner, c = peel(logit), _peel_broadcast(shift)
    if _is(inner, "neg") and _peel_broadcast(inner.args[0]) is c:
        return 0.0
    if _is(inner, "sub") and not inner.kwargs and _peel_broadcast(inner.args[1]) is c:
        return inner.args[0]
    return None


def _normalise_before_product(twin: Twin, node: Node, numerator: Node, denominator: Node) -> None:
    """(exp(z) @ v) / sum(exp(z)) becomes softmax(z) @ v, the views between product and quotient repeated."""
    path, product = _to_product(numerator)
    if product is None:
        return
    exponential, views = _walk_up(product.args[0])
    sums = [r for t in _terms(denominator) if (r := _reduction(t, ("sum",))) and peel(r[0]) is exponential]
    if not isinstance(exponential, Node) or not sums or sums[0][1] != _rank(exponential) - 1:
        return
    row = _normalised(twin, exponential, denominator, product)
    quotient = (_peel_broadcast(denominator), numerator, exponential)
    if row is None or not _divides_own_rows(twin, quotient, path, views):
        return
    weights = _softmax_for(twin, product, row.x, row.dim, row.sink, traits=row.traits)
    args = (_repeat(twin, views, weights, product), product.args[1])
    new = _insert(twin, product, table.BMM, *args, val=product.meta["val"], like=product)
    twin.take_place(node, _repeat(twin, path, new, node), (row.exponential, product))


def _divides_own_rows(twin: Twin, quotient: tuple[Node, Node, Node], path: list[Node], views: list[Node]) -> bool:
    """Is every row of the numerator [.., M, Dv] divided by the sum [.., M, 1] of its own weights [.., M, N]?

    An index of the numerator is followed up the views to the product and on to the weights.
    """
    total, numerator, weights = quotient
    alike = _texts(total)[:-1] == _texts(numerator)[:-1] == _texts(weights)[:-1]
    if not alike or not _is_one(_shape(total)[-1]):
        return False
    shapes, key = Shapes(), name("$key")
    sizes: dict[Expr, Expr] = {name(f"$axis{i}"): size for i, size in enumerate(shapes.of(numerator))}
    sizes[key] = shapes.of(weights)[-1]
    puller = Puller(twin, shapes, ix.Indexer(sizes, shapes.hints))
    rows = tuple(ix.ZERO if size is ix.ONE else i for i, size in list(sizes.items())[:-1])
    index = _follow(puller, path, rows)
    reached = None if index is None else _follow(puller, views, (*index[:-1], key))
    return reached is not None and reached[:-1] == rows[:-1] and reached[-1] is key


def _follow(puller: Puller, path: list[Node], index: Index) -> Index | None:
    """The index of what the views start from."""
    for step in reversed(path):
        viewed = puller.view(step, index)
        if viewed is None and table.name_of(step) not in table.CASTS:
            return None
        index = index if viewed is None else viewed[1]
    return index


def _texts(node: Node) -> list[str]:
    """The sizes as text: comparing run-time sizes would add guards."""
    return [str(size) for size in _shape(node)]


def _same_shape(a: Node, b: Node) -> bool:
    return _texts(a) == _texts(b)


def _to_product(node: Node) -> tuple[list[Node], Node | None]:
    """The views and casts from a product to the node, and the product."""
    node, path = _walk_up(node)
    return path, node if node.target is table.BMM else None


def _walk_up(node: Any) -> tuple[Any, list[Node]]:
    path: list[Node] = []
    while _is(node, *_PATH) and not _is_integer_cast(node):
        path.append(node)
        node = node.args[0]
    return node, path[::-1]


def _repeat(twin: Twin, path: list[Node], start: Node, before: Node) -> Node:
    """The same views and casts of another node."""
    for step in path:
        start = _once_more(twin, step, 0, start, before)
    return start


def _once_more(twin: Twin, step: Node, position: int, new: Node, before: Node) -> Node:
    """The same operation of another argument at the position."""
    args = [*step.args[:position], new, *step.args[position + 1 :]]
    return _insert(twin, before, step.target, *args, val=step.meta["val"], like=step, **step.kwargs)


# *** logarithms ***


def _logarithms(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if table.name_of(node) != "exp":
            continue
        inner = peel(node.args[0])
        if _is(inner, "_log_softmax"):
            x, dim = inner.args[0], int(inner.args[1]) % _rank(node)  # type: ignore[arg-type]
            twin.take_place(node, _softmax_for(twin, node, x, dim), (inner,))  # type: ignore[arg-type]
        elif _is(inner, "sub") and not inner.kwargs:
            x, total = inner.args
            if not isinstance(x, Node) or not _same_shape(x, node):
                continue
            found = None if _loses_logarithm(x) else _log_total(total, x)
            if found is not None:
                twin.take_place(node, _softmax_for(twin, node, x, *found), (inner,))
            elif (row := _less_logarithm(twin, x, total, node)) is not None:
                new = _softmax_for(twin, node, row.x, row.dim, row.sink, traits=row.traits)
                twin.take_place(node, new, (inner,))


def _log_total(total: Any, x: Node) -> tuple[int, Any] | None:
    """(dimension, sink) where the node is the logarithm of sum(exp(x)), or of this and exp(sink)."""
    reduced = _reduction(total, ("logsumexp",))
    if reduced is not None:
        source, dim = reduced
        column = _column(source, dim)
        if column is not None and peel(column.scores) is peel(x):
            return dim, column.sink
        return (dim, None) if peel(source) is peel(x) else None
    total = _peel_broadcast(total)
    if not _is(total, "logaddexp"):
        return None
    for inner, sink in (total.args, reversed(total.args)):
        found = _log_total(inner, x)
        if found is not None and found[1] is None and _is_row_constant(sink, x, found[0]):
            return found[0], sink
    return None


def _less_logarithm(twin: Twin, z: Node, total: Any, before: Node) -> _Row | None:
    """exp(z - log(d)) is exp(z) / d, and exp(z - (c + log(d))) is exp(z - c) / d."""
    terms = list(_terms(_peel_broadcast(total)))
    logarithms = [t for t in map(_peel_broadcast, terms) if _is(t, "log")]
    if len(logarithms) != 1 or len(terms) > 2:
        return None
    shifts = [t for t in terms if _peel_broadcast(t) is not logarithms[0]]
    if shifts and _loses_logarithm(z):
        return None
    denominator: Node = logarithms[0].args[0]
    summed = [peel(r[0]) for t in _terms(_floored(denominator)[0]) if (r := _reduction(t, ("sum",)))]
    exponential = next((e for e in summed if _is(e, "exp") and _is_shifted(e.args[0], z, shifts)), None)
    row = None if exponential is None else _normalised(twin, exponential, denominator, before)
    if row is None or not _same_shape(row.exponential, before) or (shifts and "raw" in row.traits):
        return None
    return replace(row, traits=tuple("logged" if trait == "raw" else trait for trait in row.traits))


def _is_shifted(exponent: Any, z: Node, shifts: list[Any]) -> bool:
    """Is the exponent z less the shift, or z itself where there is none?"""
    if not shifts:
        return _is_same_value(exponent, z)
    inner = peel(exponent)
    return (
        _is(inner, "sub")
        and not inner.kwargs
        and _is_same_value(inner.args[0], z)
        and _is_same_value(_peel_broadcast(inner.args[1]), _peel_broadcast(shifts[0]))
    )


def _loses_logarithm(x: Node) -> bool:
    """Are scores filled with numbers beside which log(n) vanishes? Rows of such fills have weights of 1 each, not 1 / n."""
    greatest = 0.01 / torch.finfo(x.meta["val"].dtype).eps
    return any(greatest < abs(a) < math.inf for a in numbers_in([x]))


# *** a sink as a column ***


@dataclass(frozen=True)
class _Column:
    """Scores with one more column, the sink: the first one or the last."""

    scores: Node
    sink: Any
    first: bool


def _column(joined: Any, dim: int) -> _Column | None:
    """Scores and sink where the node is both side by side along `dim`, joined or padded with a number."""
    joined = peel(joined)
    if _is(joined, "constant_pad_nd"):
        scores, pads, *value = joined.args
        back = 2 * (_rank(joined) - 1 - dim)  # pads count from the last dimension
        number, fixed = float(value[0]) if value else 0.0, all(isinstance(p, int) for p in pads)
        if not fixed or sum(map(abs, pads)) != 1 or 1 not in pads[back : back + 2] or not math.isfinite(number):
            return None
        return None if _is_one(_shape(scores)[dim]) else _Column(scores, number, first=pads[back] == 1)
    if not _is(joined, "cat") or int(_argument(joined, 1)) % _rank(joined) != dim or len(joined.args[0]) != 2:
        return None
    pieces = joined.args[0]
    if any(_rank(p) != _rank(joined) for p in pieces):
        return None  # `cat` skips tensors of shape [0]
    single = [_is_one(_shape(p)[dim]) for p in pieces]
    if sum(single) != 1:
        return None
    return _Column(pieces[single.index(False)], pieces[single.index(True)], first=single[0])


def _columns(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if node.target is not aten._softmax.default:
            continue
        dim = int(node.args[1]) % max(_rank(node), 1)
        z, _ = _split_shift(node.args[0], dim)  # type: ignore[arg-type]
        column = _column(z, dim)
        if column is None:
            continue
        users = [n for n in _users_of_value(node) if n.users or n in twin.roots]
        if users and all(_drops_sink(u, dim, column) for u in users):
            for u in users:
                new = _softmax_for(twin, u, column.scores, dim, sink=column.sink, traits=_traits(node))
                twin.take_place(u, new, (node, peel(z)))


def _users_of_value(node: Node) -> list[Node]:
    """Who reads the value, the pieces of it where it is split."""
    out: list[Node] = []
    for user in node.users:
        through = _is(user, *_SAME_VALUE) or table.name_of(user) in ("split", "split_with_sizes")
        out += _users_of_value(user) if through else [user]
    return out


def _drops_sink(node: Node, dim: int, column: _Column) -> bool:
    """Is the node all of the value along `dim` but the sink: x[..., :-1], x[..., 1:], or that piece of a split?"""
    part = _shape(node)[dim] if isinstance(node.meta["val"], torch.Tensor) and _rank(node) > dim else None
    if str(part) != str(_shape(column.scores)[dim]):
        return False
    if _is(node, "getitem"):
        split: Node = node.args[0]  # type: ignore[assignment]
        rank = _rank(split.args[0])  # type: ignore[arg-type]
        start = _start_of_piece(split, dim, int(node.args[1]))  # type: ignore[call-overload]
        return int(_argument(split, 2)) % rank == dim and start == int(column.first)
    if table.name_of(node) != "slice" or int(_argument(node, 1)) % _rank(node) != dim:
        return False
    start, step, whole = _argument(node, 2) or 0, _argument(node, 4), _shape(node.args[0])[dim]  # type: ignore[arg-type]
    if isinstance(start, int) and isinstance(whole, int) and start < 0:
        start += whole
    return start == int(column.first) and step == 1


def _start_of_piece(split: Node, dim: int, position: int) -> int | None:
    """Where the piece begins; None where a size before it is known at run time only."""
    sizes = [piece.shape[dim] for piece in split.meta["val"][:position]]
    return sum(sizes) if all(isinstance(s, int) for s in sizes) else None


# *** shifts by hand ***


def _shifts(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        if node.target in table.SOFTMAX:
            dim = int(node.args[1]) % max(_rank(node), 1)  # type: ignore[arg-type]
            x = _without_shift(twin, node.args[0], dim, node)
            if x is not None:
                new = _insert(twin, node, node.target, x, *node.args[1:], val=node.meta["val"], like=node)
                if node in twin.sinks:
                    continue  # the sink would have to shift too
                new.meta.update(dict.fromkeys(_traits(node), True))
                twin.take_place(node, new)


def _without_shift(twin: Twin, z: Any, dim: int, before: Node) -> Node | None:
    """z less a shift that is constant along the row, anywhere in a sum, under factors and -inf masks; None: no shift."""
    if not isinstance(z, Node) or not z.args or _rank(z) != _rank(before):
        return None
    x, shift = _split_shift(z, dim) if table.name_of(z) == "sub" else (z, None)
    if shift is not None or (x := _less_finite_shift(z, dim)) is not None:  # type: ignore[assignment]
        return x
    if (turned := _subtracted_from_shift(z, dim)) is not None:
        return _insert(twin, before, aten.neg.default, turned, val=z.meta["val"], like=z)
    for position in _shiftable(z, dim):
        inner = _without_shift(twin, z.args[position], dim, before)
        if inner is not None:
            args = [*z.args]
            args[position] = inner
            new = _insert(twin, before, z.target, *args, val=z.meta["val"], like=z, **z.kwargs)
            if z.meta.get("stop"):
                new.meta["stop"] = True
                twin.stops.add(new)
            return new
    return None


def _less_finite_shift(z: Node, dim: int) -> Node | None:
    """x of x - c where c is a mean, say, of scores that nothing masks: constant along the row, and certainly finite.

    Nor may x be masked before: the gradient of a row without a key is NaN in x, and reaches all of its scores by c.
    """
    if not _is(z, "sub") or z.kwargs or not all(isinstance(a, Node) for a in z.args):
        return None
    x, c = z.args
    harmless = _is_row_constant(c, x, dim) and _depends_on_product(c) and _is_unmasked(z)  # type: ignore[arg-type]
    return x if harmless and _same_shape(x, z) else None  # type: ignore[arg-type, return-value]


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
    if not _is(z, "sub") or z.kwargs or not all(isinstance(a, Node) for a in z.args):
        return None
    c, x = z.args
    shifts = _is_row_constant(c, x, dim) and _depends_on_product(c) and _is_maximum(c)  # type: ignore[arg-type]
    return x if shifts and _same_shape(x, z) else None  # type: ignore[arg-type, return-value]


def _shiftable(z: Node, dim: int) -> tuple[int, ...]:
    """Arguments to which a constant along the row may be added without changing the softmax of the result."""
    operation = table.name_of(z)
    if operation == "add" and not z.kwargs:
        return 0, 1
    if operation == "sub" and not z.kwargs:
        return (0,)
    if operation in ("mul", "div") and _is_row_constant(z.args[1], z, dim):
        return (0,)
    if operation in ("_to_copy", "clone", "alias"):
        return (0,)
    if operation == "masked_fill" and _is_minus_infinity(z.args[2]):
        return (0,)
    if operation == "where":
        if _is_minus_infinity(z.args[2]):
            return (1,)
        return (2,) if _is_minus_infinity(z.args[1]) else ()
    return ()


def _is_minus_infinity(value: Any) -> bool:
    return _number(value) == -math.inf


# *** rows without a key ***


def _guards(twin: Twin) -> None:
    for node in list(twin.graph.nodes):
        weights = _guarded(node)
        inner = peel(weights)
        found = isinstance(inner, Node) and inner.target in table.SOFTMAX and inner not in twin.sinks
        if found and _same_shape(inner, node):
            dim = int(inner.args[1]) % max(_rank(inner), 1)  # type: ignore[arg-type]
            new = _softmax_for(twin, node, inner.args[0], dim, safe=True, traits=_traits(inner))  # type: ignore[arg-type]
            twin.take_place(node, new, (inner,))


def _guarded(node: Node) -> Any:
    """w where the node is w with 0 for NaN, or for the rows of -inf that make it NaN."""
    operation = table.name_of(node)
    if operation == "nan_to_num":
        return node.args[0] if not _argument(node, 1) else None
    found = _zeroed(node) if operation in ("masked_fill", "where") else None
    if found is None:
        return None
    value, condition, marks_zeros = found
    softmax = peel(value)
    if not isinstance(softmax, Node) or softmax.target not in table.SOFTMAX:
        return None
    test, marks_zeros = _without_not(condition, marks_zeros)
    dim = int(softmax.args[1]) % max(_rank(softmax), 1)  # type: ignore[arg-type]
    found_empty = (_is_row_of_nan(test, softmax, dim), _is_empty_row(test, softmax.args[0], dim))
    return value if marks_zeros in found_empty else None


def _is_row_of_nan(test: Node, softmax: Node, dim: int) -> bool | None:
    """True where the test says that a weight is NaN, False where it says the opposite, None where it is no such test.

    All weights of a row are NaN or none, so that any and all of them say the same.
    """
    holds, row = True, _reduction(test, ("any", "all"))
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
    test = _peel_broadcast(condition)
    while table.name_of(test) in ("logical_not", "bitwise_not"):
        test, holds = _peel_broadcast(test.args[0]), not holds
    return test, holds


def _is_empty_row(test: Node, x: Any, dim: int) -> bool | None:
    """True where the test says that a row of x is all -inf, False where it says the opposite, None where it is no such test."""
    greatest = _compared_with_minus_infinity(test)
    if greatest is not None:
        reduced = _reduction(_peel_item(greatest[0]), ("amax", "max"))
        return greatest[1] if reduced is not None and peel(reduced[0]) is peel(x) and reduced[1] == dim else None
    for reduction, wanted in (("all", True), ("any", False)):
        reduced = _reduction(test, (reduction,))
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
    if operation not in ("eq", "ne", "gt") or not _is_minus_infinity(test.args[1]):
        return None
    return test.args[0], operation == "eq"


# *** sums of weights ***


def _split_sums_of_weights(twin: Twin) -> None:
    """(a - c * (b + d)) @ v with a softmax in each of a, b and d becomes a @ v - (c * b) @ v - (c * d) @ v."""
    for product in [n for n in twin.graph.nodes if n.target is table.BMM]:
        if _sum_of_weights(product.args[0]) is not None:
            parts: list[Node] = []
            new = _multiplied(twin, product.args[0], [], product, parts)  # type: ignore[arg-type]
            twin.take_place(product, new)
            twin.sums.update(dict.fromkeys(parts, new))


_Step = tuple[Node, int]  # an operation that is linear in the argument at the position


def _sum_of_weights(node: Any) -> tuple[Node, list[_Step]] | None:
    """A sum or difference of weights, and the views, casts and factors that lead from it to the node."""
    node, views = _walk_up(node)
    path = [(step, 0) for step in views]
    if _is(node, "add", "sub"):
        summed = not node.kwargs and len(node.users) == 1 and all(_is_summand(a, node) for a in node.args)
        return (node, path) if summed else None
    if _is(node, "mul", "div", "neg") and not node.kwargs and len(node.users) == 1:
        for position in range(2 if _is(node, "mul") else 1):
            found = _sum_of_weights(node.args[position])
            if found is not None:
                return found[0], [*found[1], (node, position), *path]
    return None


def _is_summand(node: Any, total: Node) -> bool:
    if not isinstance(node, Node) or not _same_shape(node, total):
        return False
    return _is_weight(node) or _sum_of_weights(node) is not None


def _multiplied(twin: Twin, node: Node, path: list[_Step], product: Node, parts: list[Node]) -> Node:
    """The product with what the path makes of the node, as a sum of products, which are added to `parts`."""
    val = product.meta["val"]
    found = _sum_of_weights(node)
    if found is None:
        for step, position in path:
            node = _once_more(twin, step, position, node, product)
        parts.append(_insert(twin, product, table.BMM, node, product.args[1], val=val, like=product))
        return parts[-1]
    total, steps = found
    terms = [_multiplied(twin, a, [*steps, *path], product, parts) for a in total.args]  # type: ignore[arg-type]
    return _insert(twin, product, total.target, *terms, val=val, like=product)


def _is_weight(node: Node) -> bool:
    """A softmax, perhaps times something."""
    node, _ = _walk_up(node)
    if node.target in table.SOFTMAX:
        return True
    if table.name_of(node) in ("mul", "div", "neg"):
        return any(_is_weight(a) for a in node.args if isinstance(a, Node))
    return table.name_of(node) == "getitem" and table.name_of(node.args[0]) == "native_dropout"  # type: ignore[arg-type]
