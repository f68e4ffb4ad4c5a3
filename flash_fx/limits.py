"""What the kernels take."""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 512


def max_head_dim(dtype: torch.dtype, device: torch.device) -> int:
    """The greatest head dim. Longer rows of float32, or on an AMD GPU, leave no room for tiles in shared memory."""
    fits = dtype.itemsize <= 2 and torch.version.hip is None
    return MAX_HEAD_DIM if fits or device.type == "cpu" else 256
