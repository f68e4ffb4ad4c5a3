"""What the kernels take."""

from __future__ import annotations

import functools

import torch

MAX_HEAD_DIM = 512
WIDE = 256  # head dims whose tiles are so small that short sequences do not pay: channels that attend to channels

FEW = 16  # queries, or fewer, for which float32 products on the ordinary units are faster as a matrix times a vector


def max_head_dim(dtype: torch.dtype, device: torch.device) -> int:
    """The greatest head dim. Longer rows of float32, or on an AMD GPU, leave no room for tiles in shared memory."""
    fits = dtype.itemsize <= 2 and torch.version.hip is None
    return MAX_HEAD_DIM if fits or device.type == "cpu" else 256


AMPERE = (8, 0)


@functools.cache
def _has_tf32(device: torch.device) -> bool:
    present = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return present and torch.cuda.get_device_capability(device) >= AMPERE


def float32_precision(device: torch.device) -> str:
    """How a product of float32 is made, in Triton's words.

    "tf32" where the user allows less than float32 (`torch.set_float32_matmul_precision`); else "tf32x3", three products of
    TF32 whose error is that of float32, as PyTorch's own fused attention makes them; "ieee" on the ordinary units where
    there is no TF32.
    """
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3" if _has_tf32(device) else "ieee"


def is_slow_for_few_queries(dtype: torch.dtype, device: torch.device) -> bool:
    """Are products made in tiles of 16 rows and more on units that gain nothing by it?"""
    return dtype is torch.float32 and device.type != "cpu" and float32_precision(device) == "ieee"
