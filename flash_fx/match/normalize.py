"""The functional ATen twin: a normalised copy of a user's graph, for reading only.

Dynamo hands over the user's own spelling: torch functions, methods, in-place ops. `make_twin` runs that graph on its
fake tensors and records plain functional ATen: every `matmul`, `bmm`, `baddbmm` or `einsum` becomes
expand/view/bmm, in-place writes become new values, autocast becomes explicit casts. Beside the graph comes a history:
which twin node holds the value of which user node, and from which moment on (in-place writes change it).

Heavy ops that no attention contains (linear layers, convolution, normalisation, losses) and whatever cannot be traced
(higher-order ops, opaque custom ops) are leaves: fresh values with the recorded shape. `F.linear` and `addmm` are layers
where their matrix is a parameter, and matrix products like any other where it is not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Interpreter, Node

from .. import compat
from ..reject import Reason, Reject
from . import aten as table

_LEAVES = frozenset({
    F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.cross_entropy,
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.interpolate, F.mse_loss,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.layer_norm,
    torch.ops.aten.layer_norm.default, torch.ops.aten.conv2d.default,
})  # fmt: skip


def _baddbmm(bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    scores = torch.bmm(left, right)
    scores = scores if alpha == 1 else scores * alpha
    if beta == 0:
        return scores  # bias is not read, it may be uninitialised memory
    return scores + (bias if beta == 1 else bias * beta)


def _mm(left: Any, right: Any) -> Any:
    return torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0)


def _addmm(bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _baddbmm(bias, left.unsqueeze(0), right.unsqueeze(0), beta=beta, alpha=alpha).squeeze(0)


def _addbmm(bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    total = torch.bmm(left, right).sum(0) * alpha
    return total if beta == 0 else bias * beta + total


def _mv(matrix: Any, vector: Any) -> Any:
    return _mm(matrix, vector.unsqueeze(1)).squeeze(1)


def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    yes = torch.ones((), dtype=torch.bool, device=x.device)
    filled = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_put((index,), yes)
    rows = filled.view(-1, *(1,) * (x.dim() - dim % x.dim() - 1))
    return torch.where(rows, value.to(x.dtype) if isinstance(value, torch.Tensor) else value, x)


def _log_sigmoid(x: Any) -> Any:
    return -F.softplus(-x), x.new_zeros(0)


# What the score language has no word for, said in words that it has.
_TRANSLATED = {
    torch.ops.aten.index_fill.int_Scalar: _index_fill,
    torch.ops.aten.index_fill.int_Tensor: _index_fill,
    torch.ops.aten.log_sigmoid_forward.default: _log_sigmoid,
}

# Every matrix product that can be part of an attention becomes a bmm.
TO_BMM = {
    torch.ops.aten.baddbmm.default: _baddbmm,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.addbmm.default: _addbmm,
    torch.ops.aten.mm.default: _mm,
    torch.ops.aten.mv.default: _mv,
}


def leaf_value(*_: Any) -> None:
    """Stands in the twin for the result of a node that is not looked into. Never executed."""
    raise AssertionError("a twin graph is for reading only")


@dataclass
class Twin:
    """`graph` is functional ATen. `history[user_node]` lists (moment, twin node): the value from that moment on.

    Moments count the user's nodes in order. `roots` are the values that somebody outside the twin reads: outputs, inputs
    of leaves, what in-place writes leave in the inputs. `stops` are twin nodes at which eager stops the gradient. `sinks`
    and `sums` are filled by `softmax.canonicalise`.
    """

    graph: torch.fx.Graph
    history: dict[Node, list[tuple[int, Node]]]
    order: dict[Node, int]
    roots: set[Node] = field(default_factory=set)
    requires_grad: set[Node] = field(default_factory=set)
    stops: set[Node] = field(default_factory=set)
    origin: dict[Node, Node] = field(default_factory=dict)  # twin node -> user node that computes it
    sums: dict[Node, Node] = field(default_factory=dict)  # value product -> the sum of products that it is part of
    sinks: dict[Node, Any] = field(default_factory=dict)  # softmax -> logit of one more term of its denominator

    def replace(self, old: Node, new: Node) -> None:
        """`new` stands for `old` from now on."""
        old.replace_all_uses_with(new)
        for entries in self.history.values():
            entries[:] = [(moment, new if node is old else node) for moment, node in entries]
        if old in self.roots:
            self.roots.remove(old)
            self.roots.add(new)

    def take_place(self, old: Node, new: Node, between: tuple[Node, ...] = ()) -> None:
        """As `replace`; a stop of the gradient anywhere in between, as `meta` says, becomes a stop at `new`."""
        self.replace(old, new)
        if any(n.meta.get("stop") for n in (old, *between)):
            new.meta["stop"] = True
            self.stops.add(new)

    def value_at(self, user: Node, moment: int) -> Node | None:
        """The twin node that holds the value of `user` just before the node at `moment` runs."""
        found = None
        for when, node in self.history.get(user, ()):
            if when < moment:
                found = node
        return found

    def live_at(self, moment: int) -> dict[Node, Node]:
        """twin node -> user node, of all values that can be read just before `moment`."""
        table: dict[Node, Node] = {}
        for user in self.history:
            if self.order[user] < moment and (node := self.value_at(user, moment)) is not None:
                table.setdefault(node, user)
        return table

    def defined(self) -> dict[Node, Node]:
        """twin node -> the first user node that holds it when it is made."""
        table: dict[Node, Node] = {}
        for user, entries in self.history.items():
            table.setdefault(entries[0][1], user)
        return table


def example_value(node: Node) -> Any:
    """The fake value Dynamo or export recorded for a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def make_twin(gm: GraphModule) -> Twin:
    """The twin of a graph whose nodes carry fake `example_value`s (Dynamo) or `val`s (export)."""
    _refuse_what_hides_writes(gm)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [example_value(n) for n in placeholders]
    mode = compat.fake_mode_of([leaf for n in gm.graph.nodes for leaf in pytree.tree_leaves(example_value(n))])
    if mode is None:
        raise ValueError(
            "the graph carries no fake tensors: pass example inputs, or a graph captured by Dynamo or export"
        )
    recorder = _Recorder(gm, mode)

    def run(*args: Any) -> Any:
        with compat.FunctionalTensorMode():
            result = recorder.run(*pytree.tree_map_only(torch.Tensor, compat.FunctionalTensor.to_functional, args))
            return [compat.plain_tensor(r) for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]

    with mode, torch.no_grad(), compat.enable_python_dispatcher():
        make = compat.make_fx(run, decomposition_table=TO_BMM | _TRANSLATED, tracing_mode="real", _allow_non_fake_inputs=True)
        traced = make(*map(fresh_fake, fakes))
    graph = traced.graph
    kept = set(graph.nodes)
    history = {u: [(t, n) for t, n in entries if n in kept] for u, entries in recorder.history.items()}
    twin = Twin(graph, {u: e for u, e in history.items() if e}, {n: i for i, n in enumerate(gm.graph.nodes)})
    twin.roots = _roots(twin, recorder)
    _mark_gradients(twin)
    twin.stops |= recorder.hidden_writes & kept
    twin.origin = {t: u for t, u in recorder.origin.items() if t in kept}
    return twin


