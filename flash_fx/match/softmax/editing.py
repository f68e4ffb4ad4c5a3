"""Nodes of the twin that are made anew, with values and gradients like those they replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ..normalize import Twin

aten = torch.ops.aten


def insert_node(twin: Twin, before: Node, target: Any, *args: Any, val: torch.Tensor, like: Node, **kwargs: Any) -> Node:
    """A new twin node; gradients flow through it as through `like`."""
    with twin.graph.inserting_before(before):
        new = twin.graph.call_function(target, args, kwargs)
    new.meta["val"] = val
    if like in twin.origin:
        twin.origin[new] = twin.origin[like]
    if like in twin.requires_grad:
        twin.requires_grad.add(new)
    return new


def softmax_for(
    twin: Twin, old: Node, x: Node, dim: int, sink: Any = None, *, safe: bool = False, traits: Iterable[str] = ()
) -> Node:
    """A softmax of `x` with the dtype of `old`, before `old`."""
    target = aten._safe_softmax.default if safe else aten._softmax.default
    args = (x, dim) if safe else (x, dim, False)
    new = insert_node(twin, old, target, *args, val=x.meta["val"], like=old)
    if sink is not None:
        twin.sinks[new] = sink
    new.meta.update(dict.fromkeys(traits, True))
    dtype = old.meta["val"].dtype
    if dtype == x.meta["val"].dtype:
        return new
    return insert_node(twin, old, aten._to_copy.default, new, dtype=dtype, val=x.meta["val"].to(dtype), like=old)


def traits_of(softmax: Node) -> list[str]:
    """Those of `Row` that the node has."""
    return [trait for trait in ("raw", "logged", "unsaved") if trait in softmax.meta]


def repeat_steps(twin: Twin, path: list[Node], start: Node, before: Node) -> Node:
    """The same views and casts of another node."""
    for step in path:
        start = once_more(twin, step, 0, start, before)
    return start


def once_more(twin: Twin, step: Node, position: int, new: Node, before: Node) -> Node:
    """The same operation of another argument at the position."""
    args = [*step.args[:position], new, *step.args[position + 1 :]]
    return insert_node(twin, before, step.target, *args, val=step.meta["val"], like=step, **step.kwargs)
