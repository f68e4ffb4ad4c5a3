"""Assert rewrites in snapshot tests.

    def test_my_attention(self):
        flash_fx.testing.assert_rewrites(model, x, expected='''...''')

Run once with EXPECTTEST_ACCEPT=1 to write the expected text into the test. The text names operators as the user's
graph does, holds no machine path, device index, hash or address, and is the same on every torch version we support.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .explaining import capture
from .report import Report

try:
    from expecttest import TestCase as _TestCase
except ImportError:  # a run-time install without the test extra
    from unittest import TestCase as _TestCase  # type: ignore[assignment]

__all__ = ["GraphSnapshotTestCase", "assert_rewrites", "capture_rewrites", "graph_text"]


def capture_rewrites(model: Callable, *args: Any, **kwargs: Any) -> tuple[list[GraphModule], list[GraphModule], Report]:
    """(graphs before, graphs after, Report) of all graphs captured from `model(*args, **kwargs)`; compiles nothing."""
    return capture(model, *args, **kwargs)


def graph_text(graphs: list[GraphModule]) -> str:
    """One line per node: `name = operator(arguments)`, parameters and buffers by their place in the model."""
    return "\n".join(line for gm in graphs for line in _lines(gm))


class GraphSnapshotTestCase(_TestCase):
    """A TestCase with `assertRewrites(model, *args, expected=...)`."""

    def assertRewrites(self, model: Callable, *args: Any, expected: str, **kwargs: Any) -> Report:
        """Compare the rewritten graph with an inline snapshot; returns the Report."""
        _, after, report = capture_rewrites(model, *args, **kwargs)
        self.assertExpectedInline(graph_text(after), expected, skip=1)
        return report


def assert_rewrites(model: Callable, *args: Any, expected: str, **kwargs: Any) -> Report:
    """Capture, rewrite and compare the readable graph with an expecttest inline string; returns the Report.

    Raises AssertionError with a diff where they differ. EXPECTTEST_ACCEPT=1 rewrites the caller's source instead.
    """
    _, after, report = capture_rewrites(model, *args, **kwargs)
    case = GraphSnapshotTestCase("assertRewrites")
    case.longMessage = True
    _expected_inline(case, graph_text(after), expected)
    return report


def _expected_inline(case: Any, text: str, expected: str) -> None:
    frame = inspect.currentframe()
    depth = 0
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame, depth = frame.f_back, depth + 1
    case.assertExpectedInline(text, expected, skip=depth)


# *** text ***


def _lines(gm: GraphModule) -> Iterator[str]:
    names: dict[Node, str] = {}
    for node in gm.graph.nodes:
        names[node] = _name(node, names)
        if node.op == "placeholder":
            continue
        if node.op == "output":
            yield f"return {_argument(node.args[0], names)}"
        else:
            yield f"{names[node]} = {_call(node, names)}"


def _name(node: Node, names: dict[Node, str]) -> str:
    if node.op != "placeholder":
        base = _operator(node).rsplit(".", 1)[-1].lstrip("_") if node.op != "get_attr" else str(node.target)
    else:
        base = _placeholder(str(node.target))
    taken = set(names.values())
    if base not in taken:
        return base
    return next(f"{base}_{i}" for i in range(1, len(taken) + 2) if f"{base}_{i}" not in taken)


def _placeholder(target: str) -> str:
    """`L_self_modules_attn_buffers_bias_` is `attn.bias`; `L_args_0_` is `args_0`."""
    target = re.sub(r"^L_|_$", "", target)
    target = re.sub(r"^(self|fn|mod|s)_(?=modules_|parameters_|buffers_)", "", target)
    parts = re.split(r"_?modules_|_?(?:parameters|buffers)_", target)
    return ".".join(p.strip("_") for p in parts if p.strip("_")) or target


def _operator(node: Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        text = str(target)
        return text.removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _call(node: Node, names: dict[Node, str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    args = [_argument(a, names) for a in node.args]
    args += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return f"{_operator(node)}({', '.join(args)})"


def _argument(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_argument(v, names) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return ":".join("" if v is None else _argument(v, names) for v in (value.start, value.stop, value.step))
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return repr(value.type)
    return repr(value)