def _roots(twin: Twin, recorder: _Recorder) -> set[Node]:
    roots = set(twin.graph.output_node().all_input_nodes)
    for user, entries in twin.history.items():
        if user.op in ("placeholder", "get_attr"):
            roots.add(entries[-1][1])
    used = closure([n for n in twin.order if n.op == "output" or may_mutate(n) or _is_impure(n)])
    for leaf in recorder.leaves:
        for source in leaf.all_input_nodes:
            if leaf in used and (node := twin.value_at(source, twin.order[leaf])) is not None:
                roots.add(node)
    return roots


def fresh_fake(value: Any) -> Any:
    """The trace must not attach itself to Dynamo's own fake tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def closure(start: Iterable[Node], following: Callable[[Node], Iterable[Node]] | None = None) -> set[Node]:
    """Everything that `following`, by default the inputs of a node, leads to from `start`, which is included."""
    reached: set[Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes if following is None else following(node))
    return reached


def made_of(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and what they are computed from, as far as operations can be read."""
    return closure(nodes, lambda n: n.all_input_nodes if table.name_of(n) in table.TRANSPARENT else ())


def numbers_in(nodes: Iterable[Node]) -> list[int | float]:
    """The numbers among the arguments of what the nodes are made of that become values."""
    found = [n for n in made_of(nodes) if table.name_of(n) in table.WITH_NUMBERS]
    return [a for n in found for a in n.args if isinstance(a, (int, float))]


