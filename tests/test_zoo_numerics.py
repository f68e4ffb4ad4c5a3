"""Every row of the zoo, compiled: outputs and all gradients against eager in float64, budgeted by eager's own error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numerics
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import BY_NAME, CASES, Case

import flash_fx

FIXED = [c for c in CASES if not c.random]
HALF = [
    "matmul_operator", "einsum_bmhd", "baddbmm_bias", "conv_channels_first", "packed_projection", "scale_learned",
    "bias_hmn", "bias_scalar", "int_mask_finfo_min", "causal_buffer", "causal_bottom_right", "sliding_window",
    "in_place_updates", "grouped_expand_reshape", "head_dim_80", "weights_detached",
    "chain_of_three", "under_checkpoint", "bucket_embedding", "index_buffer", "content_and_position_scaled_apart",
]  # fmt: skip
INDUCTOR = [
    "packed_projection", "einsum_bmhd", "bias_b1mn", "causal_buffer", "grouped_repeat_interleave", "weights_in_a_loss",
    "under_checkpoint", "bucket_embedding", "index_buffer_with_negative_positions",
]  # fmt: skip
Named = dict[str, Tensor]


def cast(args: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Fresh leaves in another dtype; masks stay as they are."""
    made = [a.detach().to(dtype) if a.is_floating_point() else a.detach() for a in args]
    return tuple(m.clone().requires_grad_(a.requires_grad) for m, a in zip(made, args, strict=True))


def model_in(case: Case, dtype: torch.dtype) -> Callable:
    fn = case.build()[0]
    return fn.to(dtype) if isinstance(fn, nn.Module) else fn


def parameters(fn: Any) -> list[Tensor]:
    return list(fn.parameters()) if isinstance(fn, nn.Module) else []  # the same ones, compiled or not


def outputs(call: Callable, args: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(call(*args)) if isinstance(t, Tensor)]


