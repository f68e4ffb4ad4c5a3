"""Edit a user's graph: every Site becomes one call of the attention operator.

Operands that have a live user node use that node; others are re-emitted as the few views and casts that lead to them
from something live. What cannot be reached (because it was changed in place meanwhile) rejects the site.
"""

from __future__ import annotations

import itertools
import logging
import operator
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import block_maps, compat
from .match import aten as table
from .match import index as ix
from .match.find import Found, find_sites, has_softmax
from .match.inline import inline_node
from .match.normalize import (
    Twin,
    closure,
    example_value,
    leaf_value,
    make_twin,
    may_mutate,
    resembles_softmax,
    target_name,
)
from .match.shapes import Shapes
from .match.site import Operand, Site
from .options import DEFAULT, Options
from .placing import Placement, place
from .reject import Reason, Reject
from .report import Report, SiteReport
from .score.expr import Const, Expr, Name

log = logging.getLogger("flash_fx")
aten = torch.ops.aten
_SHAPED = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), aten.reshape.default), "expand": aten.expand.default,
}  # fmt: skip
_REEMIT = table.TRANSPARENT | table.GENERATORS | table.SHAPE_ONLY | table.LOOKUPS


@dataclass
class _Shared:
    """What all sites of a graph have in common."""

    options: Options
    maps: dict[Hashable, Node] = field(default_factory=dict)  # block maps that were made


def rewrite_graph(gm: GraphModule, options: Options = DEFAULT) -> Report:
    """Rewrite a graph whose nodes carry fakes, and the graphs of its higher-order ops, in place."""
    report = Report()
    for _, module in gm.named_modules():
        if isinstance(module, GraphModule) and has_softmax(module.graph):
            report.extend(_rewrite_one(module, options))
    return report


def _rewrite_one(gm: GraphModule, options: Options) -> Report:
    try:
        twin, found = _analyse(gm)
    except Reject as r:
        softmax = next((n for n in gm.graph.nodes if resembles_softmax(n)), r.node)
        return Report([_describe_left(softmax, softmax, r)])
    except Exception as e:  # a user's model never fails because of us
        log.info("flash_fx could not analyse a graph and left it alone: %s: %s", type(e).__name__, e)
        log.debug("analysis failed", exc_info=True)
        return Report(
            [SiteReport("left", Reason.INTERNAL.code, f"{type(e).__name__}: {e}", "", "unknown:0", (), "unknown")]
        )
    report = Report()
    sources: list[Node] = []  # what the replaced nodes were computed from
    shared = _Shared(options)
    fused = False
    for group in _groups(twin, found):
        described = _apply(gm, twin, group, sources, shared)
        report.sites += described
        fused = fused or described[0].status == "fused"
    if fused:
        _erase_dead(gm, twin, sources)
        gm.graph.lint()
        gm.recompile()
    return report


def _analyse(gm: GraphModule) -> tuple[Twin, list[Found]]:
    """Twin and sites; user nodes that hide a whole attention are inlined first."""
    twin = make_twin(gm)
    found = find_sites(twin)
    for _ in range(8):
        hiding = dict.fromkeys(u for f in found if (u := _hides(twin, f)) is not None)
        inlined = [u for u in hiding if _inlined(gm, u)]
        if not inlined:
            break
        twin = make_twin(gm)
        found = find_sites(twin)
    return twin, found


def _hides(twin: Twin, found: Found) -> Node | None:
    """The user's node inside of which the value product is made, or an operand, and something else is its result."""
    if not isinstance(found.verdict, Site):
        return None
    defined = twin.defined()
    for operand in (found.verdict.query, found.verdict.key, found.verdict.value):
        node = operand.node
        while node not in defined and table.name_of(node) in table.VIEWS | table.CASTS:
            node = node.args[0]  # type: ignore[assignment]
        if node not in defined and table.name_of(node) not in _REEMIT and node.target is not leaf_value:
            return twin.origin.get(node)
    try:
        _result_node(twin, twin.sums.get(found.product, found.product))
    except Reject as r:
        return twin.origin.get(found.product) if r.reason in (Reason.HIDDEN, Reason.MUTATED) else None
    return None


def _inlined(gm: GraphModule, node: Node) -> bool:
    try:
        inline_node(gm, node)
    except Exception as e:  # it stays as it is, and the site is left alone
        log.info("flash_fx could not look into %s: %s: %s", node.name, type(e).__name__, e)
        return False
    return True


