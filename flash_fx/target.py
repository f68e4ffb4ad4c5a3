"""What `flash_fx explain MODULE:CALLABLE` names: import it, build its inputs.

    "examples.mingpt:build"      a factory: called without arguments it returns (model, args) or (model, kwargs)
    "models:attention"           a function or nn.Module, with one shape for every tensor it takes
    "models:Net"                 an nn.Module class that is built without arguments

Refuses, with a TargetError: names that do not exist, callables whose arguments are unknown, shapes that do not parse.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import TargetError

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool")
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call to explain: `fn(*args, **kwargs)`."""

    fn: Callable
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_call(target: str, shapes: Sequence[str] = (), dtype: str = "float32") -> Call:
    """The call that a command-line target and its shapes stand for. Raises TargetError."""
    found = find(target)
    inputs = tuple(random_tensor(s, dtype) for s in shapes)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = _called(found, target)
    if not callable(found):
        raise TargetError(f"{target} is a {type(found).__name__}; expected a function, an nn.Module or a factory")
    if isinstance(found, torch.nn.Module):
        return _with_inputs(found, inputs, target)
    if not _takes_nothing(found):
        return _with_inputs(found, inputs, target)
    return _from_factory(found, inputs, target)


def find(target: str) -> Any:
    """The object named MODULE:CALLABLE; the current folder is importable. Raises TargetError."""
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise TargetError(f"{target!r} is not MODULE:CALLABLE, for example examples.mingpt:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as e:  # whatever the module does at import
        raise TargetError(f"cannot import {module_name}: {one_line(e)}") from e
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{module_name} has no {path!r}")
        found = getattr(found, name)
    return found


def random_tensor(text: str, dtype: str = "float32") -> torch.Tensor:
    """A random tensor for "2,4,128,64" or, with a dtype of its own, "2,128:int64". Raises TargetError."""
    sizes, _, own = text.partition(":")
    chosen = DTYPES.get(own or dtype)
    if chosen is None:
        raise TargetError(f"unknown dtype {own or dtype!r}; expected one of {', '.join(DTYPES)}")
    try:
        shape = [int(s) for s in sizes.split(",")]
    except ValueError:
        shape = [-1]
    if min(shape) < 0:
        raise TargetError(f"shape {text!r} is not a list of sizes such as 2,4,128,64 or 2,128:int64")
    if chosen.is_floating_point:
        return torch.randn(shape, dtype=chosen)
    return torch.randint(0, 2, shape).to(chosen)


def one_line(error: BaseException) -> str:
    """`KeyError: 'x'`: the type and the first line of the message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _takes_nothing(fn: Callable) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _from_factory(fn: Callable, inputs: tuple, target: str) -> Call:
    """What a function that takes nothing returns, or the function itself if that is no model."""
    made = _called(fn, target)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        model, arguments = made
        if inputs:
            return Call(model, inputs)
        if isinstance(arguments, Mapping):
            return Call(model, kwargs=dict(arguments))
        return Call(model, tuple(arguments) if isinstance(arguments, (list, tuple)) else (arguments,))
    if callable(made):
        return _with_inputs(made, inputs, target)
    return Call(fn, inputs)


def _with_inputs(fn: Callable, inputs: tuple, target: str) -> Call:
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn
    if not inputs and not _takes_nothing(called):
        raise TargetError(f"{target} takes arguments: give one --shape for each tensor, for example --shape 2,4,128,64")
    return Call(fn, inputs)


def _called(fn: Callable, target: str) -> Any:
    try:
        return fn()
    except Exception as e:  # whatever the user's code does
        raise TargetError(f"{target}() failed: {one_line(e)}") from e
