"""`flash_fx::attention` and its backward.

    attention(
        query [B, H, M, D], key [B, Hk, N, D], value [B, Hk, N, Dv], captures, sizes, seed, program, bmhd,
        kv_blocks, q_blocks, deterministic,
    ) -> (out [B, H, M, Dv], lse [B, H, M] float32)
    block_map(query, key, captures, sizes, program) -> (kv_blocks, q_blocks)

A block map says which blocks of the scores a mask leaves, so that kernels skip the others; attention is the same without.
All are `triton_op`s: on a GPU Inductor sees the generated kernels themselves. On every other device their body is a
call of an opaque operator that runs the tiled PyTorch path. `program` is the text of a score program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op

from .. import cudnn_sdpa
from ..layout import gradient_like
from ..score.blocks import block_shape
from ..score.expr import Program
from ..score.text import parse
from .check import check_operands
from .device import uses_triton


@functools.lru_cache(maxsize=1024)
def _program(text: str) -> Program:
    return parse(text)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor] = (),
    program: str = "",
    sizes: Sequence[int] = (),
) -> Tensor:
    """Exact attention `softmax(program(query @ key^T)) @ value` without an M x N tensor, forward and backward.

    query     [B, H, M, D], float32, bfloat16 or float16 (float64 on the CPU)
    key       [B, Hk, N, D], H a multiple of Hk: query head h reads key head h // (H // Hk)
    value     [B, Hk, N, Dv]
    captures  tensors the program reads as c0[...], c1[...]; float ones get a gradient
    program   a score program such as "score = score * 0.125; keep = kv_idx <= q_idx"; empty is the plain product
    sizes     ints the program reads as s0, s1, ...

    Returns [B, H, M, Dv] in the dtype of query. Note that nothing is scaled unless the program does it.
    Raises OperandError or ProgramError. Algorithm: FlashAttention-2 (Dao, 2023, arXiv 2307.08691), algorithms 1 and 2.
    """
    parsed = check_operands(query, key, value, captures, sizes, program)
    seed = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=query.device) if parsed.drop else None
    return torch.ops.flash_fx.attention(query, key, value, list(captures), list(sizes), seed, program, False)[0]


@triton_op("flash_fx::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    program: str,
    bmhd: bool,
    kv_blocks: Tensor | None = None,
    q_blocks: Tensor | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    if not uses_triton(query.device):
        return torch.ops.flash_fx.tiled_attention(query, key, value, captures, sizes, seed, program, bmhd)
    plain = cudnn_sdpa.plain_attention(query, key, value, _program(program))
    if plain is not None:
        return cudnn_sdpa.forward(query, key, value, *plain, bmhd=bmhd)
    from ..kernels import launch

    return launch.forward(query, key, value, captures, sizes, seed, _program(program), bmhd, kv_blocks)


@triton_op("flash_fx::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    program: str,
    needs: Sequence[bool],
    kv_blocks: Tensor | None = None,
    q_blocks: Tensor | None = None,
    deterministic: bool = True,
) -> list[Tensor]:
    if not uses_triton(query.device):
        return torch.ops.flash_fx.tiled_attention_backward(
            grad_out, query, key, value, captures, sizes, seed, out, lse, program, needs
        )
    plain = None if deterministic else cudnn_sdpa.plain_attention(query, key, value, _program(program))
    if plain is not None and all(needs):
        return cudnn_sdpa.backward(grad_out, query, key, value, out, lse, *plain)
    from ..kernels import launch

    grads = launch.backward(
        grad_out,
        query,
        key,
        value,
        captures,
        sizes,
        seed,
        out,
        lse,
        _program(program),
        list(needs),
        kv_blocks,
        q_blocks,
    )
    operands = sum(needs[:3])
    return [*grads[:operands], *(g.contiguous() for g in grads[operands:])]


@triton_op("flash_fx::block_map", mutates_args=())
def _block_map(
    query: Tensor, key: Tensor, captures: Sequence[Tensor], sizes: Sequence[int], program: str
) -> tuple[Tensor, Tensor]:
    if not uses_triton(query.device):
        raise NotImplementedError(f"flash_fx: block maps are for devices with Triton, got {query.device}")
    from ..kernels import blocks

    return blocks.block_map(query, key, captures, sizes, _program(program))


@custom_op("flash_fx::tiled_attention", mutates_args=())
def _tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    program: str,
    bmhd: bool,
) -> tuple[Tensor, Tensor]:
    from .. import tiled

    return tiled.forward(query, key, value, captures, sizes, seed, _program(program), bmhd)


@custom_op("flash_fx::tiled_attention_backward", mutates_args=())
def _tiled_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Sequence[int],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    program: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    from .. import tiled

    grads = tiled.backward(grad_out, query, key, value, captures, sizes, seed, out, lse, _program(program), list(needs))
    return [g.contiguous() for g in grads]


# *** shapes ***


@_attention.register_fake
@_tiled_attention.register_fake
def _attention_shapes(
    query: Tensor, key: Tensor, value: Tensor, captures: Any, sizes: Any, seed: Any, program: str, bmhd: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    b, h, m, _ = query.shape
    lse = query.new_empty((b, h, m), dtype=torch.float32)
    if bmhd:
        return query.new_empty((b, m, h, value.shape[-1])).transpose(1, 2), lse
    return query.new_empty((b, h, m, value.shape[-1])), lse


@_attention_backward.register_fake
@_tiled_attention_backward.register_fake
def _backward_shapes(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: Sequence[Tensor],
    sizes: Any,
    seed: Any,
    out: Any,
    lse: Any,
    program: str,
    needs: Sequence[bool],
    *_: Any,
) -> list[Tensor]:
    ordered = gradient_like if uses_triton(query.device) else _contiguous_like
    found = [*map(ordered, (query, key, value)), *map(_contiguous_like, captures)]
    return [t for t, needed in zip(found, needs, strict=True) if needed]


def _contiguous_like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


@_block_map.register_fake
def _block_map_shapes(query: Tensor, key: Tensor, captures: Any, sizes: Any, program: str) -> tuple[Tensor, Tensor]:
    b, h, rows, columns = block_shape(query, key, _program(program))
    return tuple(query.new_empty((b, h, x, y + 2), dtype=torch.int32) for x, y in ((rows, columns), (columns, rows)))  # type: ignore[return-value]


# *** autograd ***


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, captures, sizes, seed, program, _, kv_blocks, q_blocks, deterministic = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, seed, kv_blocks, q_blocks, *captures)
    ctx.sizes, ctx.program = sizes, program
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    ctx.arguments = _given(kv_blocks, q_blocks, deterministic)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple:
    query, key, value, out, lse, seed, kv_blocks, q_blocks, *captures = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [*wanted[:3], *(wanted[3] if isinstance(wanted[3], (list, tuple)) else [wanted[3]] * len(captures))]
    needs = [n and t.is_floating_point() for n, t in zip(needs, (query, key, value, *captures), strict=True)]
    grads = iter(
        torch.ops.flash_fx.attention_backward(
            grad_out, query, key, value, captures, ctx.sizes, seed, out, lse, ctx.program, needs, kv_blocks, q_blocks,
            ctx.deterministic,
        )
    )  # fmt: skip
    found = [next(grads) if n else None for n in needs]
    return found[0], found[1], found[2], found[3:], None if ctx.sizes else [], None, None, None, *[None] * ctx.arguments


def _given(kv_blocks: Tensor | None, q_blocks: Tensor | None, deterministic: bool) -> int:
    """How many of the last arguments autograd counts: the dispatcher drops defaults at the end."""
    return 3 if not deterministic else 2 if q_blocks is not None else int(kv_blocks is not None)


_attention.register_autograd(_differentiate, setup_context=_save)
