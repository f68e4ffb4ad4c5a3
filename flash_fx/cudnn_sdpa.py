"""What is exactly scaled_dot_product_attention, by cuDNN's kernels for Hopper.

They overlap the exponentials with the matrix products, which plain Triton cannot say. The forward's LSE is the one that
our backward reads, so gradients stay deterministic; cuDNN's backward, which is not, runs where the user allows it.
`torch.backends.cuda.enable_cudnn_sdp(False)` turns both off, as for PyTorch's own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .layout import gradient_like
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


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    """Gradients of query, key and value, laid out as `gradient_like` says; lse [B, H, M]. Sums come in any order."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    unread = torch.zeros((), dtype=torch.int64, device=query.device)  # the seed and the offset of dropout
    found = kernel(
        grad_out, query, key, value, out, lse.unsqueeze(-1), unread, unread, None, None, None,
        query.shape[2], key.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return [_laid_out(g, gradient_like(t)) for g, t in zip(found, (query, key, value))]


def _laid_out(gradient: Tensor, wanted: Tensor) -> Tensor:
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)
