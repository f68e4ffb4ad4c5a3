"""Captured tensors as the program reads them: numbered in order of first use, folded axes viewed as batch and head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ..score.expr import Expr, Load, Program, load, map_loads, name, walk
from .site import Operand


def renumber(program: Program, captures: list[Node]) -> tuple[Program, tuple[Node, ...]]:
    """Captures in order of first use; unused ones are dropped."""
    order = [n.head for n in program.loads()]
    position = {old: new for new, old in enumerate(dict.fromkeys(order))}
    return _map_loads(program, lambda n: Load(position[n.head], n.args)), tuple(captures[i] for i in position)  # type: ignore[return-value]


def unfold(
    program: Program, captures: tuple[Node, ...], folded: Expr | None, heads: Expr, fits: Callable[[Node, int], bool]
) -> tuple[Program, tuple[Operand, ...]]:
    """Read `c[b * heads + h]`, the folded index, as `c.view(b, heads)[b, h]`: gradients want one position per axis.

    `fits` tells whether an axis of a tensor is exactly as long as the folded index runs.
    """
    axes = {n: _folded_axis(program, n, folded) for n in range(len(captures))}
    axes = {n: axis if axis is not None and fits(captures[n], axis) else None for n, axis in axes.items()}

    def split(n: Load) -> Load:
        axis = axes[n.head]
        if axis is None:
            return n
        return load(n.head, *n.args[:axis], name("b"), name("h"), *n.args[axis + 1 :])

    operands = [
        Operand(node, () if axes[n] is None else ((torch.ops.aten.unflatten.int, (axes[n], (-1, heads))),))
        for n, node in enumerate(captures)
    ]
    return _map_loads(program, split), tuple(operands)


def _folded_axis(program: Program, capture: int, folded: Expr | None) -> int | None:
    """The one axis at which every load of the capture has the folded index."""
    axes = {
        tuple(axis for axis, i in enumerate(n.args) if i is folded)
        for _, e in program.parts()
        for n in walk(e)
        if isinstance(n, Load) and n.head == capture
    }
    found = next(iter(axes)) if len(axes) == 1 else ()
    return found[0] if len(found) == 1 else None


def _map_loads(program: Program, change: Callable[[Load], Expr]) -> Program:
    return program.map(lambda e: map_loads(e, change))
