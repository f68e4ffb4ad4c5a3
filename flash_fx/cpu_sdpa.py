"""The one case PyTorch's own CPU kernel covers: `score * c`, causal or everything, equal heads."""

from __future__ import annotations

import torch
from torch import Tensor

from .score.expr import Program
from .score.plain import causal_and_scale


def plain_attention(query: Tensor, key: Tensor, value: Tensor, program: Program) -> tuple[bool, float] | None:
    """Whether it is causal, and the scale; None if this is not the CPU kernel's case."""
    plain = causal_and_scale(program)
    if plain is None or (plain[0] and query.shape[2] != key.shape[2]):
        return None
    same_heads = query.shape[1] == key.shape[1] and query.shape[3] == key.shape[3] == value.shape[3]
    if query.device.type != "cpu" or not same_heads or 0 in query.shape or 0 in key.shape:
        return None
    return plain if query.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, *, bmhd: bool
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, D] in the dtype of query, lse [B, H, M] float32 contiguous."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value = (_rows(t) for t in (query, key, value))
    out, lse = kernel(query, key, value, 0.0, causal, scale=scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if bmhd else out.contiguous()
    return out, lse.to(torch.float32).contiguous()


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, *, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The needed gradients of query, key, value and captures; the program reads no capture."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the order that the kernel's forward writes
    query, key, value, out = (_rows(t) for t in (query, key, value, out))
    grads = kernel(grad_out.contiguous(), query, key, value, out, lse, 0.0, causal, scale=scale)
    return [g for g, n in zip(grads, needs[:3], strict=True) if n]


def _rows(t: Tensor) -> Tensor:
    """The kernel reads rows of adjacent numbers and does not check."""
    return t if t.stride(-1) == 1 and 0 not in t.stride() else t.contiguous()
