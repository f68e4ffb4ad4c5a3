"""From two products and a softmax to a Site: everything between them becomes one Program.

The coordinates are those of the value product: folded batch `$i`, query `$m`, key `$n`, head dim `$d`. When all
indices are known, `$i` is split into batch and head by the divisor the graph itself uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from .. import compat
from ..limits import FEW, WIDE, is_slow_for_few_queries, max_head_dim
from ..reject import Reason, Reject
from ..score.expr import Const, Expr, Load, Name, Op, Program, const, name, op, rebuild, substitute, walk, where
from ..score.simplify import simplify
from . import aten as table
from . import index as ix
from .captures import renumber, unfold
from .guards import Guards
from .normalize import Twin, leaf_value, made_of, numbers_in
from .operand import B, H, as_operand
from .pull import D, I, Index, M, N, Puller, choose, compare, logical, negate
from .shapes import Shapes
from .site import Operand, Site

SCORE, P = name("score"), name("$p")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Product:
    """Operands of a batched product seen through the coordinates: (node, index of each dimension)."""

    left: tuple[Node, Index]
    right: tuple[Node, Index]


@dataclass
class _Lifted:
    """What the walk found, still in product coordinates."""

    puller: Puller
    score: Expr
    weight: Expr
    query: tuple[Node, Index]
    key: tuple[Node, Index]
    value: tuple[Node, Index]
    sink: Expr | None
    empty: float | None
    covered: set[Node] = field(default_factory=set)


def lift_site(twin: Twin, anchor: Node, product: Node, position: int, score_product: Node) -> tuple[Site, set[Node]]:
    """The site, and the twin nodes it stands for. Raises Reject."""
    shapes = Shapes()
    lifted = _walk(twin, shapes, anchor, product, position, score_product)
    return _build(twin, shapes, anchor, product, position, lifted), lifted.covered


# *** the walk ***


def _walk(twin: Twin, shapes: Shapes, anchor: Node, product: Node, position: int, score_product: Node) -> _Lifted:
    weights, values = product.args[position], product.args[1 - position]
    d = _head_dim(_operands(score_product)[0], 2, product)
    _head_dim(values, 2 if position == 0 else 1, product)  # type: ignore[arg-type]
    w_shape = shapes.of(weights)  # type: ignore[arg-type]  # after the head dims: a number may equal a length's symbol
    m, n = (w_shape[1], w_shape[2]) if position == 0 else (w_shape[2], w_shape[1])
    if isinstance(n, Const) and n.head <= 1:
        raise Reject(Reason.ONE_KEY, anchor)
    rows = weights.meta["val"].shape[1:]  # type: ignore[union-attr]
    if d.head > WIDE and all(compat.sym_hint(length) <= d.head for length in rows):
        raise Reject(Reason.COST, anchor, f"scores of {' x '.join(map(str, rows))}, head_dim {d}")
    sizes: dict[Expr, Expr] = {I: w_shape[0], M: m, N: n, D: d}
    indexer = ix.Indexer(sizes, shapes.hints)
    puller = Puller(twin, shapes, indexer)
    puller.gradients = _wants_gradient(twin, puller.defined, product)
    found: dict[str, Index] = {}

    def at_softmax(index: Index) -> Expr:
        _check_axis(shapes, anchor, index, n)
        _check_gradient(puller, anchor)
        if found.setdefault("softmax", index) != index:
            raise Reject(Reason.WEIGHT, anchor, "the weights are read at two places")
        return P

    puller.ends = {anchor: at_softmax}
    puller.cone = _between(anchor, product)
    w_index = (I, M, N) if position == 0 else (I, N, M)
    weight = puller.pull(weights, _at_ones(w_index, w_shape))  # type: ignore[arg-type]
    if "softmax" not in found:
        raise Reject(Reason.WEIGHT, product)
    covered = puller.visited | {anchor}

    pair: dict[str, _Product] = {}

    def at_scores(index: Index) -> Expr:
        _check_gradient(puller, score_product)
        got = _score_operands(shapes, score_product, index, m, n)
        if pair.setdefault("qk", got) != got:
            raise Reject(Reason.SCORE, score_product, "the scores are read at two places")
        return SCORE

    puller.visited, puller.weights = set(), False
    puller.ends = {score_product: at_scores}
    puller.cone = _between(score_product, anchor)
    score = puller.pull(anchor.args[0], found["softmax"])  # type: ignore[arg-type]
    if "qk" not in pair:
        raise Reject(Reason.SCORE, anchor)
    sink = _sink(puller, anchor, found["softmax"])
    v_index = (I, N, D) if position == 0 else (I, D, N)
    empty = 0.0 if anchor.target is torch.ops.aten._safe_softmax.default else None
    covered |= puller.visited | {score_product}
    return _Lifted(puller, score, weight, pair["qk"].left, pair["qk"].right, (values, v_index), sink, empty, covered)  # type: ignore[arg-type]


def _sink(puller: Puller, anchor: Node, index: Index) -> Expr | None:
    """The extra term of the denominator, by batch, head and query."""
    logit = puller.twin.sinks.get(anchor)
    if logit is None:
        return None
    if not isinstance(logit, Node):
        return const(float(logit))
    sink = puller.pull(logit, puller.unexpand(logit, index))
    if any(n is N or n is SCORE for n in walk(sink)):
        raise Reject(Reason.SCORE, anchor, "the extra term of the denominator is not one number a row")
    return sink


def _check_gradient(puller: Puller, node: Node) -> None:
    if puller.gradients and node in puller.twin.stops:
        raise Reject(Reason.GRADIENT, node, f"at {table.name_of(node)}")


def _wants_gradient(twin: Twin, defined: set[Node], product: Node) -> bool:
    """Does eager differentiate the attention's result? (Not under no_grad.)"""
    node = product
    while node not in defined and len(node.users) == 1:
        node = next(iter(node.users))
    return node in twin.requires_grad


