"""Inline one node of a user's graph: a function that holds a whole attention becomes the ATen operators it runs.

`F.multi_head_attention_forward` or an einsum of three operands are one node for Dynamo. The rewrite needs nodes of its
own for the value product, so such a node is traced once and its operators take its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from .. import compat
from .normalize import TO_BMM, example_value, fresh_fake, is_product


def inline_node(gm: GraphModule, node: Node) -> None:
    """Replace the node by what it runs. Raises ValueError where that cannot be traced."""
    if node.op not in ("call_function", "call_method"):
        raise ValueError(f"{node.op} nodes are not inlined")
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    sources = list(dict.fromkeys(a for a in leaves if isinstance(a, Node)))
    traced = _trace(node, leaves, spec, sources)
    made = _copy(gm, node, traced, sources)
    _replace(node, pytree.tree_map_only(Node, made.__getitem__, traced.graph.output_node().args[0]))


def _trace(node: Node, leaves: list, spec: Any, sources: list[Node]) -> GraphModule:
    def run(*values: Any) -> Any:
        held = dict(zip(sources, values, strict=True))
        args, kwargs = pytree.tree_unflatten([held[a] if isinstance(a, Node) else a for a in leaves], spec)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    values = [example_value(s) for s in sources]
    mode = compat.fake_mode_of(values)
    if mode is None:
        raise ValueError("the node has no example values")
    with mode, torch.no_grad(), compat.enable_python_dispatcher():
        known = TO_BMM if is_product(node) else {}  # a product that adds something, as `baddbmm`
        make = compat.make_fx(run, decomposition_table=known, tracing_mode="real", _allow_non_fake_inputs=True)
        traced = make(*map(fresh_fake, values))
    traced.graph.eliminate_dead_code()
    _check_same(example_value(node), pytree.tree_map_only(Node, example_value, traced.graph.output_node().args[0]))
    return traced


def _check_same(wanted: Any, got: Any) -> None:
    """Autocast, say, would have made other tensors of it."""
    for w, g in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True):
        if isinstance(w, torch.Tensor) and (w.dtype != g.dtype or w.dim() != g.dim()):
            raise ValueError(f"traced on its own it gives {g.dtype}, in the graph {w.dtype}")


def _copy(gm: GraphModule, node: Node, traced: GraphModule, sources: list[Node]) -> dict[Node, Node]:
    """The traced nodes before `node`, with example values that carry eager's requires_grad."""
    made: dict[Node, Node] = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), sources, strict=True))
    with gm.graph.inserting_before(node):
        for n in traced.graph.nodes:
            if n.op == "get_attr":
                name = f"_flash_fx_constant{len(list(gm.named_buffers()))}"
                gm.register_buffer(name, getattr(traced, str(n.target)), persistent=False)
                made[n] = gm.graph.get_attr(name)
            elif n.op == "call_function":
                made[n] = gm.graph.node_copy(n, made.__getitem__)
            else:
                continue
            _annotate(gm, made[n], node)
    return made


def _annotate(gm: GraphModule, new: Node, like: Node) -> None:
    new.meta = {k: v for k, v in like.meta.items() if k not in ("example_value", "val")}
    key = "example_value" if "example_value" in like.meta else "val"
    if new.op == "get_attr":
        new.meta[key] = getattr(gm, str(new.target))
        return
    args, kwargs = torch.fx.map_arg((new.args, new.kwargs), example_value)  # type: ignore[arg-type]
    mode = compat.fake_mode_of(pytree.tree_leaves((args, kwargs, example_value(like))))
    assert mode is not None
    flows = any(v.requires_grad for v in pytree.tree_leaves(example_value(like)) if isinstance(v, torch.Tensor))
    with mode, torch.set_grad_enabled(flows), compat.enable_python_dispatcher():
        new.meta[key] = new.target(*args, **kwargs)  # type: ignore[operator]


def _replace(node: Node, outputs: Any) -> None:
    if isinstance(outputs, Node):
        node.replace_all_uses_with(outputs)
    else:
        for user in list(node.users):
            if len(user.args) != 2 or user.args[0] is not node or not isinstance(user.args[1], int):
                raise ValueError("the results are used as a tuple")
            user.replace_all_uses_with(outputs[user.args[1]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)