def constant_of_trace(graph: torch.fx.Graph, node: Node) -> int | float | None:
    """The number that a tensor made from one holds: `torch.tensor(1e-6)` is an attribute of the twin."""
    held: Any = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    value: Any = held if getattr(held, "constant", None) is None else held.constant
    return value.item() if type(value) is torch.Tensor and value.numel() == 1 else None


def _is_impure(n: Node) -> bool:
    """May running this node matter though nobody reads its result?"""
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        return n.target.namespace != "aten"
    return n.op == "call_module" or isinstance(n.target, torch._ops.HigherOrderOperator) or n.is_impure()


def target_name(n: Node) -> str:
    """`softmax` for the method, `torch.softmax` and `F.softmax`; `softmax.int` for the ATen operator."""
    return str(n.target) if n.op == "call_method" else str(getattr(n.target, "__name__", n.target))


def resembles_softmax(n: Node) -> bool:
    """A softmax, or an exponential that may be part of one."""
    target = target_name(n)
    by_name = "softmax" in target or "softmin" in target or target == "multi_head_attention_forward"
    return by_name or _is_exponential(n)


def _is_exponential(n: Node) -> bool:
    return target_name(n).split(".")[0] in ("exp", "exp_", "exp2", "exp2_")


def _relevant(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that an attention can be made of; the rest of the graph becomes leaves, which cost nothing to trace.

    From every softmax forward to the next matrix products, from an exponential past one, as its quotient may come after
    it; then from those (and from every in-place write, whose effect must be seen) backward to the nearest leaves.
    """
    stack = [(n, int(_is_exponential(n))) for n in graph.nodes if resembles_softmax(n)]
    seeds = {n for n in graph.nodes if may_mutate(n)}
    followed: dict[Node, int] = {}  # node -> how many products may still be passed
    while stack:
        node, passes = stack.pop()
        if passes > followed.get(node, -1):
            followed[node] = passes
            seeds.add(node)
            passes -= is_product(node)
            if not _is_leaf(node) and passes >= 0:
                stack.extend((u, passes) for u in node.users)
                if may_mutate(node):  # what it wrote into is read under its old name
                    stack.extend((u, passes) for source in node.all_input_nodes for u in source.users)
    return closure(seeds, lambda n: () if _is_leaf(n) else n.all_input_nodes)


_PRODUCTS = ("matmul", "bmm", "einsum", ".mm", "dot", "mv")


def is_product(n: Node) -> bool:
    """A matrix product by its name; a layer is none, nor is an einsum of one operand."""
    if n.op not in ("call_function", "call_method"):
        return False
    if n.args and isinstance(n.args[0], str) and "," not in n.args[0]:
        return False
    return (n.target in _MATRIX and not _is_layer(n)) or any(word in str(n.target) for word in _PRODUCTS)


# The argument that holds the matrix of what is a layer where that is a parameter.
_MATRIX: dict[Any, tuple[int, str]] = {
    **dict.fromkeys((F.linear, torch._C._nn.linear, torch.ops.aten.linear.default), (1, "weight")),
    torch.addmm: (2, "mat2"),
}


def _is_layer(n: Node) -> bool:
    """Is the matrix a parameter, or one of those that an exported program takes as inputs?"""
    position, keyword = _MATRIX[n.target]
    matrix = n.args[position] if len(n.args) > position else n.kwargs.get(keyword)
    if not isinstance(matrix, Node):
        return True
    exported = matrix.op == "placeholder" and isinstance(n.target, torch._ops.OpOverload)
    return exported or isinstance(example_value(matrix), torch.nn.Parameter)


def _is_transform(n: Node) -> bool:
    """Does the node begin, end or serve a transform of torch.func? Tensors in between hide a dimension, or a gradient."""
    return n.op == "call_function" and str(getattr(n.target, "__module__", "")).startswith("torch._functorch")


class UntraceableError(ValueError):
    """The graph does something that its twin would not show."""


def _refuse_what_hides_writes(gm: GraphModule) -> None:
    """Raise for function transforms, writes inside higher-order ops, and writes to inputs that overlap."""
    for n in gm.graph.nodes:
        if _is_transform(n):
            raise Reject(Reason.TRANSFORMED, n)
        if n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator):
            bodies = [a for a in n.all_input_nodes if a.op == "get_attr"]
            if getattr(n.target, "__name__", "") == "autograd_function_apply":
                bodies = bodies[:1]  # the backward runs later
            for attribute in bodies:
                body = getattr(gm, str(attribute.target), None)
                if isinstance(body, GraphModule) and _writes_inputs(body):
                    raise UntraceableError("a higher-order operation writes in place")
    inputs = [_memory(example_value(n)) for n in gm.graph.nodes if n.op == "placeholder"]
    shared = {m for m in inputs if m is not None and inputs.count(m) > 1}
    written = {_memory(example_value(s)) for n in gm.graph.nodes if may_mutate(n) for s in n.all_input_nodes}
    if shared & written:
        raise UntraceableError("inputs share memory and the graph writes into it")


def _writes_inputs(body: GraphModule) -> bool:
    """May the graph write into memory that it was given, rather than into tensors of its own?"""
    given = [example_value(n) for n in body.graph.nodes if n.op in ("placeholder", "get_attr")]
    if not all(isinstance(v, (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)) for v in given):
        return any(may_mutate(n) for n in body.graph.nodes)
    memory = {_memory(v) for v in given} - {None}
    return any(
        _memory(example_value(s)) in memory for n in body.graph.nodes if may_mutate(n) for s in n.all_input_nodes
    )


def _memory(value: Any) -> int | None:
    held = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if held else None


class _Recorder(Interpreter):
    """Runs the user's graph inside the trace and notes which twin node holds each value."""

    def __init__(self, gm: GraphModule, mode: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode, self.moment = mode, 0
        self.relevant = _relevant(gm.graph)
        self.read = self.relevant | {source for n in self.relevant for source in n.all_input_nodes}
        self.history: dict[Node, list[tuple[int, Node]]] = {}
        self.functional: dict[Node, Any] = {}
        self.leaves: list[Node] = []
        self.origin: dict[Node, Node] = {}
        self.grad_enabled = torch.is_grad_enabled()
        self.hidden_writes: set[Node] = set()  # results of in-place writes under no_grad: autograd does not see them

    def run_node(self, n: Node) -> Any:
        last = compat.last_traced_node()
        result = self._leaf(n) if self._is_leaf(n) else self._traced(n)
        self._claim(n, last)
        if isinstance(result, compat.FunctionalTensor):
            self.functional[n] = result
            self._note(n, result)
        if _steers_state(n) and n.args and isinstance(n.args[0], bool):
            self.grad_enabled = n.args[0]
        if may_mutate(n):
            for user, value in self.functional.items():
                self._note(user, value)
            if not self.grad_enabled:
                self.hidden_writes |= {e[-1][1] for e in self.history.values() if e and e[-1][0] == self.moment}
        self.moment += 1
        return result

    def _claim(self, n: Node, last: Node) -> None:
        """The twin nodes made since `last` are `n`'s."""
        node = compat.last_traced_node()
        while node is not last:
            self.origin[node] = n
            node = node.prev

    def _is_leaf(self, n: Node) -> bool:
        if n not in self.relevant and n.op in ("call_function", "call_method"):
            return not _steers_state(n)
        return _is_leaf(n)

    def _note(self, user: Node, value: Any) -> None:
        node = compat.traced_node(value)
        entries = self.history.setdefault(user, [])
        if node is not None and (not entries or entries[-1][1] is not node):
            entries.append((self.moment, node))

    def _traced(self, n: Node) -> Any:
        if isinstance(example_value(n), torch.SymFloat):
            return float(example_value(n))  # a program holds numbers: Dynamo guards on this one
        if n.op in ("placeholder", "output") or _steers_state(n):
            return super().run_node(n)
        try:
            return super().run_node(n)
        except Exception:
            if may_mutate(n):
                raise  # its effect on other values would be lost
            return self._leaf(n)

    def _leaf(self, n: Node) -> Any:
        if any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(example_value(n))):
            self.leaves.append(n)  # a size or a stride of a tensor is no use of its values
            if n not in self.read:
                return None
        return pytree.tree_map(lambda v: self._leaf_tensor(n, v), example_value(n))

    def _leaf_tensor(self, n: Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        mode = compat.get_innermost_proxy_mode()
        assert mode is not None
        with compat.disable_functional_mode():
            proxy = mode.tracer.create_proxy("call_function", leaf_value, (n.name,), {}, name=n.name)
            with compat.disable_proxy_modes_tracing():
                if not isinstance(value, compat.FakeTensor) and not compat.is_wrapper(value):
                    value = self.mode.from_tensor(value)
                fake = fresh_fake(value)
            compat.track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
            proxy.node.meta["val"] = fake
        return compat.FunctionalTensor.to_functional(fake)


def _is_leaf(n: Node) -> bool:
    if may_mutate(n):
        return False
    if n.op == "get_attr":
        return isinstance(example_value(n), torch.Tensor)
    if n.op == "call_module":
        return True
    if n.op != "call_function":
        return False
    if n.target in _MATRIX:
        return _is_layer(n)
    return n.target in _LEAVES or isinstance(n.target, torch._ops.HigherOrderOperator) or _renormalises(n)


def _renormalises(n: Node) -> bool:
    """An embedding that writes into its table first."""
    if n.target is not F.embedding:
        return False
    return n.kwargs.get("max_norm", n.args[3] if len(n.args) > 3 else None) is not None


def _steers_state(n: Node) -> bool:
    """Autocast and grad-mode switches: executed for their effect."""
    return n.op == "call_function" and getattr(n.target, "__name__", "") in (
        "_enter_autocast", "_exit_autocast", "_set_grad_enabled",
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def may_mutate(n: Node) -> bool:
    """May this node write into a tensor that existed before?"""
    if "out" in n.kwargs:
        return True
    if n.op == "call_method":
        return _inplace_name(str(n.target)) or n.target == "__setitem__"
    if n.op != "call_function":
        return False
    if isinstance(n.target, torch._ops.OpOverload):
        return n.target._schema.is_mutable
    if isinstance(n.target, torch._ops.OpOverloadPacket):
        return any(getattr(n.target, o)._schema.is_mutable for o in n.target.overloads())
    name = getattr(n.target, "__name__", "")
    if getattr(n.target, "__module__", "") == "_operator":  # and_, or_, not_ only look like in-place names
        return name == "setitem" or n.target in _INPLACE_OPERATORS
    return name == "setitem" or _inplace_name(name) or _inplace_argument(n)


def _inplace_name(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__", "__iter__", "__init__")
    return name.endswith("_") and not name.endswith("__")


def _inplace_argument(n: Node) -> bool:
    """`F.leaky_relu(x, 0.1, True)`: the argument `inplace`, by position or by name."""
    try:
        bound = inspect.signature(n.target).bind(*n.args, **n.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return n.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True


_INPLACE_OPERATORS: frozenset[Callable] = frozenset(
    getattr(__import__("operator"), n)
    for n in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")
)


# *** gradients ***


def _mark_gradients(twin: Twin) -> None:
    """Fill `requires_grad` and `stops` from what Dynamo recorded on the user's nodes."""
    recorded: dict[Node, bool] = {}
    for user, entries in twin.history.items():
        value = example_value(user)
        if isinstance(value, torch.Tensor):
            node = entries[0][1]
            recorded[node] = recorded.get(node, False) or value.requires_grad
    for node in twin.graph.nodes:
        reads = table.name_of(node) not in table.SHAPE_ONLY
        flows = reads and any(a in twin.requires_grad for a in node.all_input_nodes) and _is_float(node)
        if node.target is torch.ops.aten.detach.default and flows:
            twin.stops.add(node)
            flows = False
        if node in recorded and recorded[node] != flows:
            if flows:
                twin.stops.add(node)
            flows = recorded[node]
        if flows:
            twin.requires_grad.add(node)


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