def _operands(product: Node) -> tuple[Node, Node]:
    return product.args[0], product.args[1]  # type: ignore[return-value]


def _head_dim(node: Node, at: int, product: Node) -> Const:
    """A head dimension as a number: kernels are made for one, so a run-time one is guarded on."""
    try:
        size = compat.specialise(node.meta["val"].shape[at])
    except Exception as e:
        raise Reject(Reason.HEAD_DIM, product, str(node.meta["val"].shape[at])) from e
    value = node.meta["val"]
    if not 1 <= size <= max_head_dim(value.dtype, value.device):
        raise Reject(Reason.HEAD_DIM, product, str(size))
    return const(size)


def _at_ones(index: Index, shape: tuple[Expr, ...]) -> Index:
    return tuple(ix.ZERO if s is ix.ONE else i for i, s in zip(index, shape, strict=True))


def _between(start: Node, end: Node) -> set[Node]:
    """Nodes that depend on `start` and that `end` depends on, both excluded."""
    below: set[Node] = set()
    stack = list(start.users)
    while stack:
        node = stack.pop()
        if node not in below and node is not end and not _shape_only(node):
            below.add(node)
            stack.extend(node.users)
    above: set[Node] = set()
    stack = list(end.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in below and node not in above:
            above.add(node)
            stack.extend(node.all_input_nodes)
    return above


def _shape_only(node: Node) -> bool:
    return table.name_of(node) in table.SHAPE_ONLY


def _check_axis(shapes: Shapes, anchor: Node, index: Index, n: Expr) -> None:
    axis = int(anchor.args[1]) % max(len(index), 1)  # type: ignore[arg-type]
    shape = shapes.of(anchor)
    at = index[axis]
    runs_over_keys = (at is N or (n is ix.ONE and at is ix.ZERO)) and ix.same(shape[axis], n)
    others = [i for p, i in enumerate(index) if p != axis]
    if not runs_over_keys or any(x is N for i in others for x in walk(i)):
        contracted = [p for p, i in enumerate(index) if any(x is N for x in walk(i))]
        mixed = bool(contracted) and max(contracted) < len(index) - 2  # neither queries nor keys
        reason = Reason.HEADS_MIXED if mixed else Reason.AXIS
        raise Reject(reason, anchor, f"dim {anchor.args[1]} of {tuple(anchor.meta['val'].shape)}")


def _score_operands(shapes: Shapes, product: Node, index: Index, m: Expr, n: Expr) -> _Product:
    """Any product row that depends on the query but not on the key is a query, and the other way round.

    Queries may be batches of the product instead, as in `q.unsqueeze(-2) @ k.mT.unsqueeze(-3)`, or keys may. Then the
    other operand has to be one that is expanded along them, which `_operands_of` finds out.
    """
    left, right = _operands(product)
    folded, first, second = index
    batch, row, column = ({x for x in walk(i) if x in (M, N)} for i in (folded, first, second))
    queries, keys = {M} if m is not ix.ONE else set(), {N}
    if batch != {M, N}:  # else either operand might be the query
        if (row or batch) == queries and (column or batch) == keys:
            return _Product((left, (folded, first, D)), (right, (folded, D, second)))
        if (row or batch) == keys and (column or batch) == queries:
            return _Product((right, (folded, D, second)), (left, (folded, first, D)))
    raise Reject(Reason.SCORE, product, "the product is not indexed by one query and one key")


# *** from coordinates to batch and head ***


def _build(twin: Twin, shapes: Shapes, anchor: Node, product: Node, position: int, lifted: _Lifted) -> Site:
    puller = lifted.puller
    sizes = puller.indexer.sizes
    score = simplify(lifted.score)
    if _multiplies_infinity(score, puller.captures):
        raise Reject(Reason.SCORE, anchor, "an infinity is multiplied, and 0 times infinity is NaN")
    score, keep = _fills(score, UNDERFLOW if "raw" in anchor.meta else -math.inf)
    if ("raw" in anchor.meta or "logged" in anchor.meta) and _may_underflow(score, puller.captures):
        row = "0 / 0" if "raw" in anchor.meta else "exp(inf)"
        raise Reject(Reason.SCORE, anchor, f"a row of large negative scores is {row}, because no maximum is subtracted")
    guards = Guards(puller, keep)
    weight, drop = _split_weight(lifted.weight, guards, anchor)
    empty = lifted.empty
    if empty is None:
        empty = _empty_rows(puller, lifted.weight, score, guards, anchor)
        if empty is None and "unsaved" in anchor.meta and (keep is not None or _may_hold_infinity(puller, score)):
            empty = math.nan
    elif _holds_infinity_beside(score, puller.captures):
        raise Reject(Reason.WEIGHT, anchor, "NaN is replaced by 0, and it may stand in rows that have keys")
    exprs = [e for e in (score, keep, weight, lifted.sink) if e is not None]
    keys = [*lifted.key[1], *lifted.value[1]]
    heads = _heads([[*_indices(puller, lifted.query)], exprs, keys], sizes[I], shapes)
    if heads is ix.ONE and _is_one_batch(shapes.of(anchor), sizes[I]):
        heads = sizes[I]
    batch = puller.indexer.floordiv(sizes[I], heads)
    indexer = ix.Indexer({B: batch, H: heads, M: sizes[M], N: sizes[N], D: sizes[D]}, shapes.hints)
    split: dict[Expr, Expr] = {I: B if heads is ix.ONE else H if batch is ix.ONE else ix.add(ix.mul(B, heads), H)}

    def canonical(e: Expr | None) -> Expr | None:
        return None if e is None else simplify(_rename(_reindex(substitute(e, split), indexer), naming))

    naming = _Naming(sizes[M], sizes[N])
    letters = {"b": batch, "h": heads}
    dv = shapes.of(lifted.value[0])[2 if position == 0 else 1]
    queries = _operands_of(puller, lifted.query, {**letters, "l": sizes[M], "d": sizes[D]}, M, split, indexer, "query")
    keys_ = _operands_of(puller, lifted.key, {**letters, "l": sizes[N], "d": sizes[D]}, N, split, indexer, "key")
    values = _operands_of(puller, lifted.value, {**letters, "l": sizes[N], "d": dv}, N, split, indexer, "value")
    query, q_dtype = _with_heads(queries, heads)
    kv_heads = keys_[0].heads if ix.same(keys_[0].heads, values[0].heads) else heads
    (key, k_dtype), (value, v_dtype) = _with_heads(keys_, kv_heads), _with_heads(values, kv_heads)
    program = Program(
        canonical(score) or SCORE, canonical(keep), canonical(lifted.sink), canonical(weight), drop, empty
    )
    program, nodes = renumber(program, puller.captures)
    folded = canonical(I) if heads is not ix.ONE and batch is not ix.ONE else None
    program, captures = unfold(program, nodes, folded, heads, lambda n, axis: ix.same(shapes.of(n)[axis], sizes[I]))
    _check_integers(program, anchor)
    dtype = _common_dtype([q_dtype, k_dtype, v_dtype], product)
    dims = {"B": batch, "H": heads, "HK": kv_heads, "M": sizes[M], "N": sizes[N], "D": sizes[D], "DV": dv}
    _check_devices([query.node, key.node, value.node, *nodes], product)
    _check_few_queries(dims, dtype, product)
    labels = ("bh", "m", "d") if position == 0 else ("bh", "d", "m")
    return Site(
        anchor, product, query, key, value, captures, naming.sizes(), program, dims, dict(shapes.symbols), dtype, labels
    )


def _indices(puller: Puller, start: tuple[Node, Index]) -> list[Expr]:
    """Every index met on the way from an operand to its source."""
    node, index = start
    out = list(index)
    while (step := puller.view(node, index)) is not None:
        node, index = step
        out += index
    return out


def _heads(groups: list[list[Expr]], folded: Expr, shapes: Shapes) -> Expr:
    """The number of heads: the smallest divisor by which the graph splits the folded batch axis; 1 if it never does.

    The query decides, then masks and biases; keys and values may be split further, into groups of heads.
    """
    indexer = ix.Indexer({}, shapes.hints)
    for exprs in groups:
        divisors = {
            n.args[1]
            for e in exprs
            for n in walk(e)
            if isinstance(n, Op) and n.head in ("floordiv", "mod") and n.args[0] is I
        }
        for divisor in sorted(divisors, key=lambda e: (indexer.hint(e), repr(e))):
            parts = indexer._split(folded, divisor)
            if parts is not None and parts[1] is ix.ZERO:
                return divisor
    return ix.ONE


def _is_one_batch(softmax_shape: tuple[Expr, ...], folded: Expr) -> bool:
    """[1, H, M, N]: the batch of one has vanished from all index arithmetic."""
    return len(softmax_shape) == 4 and softmax_shape[0] is ix.ONE and ix.same(softmax_shape[1], folded)


def _is_integer(e: Expr) -> bool:
    return all(
        (isinstance(n, Name) and n is not SCORE and n is not P and not n.head.startswith("$drop"))
        or (isinstance(n, Const) and type(n.head) is int)
        or (isinstance(n, Op) and n.head in ("add", "sub", "mul", "floordiv", "mod", "neg"))
        for n in walk(e)
    )


def _reindex(e: Expr, indexer: ix.Indexer) -> Expr:
    """Bring all index arithmetic of an expression to normal form."""
    done: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        if node not in done:
            if node.args and _is_integer(node):
                done[node] = indexer.renormalise(node)
            else:
                args = tuple(visit(a) for a in node.args)
                comparison = isinstance(node, Op) and node.head in ("lt", "le", "gt", "ge", "eq", "ne")
                both = comparison and all(_is_integer(a) for a in args)
                done[node] = compare(node.head, *args) if both else rebuild(node, args)
        return done[node]

    return visit(e)


class _Naming:
    """Run-time sizes get their public names: q_len, kv_len, s0, s1, ..."""

    def __init__(self, m: Expr, n: Expr) -> None:
        self.table: dict[Expr, Expr] = {B: name("b"), H: name("h"), M: name("q_idx"), N: name("kv_idx")}
        self.order: list[Expr] = []
        for size, public in ((n, "kv_len"), (m, "q_len")):
            if isinstance(size, Name):
                self.table[size] = name(public)

    def __call__(self, symbol: Expr) -> Expr:
        if symbol not in self.table:
            self.table[symbol] = name(f"s{len(self.order)}")
            self.order.append(symbol)
        return self.table[symbol]

    def sizes(self) -> tuple[Expr, ...]:
        return tuple(self.order)


def _rename(e: Expr, naming: _Naming) -> Expr:
    symbols = [n for n in walk(e) if isinstance(n, Name) and n.head.startswith("$")]
    return substitute(e, {s: naming(s) for s in symbols})


# *** fills, factors ***


def _empty_rows(puller: Puller, weight: Expr, score: Expr, guards: Guards, anchor: Node) -> float | None:
    """0.0 where `where(c, weights, 0)` also replaces the NaN of every row without a key, as c never holds there."""
    conditions = [c for n in walk(weight) if (c := _selecting(n)) is not None]
    if not conditions:
        return None
    covered = any(guards.hold_only_at_keys(c) for c in conditions)
    if (guards.keep is not None and not covered) or _may_hold_infinity(puller, score):
        raise Reject(Reason.WEIGHT, anchor, "weights are replaced by 0 where a whole row may be NaN")
    return None if guards.keep is None else 0.0


# Without its maximum subtracted the exponential of a smaller score is exactly 0, even of a fill that is added to a score
# whose own exponential is finite: such a fill is as good as -inf, and a row of nothing else is NaN.
UNDERFLOW = -200.0


def _may_underflow(score: Expr, captures: list[Node]) -> bool:
    """Are there numbers left that may fill a row?"""
    numbers = [*(n.head for n in walk(score) if isinstance(n, Const)), *numbers_in(captures)]
    return any(-UNDERFLOW <= abs(a) < math.inf for a in numbers)


def _multiplies_infinity(score: Expr, captures: list[Node]) -> bool:
    """Is a mask made as `(1 - mask) * -inf`, NaN where it is to let keys through? Neither a mask nor a score says this."""
    products = [n for n in made_of(captures) if table.name_of(n) in ("mul", "div")]
    factors = [a for n in products for a in n.args if isinstance(a, (int, float))]
    scalars = [a for n in products for a in n.all_input_nodes if a.meta["val"].dim() == 0]
    inlined = [a.head for n in walk(score) if isinstance(n, Op) and n.head == "mul" for a in n.args if isinstance(a, Const)]
    return not all(map(math.isfinite, [*factors, *numbers_in(scalars), *inlined]))


def _holds_infinity_beside(score: Expr, captures: list[Node]) -> bool:
    """Can a row be NaN for another reason than that `keep` leaves it no key, as by `(1 - mask) * -inf`?

    Numbers in the score, and those that captures are made of; what comes from outside counts as a mask of -inf at most.
    """
    turned = [n for n in made_of(captures) if table.name_of(n) in ("mul", "div", "neg", "sub", "rsub")]
    turned += [captures[n.head] for n in set(walk(score)) - set(_added(score)) if isinstance(n, Load)]
    numbers = [a for n in made_of(turned) for a in n.args] + [n.head for n in walk(score) if isinstance(n, Const)]
    return any(isinstance(a, float) and not math.isfinite(a) for a in numbers)


def _added(e: Expr) -> Iterator[Expr]:
    """Loads that the score is a sum of, so that a -inf in them stays one."""
    if isinstance(e, Load):
        yield e
    elif isinstance(e, Op):
        scaled = e.head in ("mul", "div") and isinstance(e.args[1], Const) and e.args[1].head > 0
        summed = e.args if e.head in ("add", "float") else e.args[1:] if e.head == "where" else e.args[:scaled]
        for a in summed:
            yield from _added(a)


def _selecting(e: Expr) -> Expr | None:
    """c of `where(c, weights, 0)`, which unlike a factor also replaces NaN."""
    if not isinstance(e, Op) or e.head != "where":
        return None
    holds = [any(n is P for n in walk(a)) for a in e.args[1:]]
    return None if not any(holds) else e.args[0] if holds[0] else negate(e.args[0])


_BOUNDED = frozenset(
    {"add", "sub", "mul", "neg", "tanh", "sigmoid", "maximum", "minimum", "abs", "float", "bool", "int"}
)
_HUGE = 1e10


def _may_hold_infinity(puller: Puller, score: Expr) -> bool:
    """Could a whole row be -inf or NaN but for what `keep` says? Scores, layers and trained tensors count as finite.

    One finite fill on top of everything is fine: sums and multiples of it may overflow.
    """
    while isinstance(score, Op) and score.head == "where" and _is_finite_constant(score.args[1], score.args[2]):
        score = score.args[2] if isinstance(score.args[1], Const) else score.args[1]
    return any(
        (isinstance(n, Const) and type(n.head) is float and not abs(n.head) <= _HUGE)
        or (isinstance(n, Load) and not _is_finite(puller.twin, puller.captures[n.head]))
        or (isinstance(n, Op) and not _is_tame(n))
        for n in walk(score)
    )


def _is_finite_constant(*branches: Expr) -> bool:
    return any(isinstance(e, Const) and math.isfinite(e.head) for e in branches)


def _is_tame(e: Op) -> bool:
    if e.head in ("div", "floordiv", "mod"):
        return isinstance(e.args[1], Const) and abs(e.args[1].head) >= 1 / _HUGE
    return e.head in _BOUNDED or e.head in ("where", "not", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")


_FINITE = (table.BMM, leaf_value, torch.ops.aten.embedding.default)
_FINITE_IF_INPUTS_ARE = (
    table.VIEWS | table.CASTS | {"add", "sub", "mul", "neg", "tanh", "sigmoid", "cat", "index", "index_select"}
)


def _is_finite(twin: Twin, node: Node) -> bool:
    """Is the tensor made from integers, layers and trained parameters by operations that keep them finite?"""
    stack, seen = [node], set()
    while stack:
        n = stack.pop()
        value = n.meta.get("val")
        if n in seen or n.target in _FINITE or not isinstance(value, torch.Tensor):
            continue
        seen.add(n)
        if not value.is_floating_point() or (n.op != "call_function" and n in twin.requires_grad):
            continue
        generated = table.name_of(n) in table.GENERATORS or (
            table.name_of(n) == "constant_pad_nd" and len(n.args) > 2 and abs(n.args[2]) <= _HUGE  # type: ignore[arg-type, operator]
        )
        numbers = [a for a in n.args if isinstance(a, (int, float))]
        known = generated or (table.name_of(n) in _FINITE_IF_INPUTS_ARE and n.op == "call_function")
        half = value.dtype is torch.float16
        overflows = table.name_of(n) not in table.VIEWS and (half or any(not abs(a) <= _HUGE for a in numbers))
        if not known or overflows:
            return False
        stack.extend(n.all_input_nodes)
    return True


def _fills(e: Expr, lowest: float = -math.inf) -> tuple[Expr, Expr | None]:
    """The score where it is not filled with -inf (or a number of at most `lowest`), and the condition that it is not."""
    if not isinstance(e, Op):
        return e, None
    if e.head == "where":
        condition, x, y = e.args
        if _is_at_most(y, lowest):
            inner, keep = _fills(x, lowest)
            return inner, _and(keep, condition)
        if _is_at_most(x, lowest):
            inner, keep = _fills(y, lowest)
            return inner, _and(keep, negate(condition))
        (x, kx), (y, ky) = (_fills(branch, lowest) for branch in (x, y))
        if kx is None and ky is None:
            return e, None
        return choose(condition, x, y), _and(_or(negate(condition), kx), _or(condition, ky))
    if e.head in ("add", "sub"):
        if any(_holds_infinity(a, positive_only=e.head == "add") for a in e.args[e.head == "sub" :]):
            return e, None  # inf - inf is NaN, which no mask expresses
        x, kx = _fills(e.args[0], lowest)
        y, ky = _fills(e.args[1], lowest) if e.head == "add" else (e.args[1], None)
        return _sum(e.head, x, y), _and(kx, ky)
    if (
        e.head in ("mul", "div")
        and isinstance(e.args[1], Const)
        and e.args[1].head > 0
        and math.isfinite(e.args[1].head)
    ):
        factor = float(e.args[1].head)
        x, keep = _fills(e.args[0], lowest / factor if e.head == "mul" else lowest * factor)
        return op(e.head, x, e.args[1]), keep
    if e.head == "float":
        x, keep = _fills(e.args[0], lowest)
        return op("float", x), keep
    return e, None


def _holds_infinity(e: Expr, *, positive_only: bool) -> bool:
    bad = (math.inf,) if positive_only else (math.inf, -math.inf)
    return any(isinstance(n, Const) and n.head in bad for n in walk(e))


def _sum(operation: str, x: Expr, y: Expr) -> Expr:
    if isinstance(y, Const) and y.head == 0:
        return x
    if isinstance(x, Const) and x.head == 0 and operation == "add":
        return y
    return op(operation, x, y)


def _is_at_most(e: Expr, lowest: float) -> bool:
    return isinstance(e, Const) and e.head <= lowest


def _and(x: Expr | None, y: Expr | None) -> Expr | None:
    if x is None or y is None:
        return y if x is None else x
    return logical("logical_and", [x, y])


def _or(x: Expr, y: Expr | None) -> Expr | None:
    return None if y is None else logical("logical_or", [x, y])


def _split_weight(e: Expr, guards: Guards, anchor: Node) -> tuple[Expr | None, float | None]:
    """`weight` and `drop` of an expression linear in the softmax weight, which is 0 where a key is not kept."""
    if e is P:
        return None, None
    inner, f = _factor(e)
    if inner is None:
        raise Reject(Reason.WEIGHT, anchor, repr(e).replace("$", ""))
    factor, drop = _split_weight(inner, guards, anchor)
    if isinstance(f, Name) and f.head.startswith("$drop:"):
        if drop is not None:
            raise Reject(Reason.DROPOUT, anchor, "two dropouts on the weights")
        return factor, float(f.head.split(":")[1])
    if f is None or factor is None:
        return (factor if f is None or guards.always_hold(_zero_one(f)) else f), drop
    selected = _selecting(e)
    if selected is not None and _may_hold_infinity(guards.puller, factor):
        return where(selected, factor, 0.0), drop  # 0 times what is left out may be NaN
    return (factor if guards.always_hold(_zero_one(f)) else op("mul", f, factor)), drop


def _zero_one(e: Expr) -> Expr | None:
    """c of `where(c, 1.0, 0.0)`"""
    if isinstance(e, Op) and e.head == "where" and [a.head for a in e.args[1:]] in ([1.0, 0.0], [0.0, 1.0]):
        return e.args[0] if e.args[1].head == 1.0 else negate(e.args[0])
    return None


def _factor(e: Expr) -> tuple[Expr | None, Expr | None]:
    """(expression that still holds the weight, factor taken off)."""
    if not isinstance(e, Op):
        return None, None
    holds = [any(n is P for n in walk(a)) for a in e.args]
    if e.head == "mul" and holds.count(True) == 1:
        return e.args[holds.index(True)], e.args[holds.index(False)]
    if e.head == "div" and holds == [True, False]:
        return e.args[0], op("div", 1.0, e.args[1])
    if e.head == "float":
        return e.args[0], None
    if e.head == "neg":
        return e.args[0], const(-1.0)
    if e.head == "where" and holds.count(True) == 1 and not holds[0]:
        at = holds.index(True)
        other = e.args[3 - at]
        if isinstance(other, Const) and other.head == 0:
            return e.args[at], where(e.args[0], *((1.0, 0.0) if at == 1 else (0.0, 1.0)))
    return None, None


# *** operands ***


@dataclass(frozen=True)
class _Candidate:
    """One way to get an operand: its number of heads, what it costs, its dtype."""

    operand: Operand
    heads: Expr
    cost: int
    dtype: torch.dtype


def _operands_of(
    puller: Puller,
    start: tuple[Node, Index],
    sizes: dict[str, Expr],
    length: Expr,
    split: dict,
    indexer: ix.Indexer,
    what: str,
) -> list[_Candidate]:
    """Ways to get the operand, the best first.

    Of all tensors on the way to the source, the one with the fewest heads (before heads were repeated) is best, then one
    of the user's graph, then the one that needs the fewest views.
    """
    found: list[_Candidate] = []
    letters = {B: "b", H: "h", length: "l", D: "d"}
    indexer.sizes[D] = sizes["d"]
    node, index = start
    index = _at_ones(index, puller.shapes.of(node))
    dtype: torch.dtype = node.meta["val"].dtype  # the narrowest on the way: casts commute with views
    while True:
        positions = [indexer.renormalise(substitute(i, split)) for i in index]
        shape = list(puller.shapes.of(node))
        varies = any(n in (M, N) and n not in letters for i in positions for n in walk(i))  # keys by query, or queries by key
        reached = None if varies else as_operand(node, *_without_ones(shape, positions), letters, sizes)
        if reached is not None:
            operand, heads = reached
            cost = indexer.hint(heads) * 100 + len(operand.steps) + (0 if node in puller.defined else 3)
            cost += dtype != node.meta["val"].dtype
            found.append(_Candidate(replace(operand, dtype=dtype), heads, cost, dtype))
        step = puller.view(node, index)
        if step is None and table.name_of(node) in table.CASTS and (narrowest := _narrowest(node, dtype)) is not None:
            step, dtype = (node.args[0], index), narrowest  # type: ignore[assignment]
        if step is None or node in puller.twin.stops:
            break
        node, index = step
    if not found and varies:
        raise Reject(Reason.SCORE, start[0], "the product is one of vectors that differ by both query and key")
    if not found:
        raise Reject(Reason.OPERAND, start[0], what)
    return sorted(found, key=lambda c: c.cost)


def _narrowest(cast: Node, so_far: torch.dtype) -> torch.dtype | None:
    """The dtype that a value above the cast is rounded to on the way; None where no single rounding does it."""
    above: torch.dtype = cast.args[0].meta["val"].dtype  # type: ignore[union-attr]
    if not above.is_floating_point or not so_far.is_floating_point:
        return None
    wider = torch.promote_types(above, so_far)
    return so_far if wider == above else above if wider == so_far else None


def _without_ones(shape: list[Expr], positions: list[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Dimensions of size 1 are selected at 0; letters of size 1 come back by unsqueeze."""
    fixed = [ix.ZERO if s is ix.ONE else p for s, p in zip(shape, positions, strict=True)]
    return shape, fixed


def _with_heads(candidates: list[_Candidate], wanted: Expr) -> tuple[Operand, torch.dtype]:
    """The best operand with this number of heads, one head being as good as many."""
    for c in candidates:
        if ix.same(c.heads, wanted):
            return c.operand, c.dtype
        if c.heads is ix.ONE:
            expand = (torch.ops.aten.expand.default, ((const(-1), wanted, const(-1), const(-1)),))
            return replace(c.operand, steps=(*c.operand.steps, expand)), c.dtype
    raise Reject(Reason.OPERAND, candidates[0].operand.node, "heads in groups of different sizes")


# *** checks ***


def _check_integers(program: Program, anchor: Node) -> None:
    for _, e in program.parts():
        for n in walk(e):
            if isinstance(n, Const) and type(n.head) is int and abs(n.head) >= 2**31:
                raise Reject(Reason.SCORE, anchor, f"the integer {n.head} leaves the range of index arithmetic")


def _common_dtype(dtypes: list[torch.dtype], node: Node) -> torch.dtype:
    dtype = dtypes[0]
    for d in dtypes[1:]:
        dtype = torch.promote_types(dtype, d)
    if dtype not in DTYPES:
        raise Reject(Reason.DTYPE, node, str(dtype).removeprefix("torch."))
    return dtype


def _check_few_queries(dims: dict[str, Expr], dtype: torch.dtype, product: Node) -> None:
    few = isinstance(dims["M"], Const) and dims["M"].head <= FEW and ix.same(dims["H"], dims["HK"])
    if few and is_slow_for_few_queries(dtype, product.meta["val"].device):
        raise Reject(Reason.COST, product, f"{dims['M']} queries in float32 without tensor cores")


def _check_devices(nodes: list[Node], node: Node) -> None:
    devices = {n.meta["val"].device for n in nodes if n.meta["val"].dim() > 0 or n.meta["val"].device.type != "cpu"}
    if len(devices) > 1:
        raise Reject(Reason.DEVICE, node, ", ".join(sorted(map(str, devices))))
