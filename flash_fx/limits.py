"""What the kernels take."""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 512
WIDE = 256  # head dims whose tiles are so small that short sequences do not pay: channels that attend to channels

FEW = 16  # queries, or fewer, for which float32 products on the ordinary units are faster as a matrix times a vector


def max_head_dim(dtype: torch.dtype, device: torch.device) -> int:
    """The greatest head dim. Longer rows of float32, or on an AMD GPU, leave no room for tiles in shared memory."""
    fits = dtype.itemsize <= 2 and torch.version.hip is None
    return MAX_HEAD_DIM if fits or device.type == "cpu" else 256


def is_slow_for_few_queries(dtype: torch.dtype, device: torch.device) -> bool:
    """Are products made in tiles of 16 rows and more on units that gain nothing by it?"""
    exact = dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return exact and device.type != "cpu"
