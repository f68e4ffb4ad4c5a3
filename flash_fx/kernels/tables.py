"""Tables read at positions that a tensor holds: gathered once before the kernels run, and again before the backward.

    score + c0[c1[q_idx, kv_idx], h]    becomes    score + c2[0, h, q_idx, kv_idx], c2 gathered here

In a kernel such a read is two dependent loads a score, the second one scattered. Gathered here it is one load that all
batches share. What is gathered lives as long as one call and is no input of the operator, so nothing saves it; its
gradient is summed over batches inside the kernel, then over equal positions. The same two functions as in launch.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..scatter import sum_by_index
from ..score.evaluate import Evaluator
from ..score.expr import INDEX_NAMES, Const, Load, Program, captures_in, load, map_loads, name, names_in, walk
from . import launch
from .plan import Gradient

Size = Any  # int or torch.SymInt


@lru_cache(maxsize=1024)
def tables_of(program: Program) -> tuple[Load, ...]:
    """The loads at positions that are loaded for every query and key."""
    loads = dict.fromkeys(n for _, e in program.parts() for n in walk(e) if isinstance(n, Load))
    return tuple(n for n in loads if captures_in(*n.args) and {"q_idx", "kv_idx"} <= names_in(*n.args))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[Size],
    seed: Tensor | None,
    program: Program,
    bmhd: bool = False,
    kv_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `launch.forward`."""
    with_tables = _Gathered.of(query, key, captures, sizes, program)
    return launch.forward(query, key, value, with_tables.captures, sizes, seed, with_tables.program, bmhd, kv_blocks)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[Size],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    program: Program,
    needs: Sequence[bool],
    kv_blocks: Tensor | None = None,
    q_blocks: Tensor | None = None,
) -> list[Tensor]:
    """As `launch.backward`."""
    gathered = _Gathered.of(query, key, captures, sizes, program)
    wanted = [*needs, *(needs[3 + n.head] for n in gathered.loads)]
    grads = launch.backward(
        grad_out,
        query,
        key,
        value,
        gathered.captures,
        sizes,
        seed,
        out,
        lse,
        gathered.program,
        wanted,
        kv_blocks,
        q_blocks,
    )
    found = dict(zip((i for i, needed in enumerate(wanted) if needed), grads, strict=True))
    for i, node in enumerate(gathered.loads):
        if 3 + node.head in found:
            total = found[3 + node.head]
            found[3 + node.head] = gathered.add_gradient(total, node, found[len(needs) + i])
    return [found[i] for i, needed in enumerate(needs) if needed]


@dataclass(frozen=True)
class _Gathered:
    """`captures` are the given ones and, for each of the `loads`, what it reads: [B or 1, H or 1, M, N]."""

    loads: tuple[Load, ...]
    program: Program
    captures: Sequence[Tensor]
    evaluator: Evaluator

    @staticmethod
    def of(
        query: Tensor, key: Tensor, captures: Sequence[Tensor], sizes: Sequence[Size], program: Program
    ) -> _Gathered:
        loads = tables_of(program)
        lengths = (*query.shape[:3], key.shape[2])
        env: dict[str, Any] = {"q_len": lengths[2], "kv_len": lengths[3]}
        for axis, index_name in enumerate(INDEX_NAMES if loads else ()):
            shape = [lengths[a] if a == axis else 1 for a in range(4)]
            env[index_name] = torch.arange(lengths[axis], device=query.device).view(shape)
        evaluator = Evaluator(env, captures, sizes, torch.float32)
        made = [captures[n.head][tuple(evaluator.run(i).to(torch.int64) for i in n.args)] for n in loads]
        return _Gathered(loads, _gathered_program(program, loads, len(captures)), [*captures, *made], evaluator)

    def add_gradient(self, total: Tensor, node: Load, grad: Tensor) -> Tensor:
        """total plus the sum of the gradient [B or 1, H or 1, M, N] of what the load reads over equal positions."""
        table = self.captures[node.head]
        plain = Gradient(node, tuple(n for n in INDEX_NAMES if n in names_in(*node.args))).plain
        looked_up = [d for d in range(table.dim()) if d not in plain]
        axes = [INDEX_NAMES.index(a) for a in plain.values()]
        searched = [a for a in range(4) if a not in axes]
        flat, size = self._positions(node, looked_up, table)
        values = grad.permute(searched + axes).to(torch.float32)
        shape = [grad.shape[a] for a in axes]
        flat = flat.expand([grad.shape[a] if a in searched else 1 for a in range(4)]).reshape(-1)
        found = sum_by_index(values.reshape(flat.shape[0], *shape), flat, size)
        found = found.view([table.shape[d] for d in looked_up] + shape)
        order = [*looked_up, *plain]
        found = found.permute([order.index(d) for d in range(table.dim())])
        part = total.to(torch.float32, copy=True)
        view = part
        for d in plain:
            view = view.narrow(d, 0, found.shape[d])
        view.add_(found)
        return part.to(total.dtype)

    def _positions(self, node: Load, dims: Sequence[int], table: Tensor) -> tuple[Tensor, Size]:
        """The flat position in these dimensions, broadcastable to [B, H, M, N], and how many there are."""
        flat = self.evaluator.run(node.args[dims[0]]).to(torch.int64)
        for d in dims[1:]:
            flat = flat * table.shape[d] + self.evaluator.run(node.args[d])
        return flat, math.prod(table.shape[d] for d in dims)


@lru_cache(maxsize=1024)
def _gathered_program(program: Program, loads: tuple[Load, ...], first: int) -> Program:
    numbers = {n: first + i for i, n in enumerate(loads)}

    def change(n: Load) -> Load:
        if n not in numbers:
            return n
        names = names_in(*n.args)
        return load(numbers[n], *(name(i) if i in names else Const(0) for i in INDEX_NAMES))  # type: ignore[return-value]

    return replace(program, **{part: map_loads(e, change) for part, e in program.parts()})  # type: ignore[arg-type]
