"""Masks that loop bounds do not describe: what a block map is made of.

A block is BLOCK queries by BLOCK keys. `keep` may hold nowhere in it, everywhere, or somewhere; only data can tell where
`keep` reads a capture (documents, padding, a mask tensor), and nothing but counting where it is periodic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .expr import Load, Op, Program, captures_in, load, map_loads, names_in, walk
from .fill import fill_of

BLOCK = 128  # rows and keys of a block; every tile divides it
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class BlockMask:
    """`program` is nothing but the condition, over the captures with these numbers, counted from 0 again."""

    program: Program
    captures: tuple[int, ...]


@lru_cache(maxsize=512)
def block_mask(program: Program) -> BlockMask | None:
    """The condition whose blocks are worth counting before the attention runs, a finite fill's included."""
    fill = fill_of(program)
    keep = program.keep if fill is None else fill.inner(program).keep
    if keep is None or not {"q_idx", "kv_idx"} & names_in(keep):
        return None
    if not any(isinstance(n, Load) or (isinstance(n, Op) and n.head == "mod") for n in walk(keep)):
        return None
    captures = captures_in(keep)
    return BlockMask(Program(keep=map_loads(keep, lambda n: load(captures.index(n.head), *n.args))), captures)


def block_shape(query: Any, key: Any, program: Program) -> tuple[Any, Any, Any, Any]:
    """Batches and heads for which the condition differs (else 1), blocks of queries, blocks of keys; from the operands."""
    assert program.keep is not None
    b, h = (size if name in names_in(program.keep) else 1 for name, size in zip("bh", query.shape[:2]))
    return b, h, (query.shape[2] + BLOCK - 1) // BLOCK, (key.shape[2] + BLOCK - 1) // BLOCK
