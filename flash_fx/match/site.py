"""What the matcher hands to the rewrite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..score.expr import Expr, Program


@dataclass(frozen=True)
class Operand:
    """How to get a `[batch, heads, length, head_dim]` tensor from the value of a twin node, by views alone.

    `steps` are (ATen operator, arguments after the tensor); arguments may hold `Expr` sizes.
    """

    node: Node
    steps: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    dtype: torch.dtype | None = None  # the value is rounded to it; None for that of the node


@dataclass(frozen=True)
class Site:
    """One attention: `out = attention(query, key, value, captures, sizes, program)`.

    Sizes are `Expr`s over shape symbols; `symbols` gives the run-time value of each symbol. `product` is the value
    product in the twin; `out_labels` says what its dimensions are, as runs of the letters b, h, m, d.
    """

    anchor: Node
    product: Node
    query: Operand
    key: Operand
    value: Operand
    captures: tuple[Operand, ...]
    sizes: tuple[Expr, ...]
    program: Program
    dims: dict[str, Expr]  # B, H, HK, M, N, D, DV
    symbols: dict[Expr, Any]
    dtype: torch.dtype  # in which the operator runs
    out_labels: tuple[str, ...]
