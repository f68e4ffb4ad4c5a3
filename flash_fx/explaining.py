"""`explain`: what would be fused, and what not and why, without compiling anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from . import ops  # noqa: F401
from .report import Report
from .rewriting import rewrite_graph


def explain(fn: Callable, *args: Any, **kwargs: Any) -> Report:
    """Capture `fn(*args, **kwargs)` with Dynamo, match, compile nothing. The function runs once, eagerly.

    Returns the Report of all captured graphs. Errors of the function itself propagate.
    """
    return capture(fn, *args, **kwargs)[2]


def capture(
    fn: Callable, *args: Any, **kwargs: Any
) -> tuple[list[torch.fx.GraphModule], list[torch.fx.GraphModule], Report]:
    """(graphs before, graphs after, report) of every graph that Dynamo captures from one call."""
    before: list[torch.fx.GraphModule] = []
    after: list[torch.fx.GraphModule] = []
    report = Report()

    def recorder(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        original = copy.deepcopy(gm)
        report.extend(rewrite_graph(gm))
        before.append(original)
        after.append(gm)
        return original.forward

    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096, suppress_errors=False):
        torch.compile(fn, backend=recorder)(*args, **kwargs)
    return before, after, report
