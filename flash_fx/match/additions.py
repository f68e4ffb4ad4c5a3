"""Values that the twin does not hold and a site needs: nodes added to it, which the rewrite writes into the user's graph."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from .normalize import Twin


def size_value(*_: Any) -> None:
    """Stands in the twin for a run-time size. Never executed."""
    raise AssertionError("a twin graph is for reading only")


class Additions:
    """Adds nodes at the end of a twin, or in place of one of its nodes, each with a fake value."""

    def __init__(self, twin: Twin, instead_of: Node | None = None) -> None:
        self.twin, self.instead_of = twin, instead_of

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node that calls an ATen operator on nodes, numbers and run-time sizes.

        It carries gradients as these do, and none where the node it is instead of carries none.
        """
        node = self._add(target, torch.fx.node.map_aggregate(args, self._size), kwargs)
        values, options = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self._mode, torch.no_grad(), compat.enable_python_dispatcher():
            made = node.meta["val"] = target(*values, **options)
        needing = self.twin.requires_grad
        flows = self.instead_of is None or self.instead_of in needing
        if flows and made.is_floating_point() and any(a in needing for a in node.all_input_nodes):
            self.twin.requires_grad.add(node)
        return node

    def _size(self, value: Any) -> Any:
        """Run-time sizes are nodes in a graph."""
        if not isinstance(value, torch.SymInt):
            return value
        node = self._add(size_value, (str(value),), {})
        node.meta["val"] = value
        return node

    def _add(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Node:
        graph = self.twin.graph
        with graph.inserting_before(self.instead_of or graph.output_node()):
            node = graph.call_function(target, args, kwargs)
        if self.instead_of in self.twin.origin:
            self.twin.origin[node] = self.twin.origin[self.instead_of]
        return node

    @cached_property
    def _mode(self) -> Any:
        return compat.fake_mode_of([n.meta.get("val") for n in self.twin.graph.nodes])
