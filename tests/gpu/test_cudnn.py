"""What is exactly scaled_dot_product_attention: cuDNN's forward, our backward from its LSE."""

from __future__ import annotations

import pytest
import torch
from test_numerics import causal, check, plain, randn

import flash_fx
from flash_fx import cudnn_sdpa
from flash_fx.kernels import launch
from flash_fx.score.text import parse

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def takes(q, k, v, text="score = score * 0.125"):
    return cudnn_sdpa.plain_attention(q, k, v, parse(text)) is not None


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("attention", [plain, causal])
@pytest.mark.parametrize(("m", "n", "d"), [(65, 65, 64), (128, 128, 32), (197, 197, 64), (300, 300, 128), (1024, 1024, 40)])
def test_square(dtype, attention, m, n, d):
    args = [randn(2, 4, m, d, dtype=dtype), randn(2, 4, n, d, dtype=dtype), randn(2, 4, n, d, dtype=dtype)]
    assert takes(*args)
    check(attention, args)


@pytest.mark.parametrize(("m", "n"), [(100, 513), (700, 66)])
def test_other_lengths(m, n):
    args = [randn(3, 2, m, 64, dtype=HALF), randn(3, 2, n, 64, dtype=HALF), randn(3, 2, n, 64, dtype=HALF)]
    assert takes(*args)
    check(plain, args)


def grouped(q, k, v):
    return causal(q, *(t.repeat_interleave(4, 1) for t in (k, v)))


def test_grouped_heads():
    args = [randn(2, 8, 500, 128, dtype=HALF), randn(2, 2, 500, 128, dtype=HALF), randn(2, 2, 500, 128, dtype=HALF)]
    assert takes(*args)
    check(grouped, args)


def test_packed_projections():
    def packed(qkv):
        q, k, v = qkv.view(2, 200, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        return plain(q, k, v).transpose(1, 2).reshape(2, 200, 256)

    check(packed, [randn(2, 200, 768, dtype=HALF)])


def test_scores_with_outliers():
    args = [randn(2, 4, 300, 64, dtype=HALF) for _ in range(3)]
    with torch.no_grad():
        args[0][..., 3] *= 30
        args[1][..., 3] *= 30
    check(plain, args)


@pytest.mark.parametrize("text", ["score = score * 0.125", "score = score * 0.125; keep = kv_idx <= q_idx"])
def test_lse_is_that_of_our_kernel(text):
    q, k, v = (torch.randn(2, 3, 400, 64, device="cuda", dtype=HALF) for _ in range(3))
    out, lse = torch.ops.flash_fx.attention(q, k, v, [], [], None, text, False)
    ours, expected = launch.forward(q, k, v, [], [], None, parse(text))
    assert lse.shape == expected.shape and lse.is_contiguous()
    torch.testing.assert_close(lse, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, ours, rtol=2e-2, atol=2e-2)
    again, _ = torch.ops.flash_fx.attention(q, k, v, [], [], None, text, True)
    assert torch.equal(again, out) and again.transpose(1, 2).is_contiguous()


def test_what_is_ours():
    q, k, v = (torch.randn(2, 3, 400, 64, device="cuda", dtype=HALF) for _ in range(3))
    assert takes(q, k, v)
    assert not takes(q, k, v, "score = score + c0[h]") and not takes(q.float(), k.float(), v.float())
    assert not takes(q[:, :, :64], k, v) and not takes(q[..., :63], k[..., :63], v[..., :63])
    assert not takes(q[:, :, :300], k, v, "keep = kv_idx <= q_idx") and not takes(q.mT.contiguous().mT, k, v)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert not takes(q, k, v)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_compiled_graph_calls_it_and_gradients_repeat():
    args = [randn(2, 4, 512, 64, dtype=HALF) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=flash_fx)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = [torch.autograd.grad(compiled(*args).sum(), args) for _ in range(2)]
    names = " ".join(e.key for e in profile.key_averages())
    assert "flash_fx_forward" not in names and "flash_fx_backward_dq" in names
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_the_backward_too_where_gradients_need_not_repeat(d, causal, heads):
    def attention(q, k, v):
        groups = q.shape[2] // k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = q @ k.mT * d**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(512, 512, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    h, hk = heads
    args = [randn(2, 512, n, d, dtype=HALF) for n in (h, hk, hk)]
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=flash_fx.make_backend(deterministic=False))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = compiled(*args)
        g = torch.randn_like(out)
        found = torch.autograd.grad(out, args, g)
    assert "flash_fx" not in " ".join(e.key for e in profile.key_averages())
    exact = [a.detach().double().requires_grad_() for a in args]
    wanted = torch.autograd.grad(attention(*exact), exact, g.double())
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(compiled(*args), args, g)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "flash_fx_backward" in " ".join(e.key for e in profile.key_averages())