def step(call: Callable, args: Sequence[Tensor], weights: Sequence[Tensor]) -> Named:
    """Outputs, and the gradient of every leaf in one fixed random direction."""
    outs = outputs(call, args)
    leaves = [t for t in (*args, *weights) if t.requires_grad]
    generator = torch.Generator().manual_seed(3)
    loss = sum((o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outs)
    named = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    if isinstance(loss, Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
        named |= {f"grad{i}": g for i, g in enumerate(zeros)}
    return named


def infer(call: Callable, args: Sequence[Tensor]) -> Named:
    with torch.no_grad():
        return {f"out{i}": o for i, o in enumerate(outputs(call, args))}


def sum_scales(golden: Named) -> dict[str, float]:
    """A bias gradient sums over what the bias is broadcast to: it rounds as its n terms do, like sqrt(n) of one."""
    grads = {name: g for name, g in golden.items() if name.startswith("grad")}
    terms = max((g.numel() for g in grads.values()), default=0)
    largest = max((g.abs().max().item() for g in grads.values()), default=0.0)
    return {n: largest * (terms / g.numel()) ** 0.5 for n, g in grads.items() if g.numel() < terms}


def run(call: Callable, fn: Any, args: Sequence[Tensor], *, train: bool) -> Named:
    args = cast(args, args[0].dtype)
    return step(call, args, parameters(fn)) if train else infer(call, args)


def check(case: Case, *, dtype: torch.dtype | None = None, inner: str = "aot_eager", train: bool = True) -> None:
    """Ours against eager in the row's dtype (or `dtype`), both judged by eager in float64."""
    fn, args = case.build()
    if dtype is not None:
        fn, args = model_in(case, dtype), cast(args, dtype)
    wide, wide_args = model_in(case, torch.float64), cast(args, torch.float64)
    compiled = torch.compile(fn, backend=flash_fx.make_backend(inner=inner))
    runs = ((compiled, fn, args), (fn, fn, args), (wide, wide, wide_args))
    with flash_fx.recording() as reports:
        ours, eager, golden = (run(*r, train=train) for r in runs)
    fuses_in_inference = not train and case.reason in ("gradient-stopped", "hidden")  # no gradient, no own backward
    if dtype is None and not fuses_in_inference:
        assert {r.fused for r in reports} == {case.sites if case.verdict == "fuse" else 0}
    assert ours.keys() == eager.keys() == golden.keys()
    golden = {k: g.double() for k, g in golden.items()}
    numerics.assert_within_budget(ours, eager, golden, rounding=case.lossy, scales=sum_scales(golden))


@pytest.mark.parametrize("case", FIXED, ids=lambda c: c.name)
def test_training(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", FIXED, ids=lambda c: c.name)
def test_inference(case: Case) -> None:
    check(case, train=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(BY_NAME[name], dtype=dtype)


@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(name: str) -> None:
    check(BY_NAME[name], inner="inductor")


# *** dropout ***

RATE, SIZE = 0.25, 64


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.25).softmax(-1), RATE) @ v


def dropped_under_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(dropped, q, k, v, use_reentrant=False)


def dropout_case() -> tuple[Tensor, Tensor, Tensor]:
    """With the identity as values the output is the dropped weights themselves."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, SIZE, 16, generator=generator).requires_grad_() for _ in range(2))
    return q, k, torch.eye(SIZE).expand(2, 2, SIZE, SIZE).clone().requires_grad_()


DROPPING = pytest.mark.parametrize("fn", [dropped, dropped_under_checkpoint], ids=lambda f: f.__name__)


def compile_dropped(fn: Callable) -> Callable:
    return torch.compile(fn, backend=flash_fx.make_backend(inner="aot_eager", strict=True))


@DROPPING
def test_dropout_keeps_its_share_and_scales_the_rest(fn: Callable) -> None:
    q, k, v = dropout_case()
    out = compile_dropped(fn)(q, k, v).detach()
    weights = (q @ k.mT * 0.25).softmax(-1).detach()
    kept = out != 0
    sigma = (RATE * (1 - RATE) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - RATE)) < 4 * sigma
    torch.testing.assert_close(out[kept], weights[kept] / (1 - RATE))


@DROPPING
def test_dropout_backward_uses_the_mask_of_the_forward(fn: Callable) -> None:
    q, k, v = dropout_case()
    out = compile_dropped(fn)(q, k, v)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(out, (q, k, v), direction)
    mask = (out.detach() != 0) / (1 - RATE)
    known = ((q @ k.mT * 0.25).softmax(-1) * mask) @ v
    for mine, truth in zip(ours, torch.autograd.grad(known, (q, k, v), direction), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-5)


@DROPPING
def test_dropout_repeats_with_the_seed_and_only_then(fn: Callable) -> None:
    args, call = dropout_case(), compile_dropped(fn)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        first = call(*args)
        runs.append((first, torch.autograd.grad(first.square().sum(), args), call(*args)))
    (a, a_grads, a_next), (b, b_grads, b_next), (c, _, _) = runs
    assert torch.equal(a, b)
    assert torch.equal(a_next, b_next)
    assert all(torch.equal(x, y) for x, y in zip(a_grads, b_grads, strict=True))
    assert not torch.equal(a, c)
    assert not torch.equal(a, a_next)


def test_dropout_draws_new_numbers_for_each_site_batch_and_head() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dropped(q, k, v), dropped(q, k, v)

    first, second = compile_dropped(twice)(*dropout_case())
    masks = [*(first != 0).flatten(0, 1), *(second != 0).flatten(0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# *** one graph for all sizes ***


def causal_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    n = q.size(-2)
    keep = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.mT / q.size(-1) ** 0.5 + bias
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def length_arguments(batch: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, 3, length, 16)] * 3 + [(3, length, length)]
    return tuple(torch.randn(s, generator=generator).requires_grad_() for s in shapes)


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
def test_one_graph_serves_every_length_and_batch(train: bool) -> None:
    backend = flash_fx.make_backend(inner="aot_eager")
    compiled = torch.compile(causal_with_bias, backend=backend, dynamic=True, fullgraph=True)
    with flash_fx.recording() as reports:
        for batch, length in ((2, 17), (2, 33), (5, 64), (3, 100)):
            args = length_arguments(batch, length)
            calls = ((compiled, args), (causal_with_bias, args), (causal_with_bias, cast(args, torch.float64)))
            numerics.assert_within_budget(*(run(call, call, a, train=train) for call, a in calls))
    assert [(r.fused, r.left) for r in reports] == [(1, 0)]


def test_the_second_length_makes_the_graph_dynamic_and_no_later_one_recompiles() -> None:
    compiled = torch.compile(causal_with_bias, backend=flash_fx.make_backend(inner="aot_eager"))
    with flash_fx.recording() as reports:
        for length in (17, 33, 64, 100):
            compiled(*length_arguments(2, length))
    assert [r.fused for r in reports] == [1, 1]


DYNAMIC = [
    "bias_of_folded_heads",
    "causal_bottom_right",
    "drop_where",
    "packed_projection",
    "bucket_embedding",
    "index_buffer",
]


@pytest.mark.parametrize("name", DYNAMIC)
def test_training_with_run_time_sizes(name: str) -> None:
    with torch._dynamo.config.patch(assume_static_by_default=False):
        check(BY_NAME[name])
