"""Functions that once broke the rewrite, or easily could: outputs and gradients must be eager's, and nothing may crash."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flash_fx

B, H, M, N, D = 2, 3, 8, 10, 4
INF = math.inf


def sm(s):
    return torch.softmax(s, -1)


def bool_product_negated(q, k, v):
    keep = torch.ones(M, N, dtype=torch.bool).tril(2) * (torch.arange(N) < 9)
    return sm((q @ k.mT).masked_fill(~keep, -1e9)) @ v


def bool_sum_and(q, k, v):
    keep = ((torch.arange(N) < 4) + (torch.arange(N) > 6)) & torch.ones(M, N, dtype=torch.bool).tril(3)
    return sm((q @ k.mT).masked_fill(~keep, -1e9)) @ v


def weights_zeroed_in_empty_rows(q, k, v):
    drop = torch.zeros(M, N, dtype=torch.bool)
    drop[0] = True
    return sm((q @ k.mT).masked_fill(drop, -INF)).masked_fill(drop, 0.0) @ v


def slice_from_the_end(q, k, v):
    m, n = q.shape[-2], k.shape[-2]
    positions = torch.arange(n)
    return sm((q @ k.mT).masked_fill(~(positions[-m:][:, None] >= positions), -INF)) @ v


def flipped_slice_from_the_end(q, k, v):
    m, n = q.shape[-2], k.shape[-2]
    positions = torch.arange(n).flip(0)[-m:]
    return sm((q @ k.mT).masked_fill(positions[:, None] < torch.arange(n) - 4, -1e4)) @ v


def write_under_no_grad(q, k, v):
    s = q @ k.mT
    with torch.no_grad():
        s.div_(2.0)
    return sm(s) @ v


def softmax_under_no_grad(q, k, v):
    s = q @ k.mT
    with torch.no_grad():
        w = sm(s)
    return w @ v


def product_under_no_grad(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    with torch.no_grad():
        s = torch.bmm(q, k.mT)
    return torch.bmm(sm(s * 2), v)


def keys_expanded_over_the_batch(q, k, v):
    return sm(q @ k[:1, :1].expand(B, H, N, D).mT) @ v[:1, :1].expand(B, H, N, D)


def write_into_the_result(q, k, v):
    return (sm(q @ k.mT) @ v).add_(1).mul_(2)


def copy_that_is_written(q, k, v):
    t = (sm(q @ k.mT) @ v).transpose(1, 2)
    y = t.reshape(B, M, -1)
    y.add_(1)
    return torch.cat([y.flatten(), t.flatten()])


def view_of_a_transposed_result(q, k, v):
    return (v.mT @ sm(q @ k.mT).mT).view(B, H * D, M)


def view_after_two_transpositions(q, k, v):
    return (sm(q @ k.mT) @ v).transpose(1, 2).transpose(1, 2).view(B, -1)


def einsum_result_viewed(q, k, v):
    return torch.einsum("bhmn,bhnd->bmhd", sm(q @ k.mT), v).transpose(1, 2).view(B * H, M, D)


def half_stopped(q, k, v):
    s = q @ k.mT
    return sm(0.5 * s + 0.5 * s.detach()) @ v


def float64_mask(q, k, v):
    time = torch.arange(N).double() + 1.7e9
    return sm((q @ k.mT).masked_fill(time[:M, None] < time, -INF)) @ v


def int32_wraps(q, k, v):
    i = torch.arange(N, dtype=torch.int32) * 2**29
    return sm((q @ k.mT).masked_fill(i[:M, None] < i, -1e4)) @ v


def half_positions(q, k, v):
    p = (torch.arange(N) * 100).to(torch.bfloat16)
    return sm((q @ k.mT).masked_fill(~(p[:M, None] >= p - 3), -1e9)) @ v


def relu_in_place_between(q, k, v):
    q = q * 1.0
    s = q @ k.detach().mT
    F.relu(q, inplace=True)
    return sm(s) @ v + q


def hardtanh_in_place_by_position(q, k, v):
    q = q * 1.0
    F.hardtanh(q, -0.5, 0.5, True)
    return sm(q @ k.mT) @ v + q


def write_inside_checkpoint(q, k, v):
    def body(x):
        x = x.clone()
        x.mul_(3)
        return x.sum()

    return sm(q @ k.mT) @ v + checkpoint(body, q, use_reentrant=False)


def vmap_beside(q, k, v):
    return sm(q @ k.mT) @ v + torch.vmap(lambda x: x * 2)(q)


def two_products_one_edited(q, k, v):
    w = sm(q @ k.mT)
    w = w * 2.0
    return w @ v + (w.mT @ (w @ v)).sum()


def weights_both_ways(q, k, v):
    w = sm(q @ k.mT)
    return (w @ v).sum() + (w.mT @ q).sum()


FUNCTIONS = [f for f in list(globals().values()) if getattr(f, "__module__", "") == __name__ and f is not sm]


def results(f, args):
    out = f(*args)
    direction = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out.double() * direction).sum(), args, allow_unused=True)]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_equals_eager(f, dynamic):
    torch.manual_seed(0)
    args = [torch.randn(B, H, n, D, requires_grad=True) for n in (M, N, N)]
    wanted = results(f, args)
    got = results(torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"), dynamic=dynamic), args)
    for a, b in zip(got, wanted, strict=True):
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        torch.testing.assert_close(a.expand_as(b), b, rtol=2e-4, atol=2e-5, equal_nan=True)


def test_one_dropout_for_two_products_is_one_mask():
    def f(q, k, v):
        w = F.dropout(sm(q @ k.mT), 0.5)
        return w @ v, w @ v

    args = [torch.randn(B, H, n, D) for n in (M, N, N)]
    a, b = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(*args)
    assert torch.equal(a, b)


def test_inputs_that_share_memory():
    def f(q, k, v, alias):
        s = q @ k.mT
        alias.zero_()
        return sm(s) @ v

    q, k, v = (torch.randn(B, H, n, D) for n in (M, N, N))
    wanted = f(q.clone(), k, v, q.clone().view(-1))
    mine = q.clone()
    got = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))(mine, k, v, mine.view(-1))
    torch.testing.assert_close(got, wanted)


def test_strides_of_a_returned_result_are_eagers():
    def f(q, k, v):
        return (sm(q @ k.mT) @ v).transpose(1, 2)

    args = [torch.randn(B, H, n, D) for n in (M, N, N)]
    compiled = torch.compile(f, backend=flash_fx.make_backend(inner="aot_eager"))
    assert compiled(*args).stride() == f(*args).stride()