def _groups(twin: Twin, found: list[Found]) -> list[list[Found]]:
    """Sites that are replaced together: those whose products are added up in place of one product of the user's."""
    groups: dict[Node, list[Found]] = {}
    for f in found:
        groups.setdefault(twin.sums.get(f.product, f.product), []).append(f)
    return list(groups.values())


def _apply(
    gm: GraphModule, twin: Twin, group: list[Found], sources: list[Node], shared: _Shared
) -> list[SiteReport]:
    rejected = next((f.verdict for f in group if isinstance(f.verdict, Reject)), None)
    sites = [f.verdict for f in group if isinstance(f.verdict, Site)]
    if rejected is None:
        try:
            sources += _replace(gm, twin, sites, shared)
            return [_describe_fused(twin, s) for s in sites]
        except Reject as r:
            rejected = r
        except Exception as e:  # a user's model never fails because of us
            log.warning("flash_fx left an attention alone: %s: %s", type(e).__name__, e)
            rejected = Reject(Reason.INTERNAL, group[0].anchor, type(e).__name__)
    reasons = [f.verdict if isinstance(f.verdict, Reject) else rejected for f in group]
    return [_describe_left(f.anchor, _user_of(twin, f.anchor), r) for f, r in zip(group, reasons, strict=True)]


# *** one site, or several that are added up ***


def _replace(gm: GraphModule, twin: Twin, sites: list[Site], shared: _Shared) -> list[Node]:
    """Put the operator in the place of the value product; returns what the product was computed from."""
    product = sites[0].product
    target, result = _result_node(twin, twin.sums.get(product, product))
    if compat.is_wrapper(value := example_value(target)):
        raise Reject(Reason.OPERAND, target, f"it is a {type(value).__name__}")
    with gm.graph.inserting_before(target):
        new = _emit(gm, twin, sites, target, result, shared)
    new.meta.update({k: v for k, v in target.meta.items() if k != "example_value"})
    if "example_value" in target.meta:
        new.meta["example_value"] = target.meta["example_value"]
    target.replace_all_uses_with(new)
    inputs = target.all_input_nodes
    gm.graph.erase_node(target)
    new._rename(target.name)  # exported programs name their outputs
    twin.history[new], twin.order[new] = twin.history.pop(target), twin.order.pop(target)
    return inputs


def _result_node(twin: Twin, product: Node) -> tuple[Node, Node]:
    """The user's node that first holds the value product, and the twin node it holds."""
    defined = twin.defined()
    node = product
    while node not in defined:
        users = [u for u in node.users if table.name_of(u) in table.VIEWS | table.CASTS]
        if len(users) != 1 or len(node.users) != 1:
            raise Reject(Reason.HIDDEN, product)
        node = users[0]
    user = defined[node]
    if may_mutate(user) or user.op not in ("call_function", "call_method"):
        raise Reject(Reason.MUTATED, user, "the value product is written into an existing tensor")
    return user, node


def _emit(
    gm: GraphModule, twin: Twin, sites: list[Site], target: Node, result: Node, shared: _Shared
) -> Node:
    """The nodes of the sites before `target`. Nothing is left behind when a Reject is raised."""
    new: list[Node] = []
    try:
        emitters = [_Emitter(gm, twin, site, target, new, shared) for site in sites]
        if len(emitters) == 1:
            return emitters[0].emit(result)
        products = {e.site.product: e.emit(e.site.product) for e in emitters}
        emitters[0].made.update(products)
        return emitters[0].value(result)
    except BaseException:
        for node in reversed(new):
            gm.graph.erase_node(node)
        raise


