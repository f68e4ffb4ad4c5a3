"""What the kernels take."""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 512
WIDE = 256  # head dims whose tiles are so small that short sequences do not pay: channels that attend to channels


def max_head_dim(dtype: torch.dtype, device: torch.device) -> int:
    """The greatest head dim. Longer rows of float32, or on an AMD GPU, leave no room for tiles in shared memory."""
    fits = dtype.itemsize <= 2 and torch.version.hip is None
    return MAX_HEAD_DIM if fits or device.type == "cpu" else 256
