"""Tables read at positions that a tensor holds: gathered once before the kernels run, and again before the backward.

    score + c0[c1[q_idx, kv_idx], h]    becomes    score + c2[0, h, q_idx, kv_idx], c2 gathered here

In a kernel such a read is two dependent loads a score, the second one scattered. Gathered here it is one load that all
batches share. What is gathered lives as long as one call and is no input of the operator, so nothing saves it; its
gradient is summed over batches inside the kernel, then over equal positions.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..score.evaluate import Evaluator
from ..score.expr import INDEX_NAMES, Const, Load, Program, captures_in, load, map_loads, name, names_in


@lru_cache(maxsize=1024)
def tables_of(program: Program) -> tuple[Load, ...]:
    """The loads at positions that are loaded for every query and key."""
    return tuple(n for n in program.loads() if captures_in(*n.args) and {"q_idx", "kv_idx"} <= names_in(*n.args))


def gather(node: Load, evaluator: Evaluator) -> Tensor:
    """What the load reads: [B or 1, H or 1, M, N]."""
    return evaluator.captures[node.head][tuple(evaluator.run(i).to(torch.int64) for i in node.args)]


@lru_cache(maxsize=1024)
def gathered(program: Program, first: int) -> Program:
    """The program that reads what is gathered for its tables, as captures from number `first` on."""
    numbers = {n: first + i for i, n in enumerate(tables_of(program))}

    def change(n: Load) -> Load:
        if n not in numbers:
            return n
        names = names_in(*n.args)
        return load(numbers[n], *(name(i) if i in names else Const(0) for i in INDEX_NAMES))  # type: ignore[return-value]

    return program.map(lambda e: map_loads(e, change))
