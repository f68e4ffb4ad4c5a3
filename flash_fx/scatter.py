"""Sums by computed positions in a fixed order: the gradient of a gather without atomics.

    sum_by_index(values, index, size)    # [size, ...], row index[i] of it is the sum of such values[i]

An operator of its own, because Inductor would turn `index_put(accumulate=True)` into atomics.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op


def add_by_index(total: Tensor, index: Tensor, values: Tensor) -> None:
    """total[index[i]] += values[i], in place. total [S, ...], index int64 [X], values [X, ...]"""
    if total.device.type == "cpu":
        total.index_add_(0, index, values)  # one after another
    else:
        total.index_put_((index,), values, accumulate=True)  # sorts: no atomics


@custom_op("flash_fx::sum_by_index", mutates_args=())
def sum_by_index(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size, ...]: zeros, and to row index[i] values[i] is added."""
    total = values.new_zeros((size, *values.shape[1:]))
    add_by_index(total, index, values)
    return total


@sum_by_index.register_fake
def _(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_empty((size, *values.shape[1:]))
