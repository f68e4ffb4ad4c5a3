"""The pass: the one function that rewrites a graph, and its form for Inductor.

normalize -> find -> lift -> legal -> rewrite, once per graph and per graph of a higher-order op
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import (
    compat,
    ops,  # noqa: F401  the operator must exist before a graph calls it
)
from .fingerprint import uuid
from .match.normalize import example_value
from .options import Options
from .report import Report, publish
from .rewriting import rewrite_graph


def run_pass(gm: torch.fx.GraphModule, options: Options) -> Report:
    """Rewrite a captured graph in place and publish the report to open recordings."""
    report = rewrite_graph(gm, options)
    publish(report)
    return report


class FlashAttentionPass(CustomGraphPass):
    """The pass for `torch._inductor.config.pre_grad_custom_pass`.

    `then` is a pass that runs before it, usually the one that was installed already.
    """

    def __init__(self, then: Callable[[torch.fx.Graph], None] | None = None, **options: Any) -> None:
        self.options, self.then = Options.make(**options), then
        self.undo: Callable[[], None] = lambda: None  # set by install

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.then is not None:
            self.then(graph)
        gm = graph.owning_module
        if gm is not None and any(n.meta and example_value(n) is not None for n in graph.nodes):
            run_pass(gm, self.options)

    def uuid(self) -> Any:
        """None (nothing may be cached) where the chained pass has no uuid of its own."""
        if self.then is None:
            return uuid(self.options)
        inner = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return None if inner is None else f"{uuid(self.options)}:{inner}"


class Installed:
    """What `install` returns; usable as a context manager."""

    def __init__(self, pass_: FlashAttentionPass) -> None:
        self.installed = pass_

    def __enter__(self) -> FlashAttentionPass:
        return self.installed

    def __exit__(self, *_: object) -> None:
        uninstall()


def install(**options: Any) -> Installed:
    """Make plain `torch.compile(model)` rewrite attention, after whatever pass was installed before.

        flash_fx.install()                 # until uninstall()
        with flash_fx.install(): ...       # inside the block

    Raises OptionError on an unknown option.
    """
    from torch._inductor import config

    pass_ = FlashAttentionPass(config.pre_grad_custom_pass, **options)
    pass_.undo = compat.run_pre_grad_pass_early()
    config.pre_grad_custom_pass = pass_
    return Installed(pass_)


def uninstall() -> None:
    """Undo the last `install`; does nothing if none is active."""
    from torch._inductor import config

    if isinstance(config.pre_grad_custom_pass, FlashAttentionPass):
        config.pre_grad_custom_pass.undo()
        config.pre_grad_custom_pass = config.pre_grad_custom_pass.then