class _Emitter:
    """Writes the nodes of one site before `target`, and lists them in `new`."""

    def __init__(
        self, gm: GraphModule, twin: Twin, site: Site, target: Node, new: list[Node], shared: _Shared
    ) -> None:
        self.gm, self.graph, self.twin, self.site, self.target = gm, gm.graph, twin, site, target
        self.moment = twin.order[target]
        self.live = twin.live_at(self.moment)
        self.made: dict[Node, Node] = {}
        self.new, self.shared = new, shared

    def emit(self, result: Node) -> Node:
        site = self.site
        placement = place(self.twin, site, self.target, result)
        query, key, value = (self._cast(self._operand(o), o) for o in (site.query, site.key, site.value))
        captures = [self._operand(c) for c in site.captures]
        sizes = [self._size(s) for s in site.sizes]
        seed = self._seed() if site.program.drop else None
        bmhd = placement.memory == "bmhd"
        blocks: list[Any] = self._block_lists(query, key, captures, sizes)
        if not self.shared.options.deterministic:
            blocks = [*blocks, None, None][:2] + [False]
        call = self._call(
            torch.ops.flash_fx.attention.default,
            query,
            key,
            value,
            captures,
            sizes,
            seed,
            str(site.program),
            bmhd,
            *blocks,
        )
        out = self._call(operator.getitem, call, 0)
        if not self._wants_gradient() and any(o.node in self.twin.requires_grad for o in self._operands()):
            out = self._call(aten.detach.default, out)  # eager detaches the scores or the weights
        if site.product.meta["val"].dtype != site.dtype:
            out = self._call(aten._to_copy.default, out, dtype=site.product.meta["val"].dtype)
        out = self._into_place(out, placement)
        if len(self.twin.history[self.target]) > 1:
            out = self._call(aten.clone.default, out)  # the graph writes into it later: the operator keeps its own
        return out

    # *** operands ***

    def _operands(self) -> tuple[Operand, ...]:
        return self.site.query, self.site.key, self.site.value, *self.site.captures

    def _operand(self, operand: Operand) -> Node:
        node = self.value(operand.node)
        for target, args in operand.steps:
            node = self._call(target, node, *(self._argument(a) for a in args))
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._argument(v) for v in value]
        return self._size(value) if isinstance(value, Expr) else value

    def _cast(self, node: Node, operand: Operand) -> Node:
        """To the dtype in which the operator runs, rounded on the way as the user's graph rounds."""
        held = operand.node.meta["val"].dtype
        for dtype in (operand.dtype or held, self.site.dtype):
            if dtype != held:
                node, held = self._call(aten._to_copy.default, node, dtype=dtype), dtype
        return node

    def _seed(self) -> Node:
        device = self.site.product.meta["val"].device
        seed = self._call(aten.randint.low, 0, 2**62, [2], dtype=torch.int64, device=device)
        # drawn again in the backward, under a memory budget, it would be another one
        seed.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return seed

    def _block_lists(self, query: Node, key: Node, captures: list[Node], sizes: list[Any]) -> list[Node]:
        """The operator's kv_blocks and, for a backward, q_blocks: read from a map made here, or for an earlier site."""
        mask = block_maps.wanted(self.site, self.site.product.meta["val"].device)
        if mask is None:
            return []
        identity = block_maps.identity(self.site, mask)
        made = self.shared.maps.get(identity)
        if made is None or made._erased or not made < self.target:
            query, key, *read = (
                self._call(aten.detach.default, n) for n in (query, key, *(captures[i] for i in mask.captures))
            )
            made = self._call(torch.ops.flash_fx.block_map.default, query, key, read, sizes, str(mask.program))
            self.shared.maps[identity] = made
        return [self._call(operator.getitem, made, i) for i in range(2 if self._wants_gradient() else 1)]

    def value(self, node: Node) -> Node:
        """A user node with the value of a twin node, at this moment."""
        if node not in self.made:
            self.made[node] = self._read(node) or self._saved(node) or self._reemit(node)
        return self.made[node]

    def _read(self, node: Node) -> Node | None:
        """The user's node that holds the value; a copy where it is overwritten later, which autograd would object to."""
        user = self.live.get(node)
        if user is None or not self._wants_gradient() or self.twin.history[user][-1][0] < self.moment:
            return user
        return self._call(aten.clone.default, user)

    def _wants_gradient(self) -> bool:
        value = example_value(self.target)
        return isinstance(value, torch.Tensor) and value.requires_grad

    def _saved(self, node: Node) -> Node | None:
        """A copy of a value that an in-place operation overwrites before this moment, taken as soon as it exists."""
        for user, entries in self.twin.history.items():
            for (made, held), (overwritten, _) in itertools.pairwise(entries):
                after = self._differentiable(made, overwritten) if held is node and overwritten < self.moment else None
                if after is not None:
                    with self.graph.inserting_after(after):
                        return self._call(aten.clone.default, user)
        return None

    def _differentiable(self, first: int, end: int) -> Node | None:
        """The first node from this moment on, and before `end`, after which autograd would see a copy."""
        enabled = True
        nodes = list(self.graph.nodes)
        last_placeholder = max((i for i, n in enumerate(nodes) if n.op == "placeholder"), default=-1)
        for i, n in enumerate(nodes):
            if getattr(n.target, "__name__", "") == "_set_grad_enabled":
                enabled = bool(n.args[0])
            moment = self.twin.order.get(n, -1)
            if moment >= end:
                return None
            if moment >= first and i >= last_placeholder and (enabled or not self._wants_gradient()):
                return n
        return None

    def _reemit(self, node: Node) -> Node:
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._dim(node.meta["val"])
        if self._wants_gradient() and node in self.twin.stops and node.target is not table.DETACH:
            raise Reject(Reason.MUTATED, node, "its value was written under no_grad and is no longer readable")
        operation = table.name_of(node)
        integer = node.target in (operator.add, operator.mul, operator.sub, operator.floordiv, operator.mod)
        if node.op != "call_function" or node.target is leaf_value or not (operation in _REEMIT or integer):
            raise self._unreadable(node)
        if operation in _SHAPED:
            return self._shaped(self.value(node.args[0]), node)  # type: ignore[arg-type]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.value)  # type: ignore[arg-type]
        return self._call(node.target, *args, **kwargs)

    def _shaped(self, source: Node, view: Node) -> Node:
        """The same view of another node. The shape is read from the value: the twin's arguments may lack run-time sizes."""
        shape = [self._dim(s) for s in view.meta["val"].shape]
        return self._call(_SHAPED[table.name_of(view)], source, shape)

    def _unreadable(self, node: Node) -> Reject:
        """Overwritten meanwhile, or made inside one operation of the user's, whose result is something else."""
        what = table.name_of(node) or node.name
        if any(held is node for entries in self.twin.history.values() for _, held in entries):
            return Reject(Reason.MUTATED, node, f"{what} is no longer readable")
        owner = self.twin.origin.get(node)
        return Reject(Reason.HIDDEN, node, f"{what} is made inside {target_name(owner) if owner else 'an operation'}")

    # *** sizes ***

    def _size(self, e: Expr) -> Any:
        """A number, or a node that computes it."""
        if isinstance(e, Const):
            return e.head
        if isinstance(e, Name):
            return self._symbol(e)
        total: Any = None
        for atoms, coefficient in ix.to_poly(e).items():
            term: Any = coefficient
            for a in atoms:
                factor = self._size(a) if a is not e else self._opaque(a)
                term = factor if isinstance(term, int) and term == 1 else self._call(operator.mul, factor, term)
            total = term if total is None else self._call(operator.add, total, term)
        return 0 if total is None else total

    def _opaque(self, e: Expr) -> Any:
        operation = {"floordiv": operator.floordiv, "mod": operator.mod}[e.head]
        return self._call(operation, *(self._size(a) for a in e.args))

    def _symbol(self, symbol: Expr) -> Node:
        """A placeholder of this size, or the size of a placeholder."""
        wanted = compat.sym_expr(self.site.symbols[symbol])
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        for n in placeholders:
            held = example_value(n)
            if isinstance(held, torch.SymInt) and compat.sym_expr(held) == wanted:
                return n
        for n in [*placeholders, *self.live.values()]:
            held = example_value(n)
            if isinstance(held, torch.Tensor):
                for d, s in enumerate(held.shape):
                    if isinstance(s, torch.SymInt) and compat.sym_expr(s) == wanted:
                        return self._call(aten.sym_size.int, n, d)
        raise Reject(Reason.OPERAND, self.site.product, f"size {wanted} is not available")

    # *** the result ***

    def _into_place(self, out: Node, placement: Placement) -> Node:
        """The operator's [B, H, M, Dv] with the dimensions, and the order in memory, of the user's tensor."""
        letters = "bhmd"
        if placement.memory not in ("bhmd", "bmhd"):
            out = self._permuted(out, letters, placement.memory)
            out = self._call(aten.clone.default, out, memory_format=torch.contiguous_format)
            letters = placement.memory
        out = self._permuted(out, letters, placement.order)
        if not placement.has_shape:
            out = self._call(aten.reshape.default, out, [self._dim(s) for s in placement.reached.meta["val"].shape])
        for step in placement.replay:
            if table.name_of(step) in _SHAPED:
                out = self._shaped(out, step)
                continue
            args, kwargs = torch.fx.map_arg((step.args[1:], step.kwargs), self.value)  # type: ignore[arg-type]
            out = self._call(step.target, out, *args, **kwargs)
        return out

    def _permuted(self, out: Node, before: str, after: str) -> Node:
        return out if before == after else self._call(aten.permute.default, out, [before.index(c) for c in after])

    def _dim(self, size: Any) -> Any:
        shapes = Shapes()
        e = shapes.dim(size)
        for s, v in shapes.symbols.items():
            self.site.symbols.setdefault(s, v)
        return self._size(e)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        self.new.append(node)
        self._annotate(node)
        return node

    def _annotate(self, node: Node) -> None:
        """Give a new node a fake value, as Dynamo's own nodes have."""
        try:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), example_value)
            mode = compat.fake_mode_of(pytree.tree_leaves(example_value(self.target)))
            if mode is not None:
                with mode, torch.no_grad():
                    value = node.target(*args, **kwargs)  # type: ignore[operator]
                    node.meta["val" if "val" in self.target.meta else "example_value"] = value
        except Exception:  # only later readers of the graph would use it
            log.debug("no example value for %s", node, exc_info=True)
        if "stack_trace" in self.target.meta:
            node.meta["stack_trace"] = self.target.meta["stack_trace"]


