"""Public bug reports that only a GPU can show: precision switches, addresses beyond 32 bits, memory, devices."""

from __future__ import annotations

import math

import pytest
import torch

import flash_fx

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch._dynamo.reset()


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), -1) @ v


def masked(q, k, v, mask):
    scores = q @ k.mT * 0.125
    scores = scores.masked_fill(~mask, -1e9) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ v


def randn(*shape, **options):
    return torch.randn(*shape, **{"device": "cuda", "dtype": torch.bfloat16, **options})


def gigabytes_free():
    return torch.cuda.mem_get_info()[0] / 2**30


# *** 19 ***


def test_report_19_a_change_of_the_precision_is_honoured():
    args = [randn(1, 2, 256, 64, dtype=torch.float32) for _ in range(3)]
    gold = plain(*(a.double() for a in args))
    compiled = torch.compile(plain, backend=flash_fx)
    errors = []
    for precision in ("highest", "high", "highest"):  # after the first call
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.no_grad():
                errors.append((compiled(*args).double() - gold).abs().max().item())
        finally:
            torch.set_float32_matmul_precision("highest")
    assert errors[0] < 5e-6
    assert errors[2] < 5e-6
    assert errors[1] < 5e-3


# *** 20, 8 ***


def test_report_20_strides_of_a_channels_last_convolution():
    conv = torch.nn.Conv2d(8, 90, 1, device="cuda").to(memory_format=torch.channels_last)

    def fn(x):
        q, k, v = conv(x).moveaxis(1, -1).reshape(2, 49, 90).chunk(3, -1)
        return torch.nn.functional.max_pool2d(plain(q, k, v).mT.reshape(2, 30, 7, 7), 2)

    x = randn(2, 8, 7, 7, dtype=torch.float32).contiguous(memory_format=torch.channels_last).requires_grad_()
    leaves = (x, *conv.parameters())
    compiled = torch.compile(fn, backend=flash_fx)
    for a, b in zip(*([f(x), *torch.autograd.grad(f(x).sin().sum(), leaves)] for f in (compiled, fn)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# *** 21 ***


@pytest.mark.parametrize("batch", [699, 700])
def test_report_21_addresses_beyond_32_bits(batch):
    """Keys and values stored [length, batch, head dim]: 24000 * 700 * 128 passes 2^31."""
    if gigabytes_free() < 60:
        pytest.skip("needs 60 GB")
    n, d, few = 24_000, 128, slice(batch - 2, batch)
    k, v = (randn(n, batch, d).transpose(0, 1).unsqueeze(1).requires_grad_() for _ in range(2))
    q = randn(batch, 1, 256, d).requires_grad_()
    out = torch.compile(plain, backend=flash_fx)(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    small = [t[few].detach().contiguous().float().requires_grad_() for t in (q, k, v)]
    wanted = plain(*small)
    known = torch.autograd.grad(wanted.sum(), small)
    torch.testing.assert_close(out[few].float(), wanted, rtol=2e-2, atol=2e-3)
    for ours, truth in zip(grads, known, strict=True):
        assert (ours[few].float() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.parametrize("length", [46_340, 46_341])
def test_report_21_a_mask_of_more_than_two_to_the_31(length):
    if gigabytes_free() < 20:
        pytest.skip("needs 20 GB")
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda")
    mask[..., length // 2 :] = False
    mask[..., -1, :] = True
    q, k, v = (randn(1, 1, length, 64) for _ in range(3))
    with torch.no_grad():
        out = torch.compile(masked, backend=flash_fx)(q, k, v, mask)
        wanted = masked(q[:, :, -9:], k, v, mask[:, :, -9:])
    torch.testing.assert_close(out[:, :, -9:].float(), wanted.float(), rtol=2e-2, atol=2e-3)


def test_report_21_a_stride_of_two_to_the_24():
    if gigabytes_free() < 12:
        pytest.skip("needs 12 GB")
    store = torch.zeros(129 * 2**24, dtype=torch.bfloat16, device="cuda")
    k = store.as_strided((1, 1, 129, 64), (1, 1, 2**24, 1))
    k.copy_(randn(1, 1, 129, 64))
    q, v = randn(1, 1, 33, 64), randn(1, 1, 129, 64)
    with torch.no_grad():
        out = torch.compile(plain, backend=flash_fx)(q, k, v)
    torch.testing.assert_close(out, plain(q, k.contiguous(), v), rtol=2e-2, atol=2e-3)


# *** 24 ***


@pytest.mark.parametrize("flag", [False, True])
def test_report_24_gradients_repeat_bit_by_bit(flag):
    args = [*(randn(4, 8, 1024, 64) for _ in range(3)), randn(1, 8, 1024, 1024)]
    args = [a.requires_grad_() for a in args]
    torch.use_deterministic_algorithms(flag)
    try:
        compiled = torch.compile(masked, backend=flash_fx)
        runs = []
        for _ in range(5):
            out = compiled(*args)
            runs.append([out, *torch.autograd.grad(out.float().sin().sum(), args)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


# *** 28 ***


@pytest.mark.parametrize("kind", ["bool", "float", "expanded", "computed"])
def test_report_28_a_broadcast_mask_stays_small(kind):
    n = 4097  # no multiple of 8

    def fn(q, k, v, mask):
        if kind == "computed":
            mask = (torch.arange(n, device="cuda") < mask[:, None])[:, None, None]
        return masked(q, k, v, mask.expand(2, 16, n, n) if kind == "expanded" else mask)

    q, k, v = (randn(2, 16, n, 64).requires_grad_() for _ in range(3))
    mask = {
        "bool": torch.rand(2, 1, 1, n, device="cuda") < 0.7,
        "float": randn(2, 1, 1, n, dtype=torch.float32),
        "expanded": torch.rand(2, 1, 1, n, device="cuda") < 0.7,
        "computed": torch.tensor([n, n // 2], device="cuda"),
    }[kind]
    compiled = torch.compile(fn, backend=flash_fx)
    compiled(q, k, v, mask).sum().backward()  # compiles
    q.grad = k.grad = v.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(q, k, v, mask).sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 10 * q.numel() * q.element_size()
    assert extra < 2 * 16 * n * n  # bytes: not one number for each score


# *** 32 ***


def test_report_32_replays_of_a_graph_write_nothing_else():
    def fn(q, k, v):
        return plain(q, k, v) + plain(q, k, v * 2)

    q, k, v = (randn(2, 4, 64, 64).requires_grad_() for _ in range(3))
    compiled = torch.compile(fn, backend=flash_fx, mode="reduce-overhead")
    kept = [t.detach().clone() for t in (q, k, v)]
    wanted = torch.autograd.grad(fn(q, k, v).sum(), (q, k, v))
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True))


# *** 38 ***


def test_report_38_the_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    args = [torch.randn(2, 4, 130, 64, device="cuda:1", requires_grad=True) for _ in range(3)]
    with torch.cuda.device(0):
        out = torch.compile(plain, backend=flash_fx)(*args)
        grads = torch.autograd.grad(out.sum(), args)
    assert out.device == args[0].device
    for a, b in zip([out, *grads], [plain(*args), *torch.autograd.grad(plain(*args).sum(), args)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_report_38_a_side_stream():
    q, k, v = (randn(2, 4, 130, 64) for _ in range(3))
    compiled = torch.compile(plain, backend=flash_fx)
    with torch.no_grad():
        compiled(q, k, v)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            q = q * 2  # not seen on the default stream
            out = compiled(q, k, v)
            torch.cuda.current_stream().synchronize()
        truth = plain(q.double(), k.double(), v.double())
        assert (out - truth).abs().max() <= 2 * (plain(q, k, v) - truth).abs().max()


def test_report_38_an_attention_on_the_cpu_beside_one_on_the_gpu():
    def fn(q, k, v):
        return plain(q, k, v).cpu() + plain(q.cpu(), k.cpu(), v.cpu())

    args = [torch.randn(2, 4, 33, 16, device="cuda") for _ in range(3)]
    with flash_fx.recording() as reports:
        out = torch.compile(fn, backend=flash_fx)(*args)
    assert sum(r.fused for r in reports) == 2
    torch.testing.assert_close(out, fn(*args), rtol=1e-3, atol=1e-4)
