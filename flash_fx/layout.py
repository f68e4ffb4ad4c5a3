"""The memory order of what is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_like(t: Tensor) -> Tensor:
    """Uninitialised, of the shape of `t` and dense, in its order of dimensions where its rows lie in memory.

    Queries that were [B, M, H, D] before a transpose get their gradient as the transpose of a [B, M, H, D]: whatever
    undoes the transpose is then a view. A shape alone gives [B, H, M, D], and a copy for each of q, k and v.
    """
    strides = t.stride()
    known = all(isinstance(s, int) and s != 0 for s in strides)
    return torch.empty_like(t) if known and strides[-1] == 1 else t.new_empty(t.shape)