# *** what is left over ***


def _erase_dead(gm: GraphModule, twin: Twin, sources: list[Node]) -> None:
    """Remove what only fed the fused sites: from their operands backward, in-place writes into dead values included."""
    suspects = closure(sources)
    for node in gm.graph.nodes:  # views and the like that nobody reads
        if node.all_input_nodes and suspects.issuperset(node.all_input_nodes):
            suspects.add(node)
    writes = {m for entries in twin.history.values() for m, _ in entries}
    writers = {n for n, moment in twin.order.items() if moment in writes and may_mutate(n)}
    for node in reversed(list(gm.graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node in writers:
            if _nobody_sees(node, twin, suspects):
                gm.graph.erase_node(node)
        elif node in suspects and not node.is_impure() and not may_mutate(node) and _is_known(node):
            gm.graph.erase_node(node)


def _is_known(node: Node) -> bool:
    """A custom operator may do more than compute its result."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "aten"


def _nobody_sees(writer: Node, twin: Twin, suspects: set[Node]) -> bool:
    """Every tensor this in-place node changes is dead after it, and was part of a fused attention."""
    moment = twin.order[writer]
    changed = [u for u, entries in twin.history.items() if any(m == moment for m, _ in entries)]
    return bool(changed) and all(
        (u in suspects or u is writer)
        and u.op not in ("placeholder", "get_attr")
        and all(twin.order.get(user, moment + 1) <= moment for user in u.users)
        for u in changed
    )


# *** reports ***


def _describe_fused(twin: Twin, site: Site) -> SiteReport:
    d = {k: repr(v).replace("$", "") for k, v in site.dims.items()}
    shapes = (
        f"[{d['B']}, {d['H']}, {d['M']}, {d['D']}]",
        f"[{d['B']}, {d['HK']}, {d['N']}, {d['D']}]",
        f"[{d['B']}, {d['HK']}, {d['N']}, {d['DV']}]",
    )
    return SiteReport("fused", None, "", str(site.program), _location(_user_of(twin, site.anchor)), shapes, _dtype(site.dtype))


def _describe_left(anchor: Node, user: Node | None, reject: Reject) -> SiteReport:
    value = next(v for v in pytree.tree_leaves(example_value(anchor)) if isinstance(v, torch.Tensor))
    shape = "[" + ", ".join(str(s) for s in value.shape) + "]"
    return SiteReport("left", reject.reason.code, reject.message, "", _location(user), (shape,), _dtype(value.dtype))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _user_of(twin: Twin, anchor: Node) -> Node | None:
    return anchor if anchor in twin.order else twin.origin.get(anchor)


def _location(user: Node | None) -> str:
    """file:line of the user's softmax."""
    frames = list(_frames(user.meta.get("stack_trace") or "")) if user is not None else []
    own = [f for f in frames if "/torch/nn/" not in f.replace("\\", "/")]
    return (own or frames or ["unknown:0"])[-1]


def _frames(trace: str) -> Iterator[str]:
    for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace):
        yield f"{file}:{line}"
