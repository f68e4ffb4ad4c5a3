"""`flash_fx.rewrite`: the pass on a graph in hand, for exported programs and plain FX graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import ops  # noqa: F401
from .compat import annotate_with_fakes
from .errors import OperandError
from .match.normalize import example_value
from .report import Report
from .rewriting import rewrite_graph


def rewrite(graph: Any, example_inputs: Sequence[Any] | None = None) -> Report:
    """Rewrite an FX GraphModule or a `torch.export.ExportedProgram` in place and return the Report.

    example_inputs  needed for a GraphModule whose nodes carry no fake values (one from `torch.fx.symbolic_trace`)

    Raises OperandError for anything else, or where example inputs are needed and missing.
    """
    gm = graph if isinstance(graph, GraphModule) else getattr(graph, "graph_module", None)
    if not isinstance(gm, GraphModule):
        raise OperandError(
            f"rewrite takes an fx.GraphModule or a torch.export.ExportedProgram, got {type(graph).__name__}"
        )
    if not _has_fakes(gm):
        if example_inputs is None:
            raise OperandError("this graph carries no shapes: pass example_inputs, one per placeholder")
        wanted = sum(n.op == "placeholder" for n in gm.graph.nodes)
        if len(example_inputs) != wanted:
            raise OperandError(f"the graph has {wanted} placeholders, got {len(example_inputs)} example_inputs")
        annotate_with_fakes(gm, example_inputs)
    return rewrite_graph(gm)


def _has_fakes(gm: GraphModule) -> bool:
    return any(isinstance(example_value(n), torch.Tensor) for n in gm.graph.nodes)
