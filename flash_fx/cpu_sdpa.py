"""The one case PyTorch's own CPU kernel covers: `score * c`, causal or everything, equal heads.

plain_attention(query, key, value, parse("score = score * 0.125; keep = kv_idx <= q_idx"))    # (True, 0.125)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .score.expr import KV, KV_LEN, Q_LEN, SCORE, Const, Op, Program, Q

_CAUSAL = (KV <= Q, Q >= KV)
_CAUSAL_FROM_END = (KV <= Q + KV_LEN - Q_LEN, KV <= Q + (KV_LEN - Q_LEN), Q + KV_LEN - Q_LEN >= KV)  # same if M == N


def plain_attention(query: Tensor, key: Tensor, value: Tensor, program: Program) -> tuple[bool, float] | None:
    """Whether it is causal, and the scale; None if this is not the CPU kernel's case."""
    scale = _scale(program)
    causal = program.keep is not None
    if scale is None or any(p is not None for p in (program.sink, program.weight, program.drop)):
        return None
    if causal and (program.keep not in (*_CAUSAL, *_CAUSAL_FROM_END) or query.shape[2] != key.shape[2]):
        return None
    same_heads = query.shape[1] == key.shape[1] and query.shape[3] == key.shape[3] == value.shape[3]
    if query.device.type != "cpu" or not same_heads or 0 in query.shape or 0 in key.shape:
        return None
    return (causal, scale) if query.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def _scale(program: Program) -> float | None:
    score = program.score
    if score is SCORE:
        return 1.0
    if isinstance(score, Op) and score.head in ("mul", "div") and SCORE in score.args:
        factor = score.args[0] if score.args[1] is SCORE else score.args[1]
        if isinstance(factor, Const) and not isinstance(factor.head, bool) and 0 < factor.head < math.inf:
            if score.head == "mul":
                return float(factor.head)
            return 1.0 / factor.head if score.args[0] is SCORE else None
    return None


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
