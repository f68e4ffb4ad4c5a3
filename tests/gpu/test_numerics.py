"""The generated kernels on a GPU, through torch.compile of legacy code: outputs and every gradient against fp64 eager."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import flash_fx

pytestmark = pytest.mark.gpu
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def randn(*shape, dtype, grad=True):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def run(fn, args, seed=7):
    out = fn(*args)
    generator = torch.Generator("cuda").manual_seed(seed)
    direction = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.float64)
    leaves = [a for a in args if a.requires_grad]
    grads = torch.autograd.grad((out.double() * direction).sum(), leaves)
    return [out.detach().double(), *(g.double() for g in grads)]


def check(fn, args, sites=1, slack=1.0, noise=0.0, **compile_options):
    """Errors of ours within eager's own error plus a few eps, on max and mean, for the output and every gradient.

    `noise` is the size of the terms where the last gradient is a sum that cancels.
    """
    wide = tuple(a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args)
    gold, eager = run(fn, wide), run(fn, args)
    torch._dynamo.reset()
    with flash_fx.recording() as reports:
        ours = run(torch.compile(fn, backend=flash_fx, **compile_options), args)
    assert sum(r.fused for r in reports) == sites, reports
    eps = EPS[args[0].dtype]
    for number, (a, b, g) in enumerate(zip(ours, eager, gold, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), f"tensor {number}: NaN in other places than eager"
        a, b, g = (t.nan_to_num(0.0) for t in (a, b, g))
        for statistic in (torch.amax, torch.mean):
            error, reference = statistic((a - g).abs()).item(), statistic((b - g).abs()).item()
            size = statistic(g.abs()).item() + (noise if number == len(gold) - 1 else 0.0)
            budget = slack * reference + (16 if eps < 1e-6 else 4) * eps * size
            assert error <= budget, (
                f"tensor {number} {statistic.__name__}: {error:.3e} > {budget:.3e} (eager {reference:.3e})"
            )


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), -1) @ v


def causal(q, k, v):
    m, n = q.size(-2), k.size(-2)
    keep = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
    return (q @ k.mT * 0.125).masked_fill(~keep, -math.inf).softmax(-1) @ v


def window(q, k, v):
    i = torch.arange(q.size(-2), device=q.device)
    keep = (i[None] <= i[:, None]) & (i[:, None] - i[None] < 100)
    return torch.where(keep, q @ k.mT * 0.125, -math.inf).softmax(-1) @ v


def biased(q, k, v, bias):
    return (torch.tanh((q @ k.mT * 0.125 + bias) / 5) * 5).softmax(-1) @ v  # capped, or a bias by rows would cancel


def finite_fill(q, k, v, keep):
    return (q @ k.mT * 0.125).masked_fill(keep == 0, -1e4).softmax(-1) @ v


def softcap(q, k, v):
    return (torch.tanh(q @ k.mT * 0.125 / 5) * 5).softmax(-1) @ v


def grouped(q, k, v):
    g = q.size(1) // k.size(1)
    k, v = (t[:, :, None].expand(-1, -1, g, -1, -1).flatten(1, 2) for t in (k, v))
    return plain(q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [16, 40, 64, 80, 128, 192, 256, 512])
def test_head_dims(dtype, d):
    if d == 512 and dtype == torch.float32:
        pytest.skip("left alone")
    lengths = (600, 520, 520) if d == 512 else (300, 257, 257)  # fewer scores than channels cost more fused
    check(plain, [randn(2, 3, n, d, dtype=dtype) for n in lengths])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1023), (64, 64), (127, 129), (513, 513), (200, 700)])
def test_causal(dtype, m, n):
    check(causal, [randn(2, 3, s, 64, dtype=dtype) for s in (m, n, n)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_window_and_softcap(dtype):
    qkv = [randn(2, 3, 520, 64, dtype=dtype) for _ in range(3)]
    check(window, qkv)
    check(softcap, qkv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (300, 260),
        (4, 300, 260),
        (1, 4, 300, 260),
        (3, 1, 300, 260),
        (3, 4, 300, 260),
        (3, 1, 1, 260),
        (4, 1, 1),
        (1, 4, 300, 1),
    ],
)
def test_bias_gradient(dtype, shape):
    args = [*(randn(3, 4, n, 64, dtype=dtype) for n in (300, 260, 260)), randn(*shape, dtype=dtype)]
    check(biased, args, noise=noise_of_sum(args))


def noise_of_sum(args):
    """How large n terms of random sign are together: sums over whole rows cancel almost completely, their errors do not."""
    q, k, v, bias = (a.detach().double() for a in args)
    full = bias.expand(3, 4, 300, 260).clone().requires_grad_()
    terms = run(biased, (q, k, v, full))[-1]
    return terms.square().mean().sqrt().item() * math.sqrt(terms.numel() / bias.numel())


def bias_of_groups(q, k, v, bias):
    rows = bias.size(0)
    scores = (q @ k.mT * 0.125).unflatten(0, (rows, -1)) + bias[:, None]
    return (torch.tanh(scores.flatten(0, 1) / 5) * 5).softmax(-1) @ v


def bias_of_folded_heads(q, k, v, bias):
    return (torch.tanh((q @ k.mT * 0.125 + bias.view(*q.shape[:2], 1, -1)) / 5) * 5).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("fn", "shape"),
    [(bias_of_groups, (2, 4, 300, 260)), (bias_of_groups, (2, 1, 300, 260)), (bias_of_folded_heads, (24, 260))],
)
def test_gradient_at_a_computed_index(dtype, fn, shape):
    args = [*(randn(6, 4, n, 64, dtype=dtype) for n in (300, 260, 260)), randn(*shape, dtype=dtype)]
    check(fn, args, slack=3.0)
    compiled = torch.compile(fn, backend=flash_fx)
    assert all(torch.equal(a, b) for a, b in zip(run(compiled, args), run(compiled, args), strict=True))


def causal_replaced(q, k, v, fill):
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril(k.size(-2) - q.size(-2))
    return torch.where(keep, q @ k.mT * 0.125, fill).softmax(-1) @ v


def causal_added(q, k, v, fill):
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril(k.size(-2) - q.size(-2))
    return (q @ k.mT * 0.125 + torch.where(keep, 0.0, fill).to(q.dtype)).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("fn", [causal_replaced, causal_added])
@pytest.mark.parametrize(
    ("m", "n", "d"), [(520, 520, 64), (300, 700, 128), (700, 300, 64)]
)  # the last fills whole rows
def test_causal_by_a_finite_fill(dtype, fill, fn, m, n, d):
    qkv = [randn(2, 3, s, d, dtype=dtype) for s in (m, n, n)]
    check(lambda q, k, v: fn(q, k, v, fill), qkv, slack=2.0 if m > n else 1.0)


def test_one_filled_row_walks_and_clear_tiles_do_not_look():
    q, k, v = (randn(1, 2, 512, 64, dtype=torch.float32, grad=False) for _ in range(3))
    q[:, :, 300] = 0
    k[:, :, 400:] *= 1000  # filled scores above kept ones, if they are only added to
    compiled = torch.compile(lambda q, k, v: causal_added(q, k, v, -1e4), backend=flash_fx)
    torch.testing.assert_close(compiled(q, k, v), causal_added(q, k, v, -1e4), rtol=1e-3, atol=1e-3)
    v[:, :, 400:] = torch.nan
    replaced = torch.compile(lambda q, k, v: causal_replaced(q, k, v, -1e9), backend=flash_fx)
    assert replaced(q, k, v)[:, :, :256].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_padding_with_rows_that_hold_nothing(dtype):
    keep = (torch.arange(200, device="cuda") < torch.tensor([[200], [77], [0]], device="cuda")).int()
    check(finite_fill, [*(randn(3, 2, 200, 64, dtype=dtype) for _ in range(3)), keep[:, None, None]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_heads(dtype):
    check(grouped, [randn(2, h, 190, 64, dtype=dtype) for h in (8, 2, 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outliers_and_peaked_rows(dtype):
    q, k, v = (torch.randn(1, 2, 260, 64, device="cuda", dtype=dtype) for _ in range(3))
    q[..., 5, :] *= 30
    k[..., 17, :] *= 20
    v[..., 3] *= 100
    # scores near 1000 carry a rounding of 1e-4; the backward meets it once more when it recomputes them in another order
    check(plain, [t.requires_grad_() for t in (q, k, v)], slack=1.0 if dtype is torch.bfloat16 else 4.0)


def test_strided_operands_and_expanded_gradient():
    def packed(x):
        q, k, v = (t.view(2, 200, 4, 64).transpose(1, 2) for t in x.chunk(3, -1))
        return plain(q, k, v).transpose(1, 2).reshape(2, 200, 256).sum(-1, keepdim=True).expand(-1, -1, 3)

    check(packed, [randn(2, 200, 768, dtype=torch.bfloat16)])


def test_more_than_65535_batch_heads():
    check(plain, [randn(70_000, 1, 16, 16, dtype=torch.float16) for _ in range(3)])


def test_autocast():
    def cast(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return plain(q, k, v)

    torch._dynamo.reset()
    args = [randn(2, 3, 140, 64, dtype=torch.float32) for _ in range(3)]
    with flash_fx.recording() as reports:
        ours = run(torch.compile(cast, backend=flash_fx), args)
    assert sum(r.fused for r in reports) == 1
    for a, b in zip(ours, run(cast, args), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def dropped(q, k, v):
    return F.dropout((q @ k.mT * 0.125).softmax(-1), 0.25) @ v


@pytest.mark.parametrize(  # the second is one tile, which has a backward of its own
    ("n", "dtype", "apart", "tolerance"), [(256, torch.float32, 0.01, 1e-4), (64, torch.float16, 0.02, 1e-2)]
)
def test_dropout_keeps_the_right_share_and_the_same_mask_in_backward(n, dtype, apart, tolerance):
    torch._dynamo.reset()
    q, k = (randn(2, 2, n, 64, dtype=dtype) for _ in range(2))
    v = torch.eye(n, device="cuda", dtype=dtype).expand(2, 2, n, n).clone().requires_grad_()
    out = torch.compile(dropped, backend=flash_fx)(q, k, v)  # with V the identity, out is the dropped weights
    assert abs((out == 0).float().mean().item() - 0.25) < apart
    grad = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, grad)
    torch.testing.assert_close(dv, out.detach().mT @ grad, rtol=tolerance, atol=tolerance)


def test_dropout_differs_in_every_replay_of_a_cuda_graph():
    torch._dynamo.reset()
    q, k, v = (randn(1, 2, 64, 64, dtype=torch.bfloat16, grad=False) for _ in range(3))
    compiled = torch.compile(dropped, backend=flash_fx, mode="reduce-overhead")
    with torch.no_grad():
        seen = [compiled(q, k, v).clone() for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_seeds_repeat():
    torch._dynamo.reset()
    args = [randn(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(3)]
    compiled = torch.compile(dropped, backend=flash_fx)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(*args))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_backward_is_deterministic():
    torch._dynamo.reset()
    args = [*(randn(3, 4, 300, 64, dtype=torch.bfloat16) for _ in range(3)), randn(4, 300, 300, dtype=torch.bfloat16)]
    compiled = torch.compile(biased, backend=flash_fx)
    first, second = run(compiled, args), run(compiled, args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_graph_serves_all_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(causal, backend=flash_fx, dynamic=True)
    with flash_fx.recording() as reports:
        for n in (65, 130, 257, 700, 1024):  # not 64 first: Dynamo gives equal sizes one symbol, and 64 is the head dim
            args = [randn(2, 3, n, 64, dtype=torch.bfloat16) for _ in range(3)]
            for a, b in zip(run(compiled, args), run(causal, args), strict=True):
                assert (a - b).norm() <= 0.02 * b.norm()
    assert len(reports) == 1


def test_memory_grows_with_length_not_its_square():
    torch._dynamo.reset()
    compiled = torch.compile(causal, backend=flash_fx, dynamic=True)

    def peak(n):
        args = [randn(1, 4, n, 64, dtype=torch.bfloat16) for _ in range(3)]
        run_once = compiled(*args)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_once.sum().backward()
        compiled(*args).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(4096), peak(16384)
    assert long <= 4.5 * short
    assert long < 16384 * 16384  # bytes: far below one [N, N] tensor for each head


def test_tf32_only_when_allowed():
    args = [randn(1, 2, 256, 64, dtype=torch.float32, grad=False) for _ in range(3)]
    gold = plain(*(a.double() for a in args))
    errors = {}
    for precision in ("highest", "high"):
        torch._dynamo.reset()
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.no_grad():
                errors[precision] = (torch.compile(plain, backend=flash_fx)(*args).double() - gold).abs().max().item()
        finally:
            torch.set_float32_matmul_precision("highest")
    assert errors["highest"] < 5e-6
    assert errors["high"] < 5e-3
