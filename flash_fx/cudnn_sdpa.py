"""The forward of what is exactly scaled_dot_product_attention, by cuDNN's kernel for Hopper.

It overlaps the exponentials with the matrix products, which plain Triton cannot say. Its LSE is the one our backward
reads, so gradients stay deterministic. `torch.backends.cuda.enable_cudnn_sdp(False)` turns it off, as for PyTorch's own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .score.expr import Program
from .score.plain import causal_and_scale

ROWS = 65  # fewer queries or keys are one tile of ours, and a smaller launch
HEAD_DIM = 128
BATCHES = 2**16  # of B * H: the limit of a launch's second axis
NUMEL = 2**31
HOPPER = (9, 0)
OLDEST = 90100  # cuDNN 9.1, the first that PyTorch calls for attention


def plain_attention(query: Tensor, key: Tensor, value: Tensor, program: Program) -> tuple[bool, float] | None:
    """Whether it is causal, and the scale; None if cuDNN does not take it or ours is as fast.

    query [B, H, M, D], key [B, Hk, N, D], value [B, Hk, N, D]. Run-time sizes are ours: cuDNN plans anew for each.
    """
    if query.device.type != "cuda" or not _is_available(query.device):
        return None
    plain = causal_and_scale(program)
    operands = (query, key, value)
    if plain is None or not all(isinstance(n, int) for t in operands for n in (*t.shape, *t.stride())):
        return None
    (b, h, m, d), n = query.shape, key.shape[2]
    fits = min(m, n) >= ROWS and value.shape[3] == d <= HEAD_DIM and 0 < b * h < BATCHES and key.shape[1] > 0
    fits = fits and (m == n or not plain[0]) and all(map(_is_aligned, operands))
    return plain if fits else None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def _is_available(device: torch.device) -> bool:
    library = torch.backends.cudnn
    enabled = torch.backends.cuda.cudnn_sdp_enabled() and library.enabled and (library.version() or 0) >= OLDEST
    return enabled and torch.version.hip is None and _capability(device) == HOPPER


def _is_aligned(t: Tensor) -> bool:
    """16-bit rows of adjacent numbers, all of which begin at multiples of 16 bytes."""
    strides = t.stride()
    starts = (t.shape[-1], t.storage_offset(), *strides[:-1])
    return t.dtype.itemsize == 2 and strides[-1] == 1 and 0 not in strides and t.numel() < NUMEL and not any(
        s % 8 for s in starts
    )  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, *, bmhd: bool
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, D] in the dtype of query, lse [B, H, M] float32 contiguous."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = kernel(query, key, value, None, True, 0.0, causal, scale=scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if bmhd else out.contiguous()
    return out, lse.squeeze(-1)
