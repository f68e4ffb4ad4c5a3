"""Makes block maps: the kinds of all blocks of a mask, and their lists by rows and by columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..score.blocks import block_shape
from ..score.expr import Program
from .launch import capture_arguments, capture_facts, interpreting, launch_kernel
from .render import load_kernel
from .spec import KernelSpec
from .tiles import Tile

_WIDTH = 128  # how much of a list is looked at together
_LISTS = KernelSpec("", (), "float32", 1, 1)  # lists are made the same way for every mask


def block_map(
    query: Tensor, key: Tensor, captures: Sequence[Tensor], sizes: Sequence[Any], program: Program
) -> tuple[Tensor, Tensor]:
    """The lists of `block_lists`: blocks of keys for every block of queries, and of queries for every block of keys.

    query [B, H, M, D] and key [B, Hk, N, D] give the lengths; `program` has only a `keep`. int32,
    [B or 1, H or 1, cdiv(M, BLOCK), cdiv(N, BLOCK) + 2] and the same with M and N exchanged.
    """
    b, h, rows, columns = block_shape(query, key, program)
    kinds = query.new_empty((b, h, rows, columns), dtype=torch.int8)
    kv_blocks = query.new_empty((b, h, rows, columns + 2), dtype=torch.int32)
    q_blocks = query.new_empty((b, h, columns, rows + 2), dtype=torch.int32)
    spec = KernelSpec(str(program), capture_facts(captures), "float32", 1, 1, len(sizes), interpret=interpreting())
    tile = Tile(32, 128, 4, 1)
    arguments = capture_arguments(captures) | {f"S{i}": s for i, s in enumerate(sizes)}
    launch_kernel(
        load_kernel("block_kinds", spec), tile, b * h * rows * columns, spec.interpret,
        KINDS=kinds, H=h, M=query.shape[2], N=key.shape[2], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **arguments,
    )  # fmt: skip
    for lists, count, length, by_row in ((kv_blocks, rows, columns, True), (q_blocks, columns, rows, False)):
        launch_kernel(
            load_kernel("block_lists", replace(_LISTS, interpret=spec.interpret)), tile, b * h * count, spec.interpret,
            KINDS=kinds, LISTS=lists, ROWS=count, COLS=length,
            stride_row=columns if by_row else 1, stride_col=1 if by_row else columns, WIDTH=_WIDTH,
        )  # fmt: skip
    return kv_blocks, q_blocks
