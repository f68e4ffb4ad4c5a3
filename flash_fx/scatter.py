"""Sums by computed positions in a fixed order: the gradient of a gather without atomics.

    sum_by_index(values, index, size)    # [size, ...], row index[i] of it is the sum of such values[i]
    sum_by_position(values, index, size)    # the same, without sorting where there is little to sum
    sum_by_diagonal(values)              # [..., M + N - 1] of [..., M, N]

The first is an operator of its own, because Inductor would turn `index_put(accumulate=True)` into atomics.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op


def add_by_index(total: Tensor, index: Tensor, values: Tensor) -> None:
    """total[index[i]] += values[i], in place. total [S, ...], index int64 [X], values [X, ...]"""
    if total.device.type == "cpu":
        total.index_add_(0, index, values)  # one after another
    else:
        total.index_put_((index,), values, accumulate=True)  # sorts: no atomics


def sum_by_position(values: Tensor, index: Tensor, size: int) -> Tensor:
    """`sum_by_index`, as one sum of all values for each position where that is little work: one kernel, no sorting."""
    terms = [size, *values.shape]
    if not all(isinstance(n, int) for n in terms) or math.prod(terms) > MOST_TERMS:
        return sum_by_index(values, index, size)
    rest = (1,) * (values.dim() - 1)
    here = index.view(1, -1, *rest) == torch.arange(size, device=index.device).view(-1, 1, *rest)
    return torch.where(here, values, 0.0).sum(1)


@custom_op("flash_fx::sum_by_index", mutates_args=())
def sum_by_index(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size, ...]: zeros, and to row index[i] values[i] is added."""
    total = values.new_zeros((size, *values.shape[1:]))
    add_by_index(total, index, values)
    return total


@sum_by_index.register_fake
def _(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_empty((size, *values.shape[1:]))


MOST_TERMS = 1 << 24  # float32, where nothing fuses the sum: 64 MB
ROWS = 64  # that are summed at once: the copy that shifts them is longer by so many columns


def sum_by_diagonal(values: Tensor) -> Tensor:
    """[..., M + N - 1]: element d is the sum of all values[..., m, n] with n - m == d - (M - 1)."""
    *outer, rows, columns = values.shape
    blocks = (rows + ROWS - 1) // ROWS
    missing = blocks * ROWS - rows
    padded = F.pad(values, (0, 0, 0, missing)).flip(-2).view(*outer, blocks, ROWS, columns)
    total = _sum_shifted(_sum_shifted(padded, 1), ROWS)
    return total[..., missing : missing + rows + columns - 1]


def _sum_shifted(values: Tensor, step: int) -> Tensor:
    """[..., N + (R - 1) * step], the sum of the rows of [..., R, N], row r moved to the right by r * step."""
    *outer, rows, columns = values.shape
    wide = columns + rows * step
    flat = F.pad(values, (0, rows * step)).reshape(*outer, rows * wide)
    # read as rows that are shorter by `step`, each row starts `step` further to the right
    moved = flat[..., : rows * (wide - step)].reshape(*outer, rows, wide - step)
    return moved.sum(-2)
