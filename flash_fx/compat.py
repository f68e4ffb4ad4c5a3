"""Every private torch API the project touches, in one place. Supports torch 2.11 and newer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_innermost_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)

__all__ = [
    "FakeTensor", "FakeTensorMode", "FunctionalTensor", "FunctionalTensorMode", "disable_functional_mode",
    "disable_proxy_modes_tracing", "enable_python_dispatcher", "get_innermost_proxy_mode", "make_fx",
    "track_tensor_tree", "unset_fake_temporarily",
]  # fmt: skip


def plain_tensor(value: Any) -> Any:
    """The tensor under a functional one, pending mutations applied."""
    if isinstance(value, FunctionalTensor):
        torch._sync(value)
        return torch._from_functional_tensor(value.elem)
    return value


def traced_node(value: Any) -> torch.fx.Node | None:
    """The node of the innermost make_fx trace that computes this functional tensor's present value."""
    mode = get_innermost_proxy_mode()
    slot = get_proxy_slot(plain_tensor(value), mode.tracer, None) if mode is not None else None
    return slot.proxy.node if slot is not None else None


def fake_mode_of(values: list[Any]) -> FakeTensorMode | None:
    """The fake tensor mode of the first fake tensor among the values."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def sym_expr(value: Any) -> Any:
    """The sympy expression of a SymInt."""
    return value.node.expr


def sym_hint(value: Any) -> int:
    """A likely value of a SymInt; only used to guide a search, never to decide."""
    hint = value.node.hint
    return int(hint) if hint is not None else 64


def symbol_value(size: Any, symbol: Any) -> Any:
    """A SymInt for one free symbol of another SymInt's expression."""
    env = size.node.shape_env
    return env.create_symintnode(symbol, hint=int(env.var_to_val[symbol]) if symbol in env.var_to_val else None)
