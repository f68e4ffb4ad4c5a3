"""Windows, short texts and what else fits in one tile; ALiBi; memory order and memory that nobody may read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_numerics import check, plain, randn, run

import flash_fx

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def window_index(side):
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    apart = at[:, None] - at[None, :] + side - 1
    return (apart[..., 0] * (2 * side - 1) + apart[..., 1]).cuda()


def windows(q, k, v, table, index, mask=None):
    """As in Swin: a bias looked up in a table, and in shifted windows a mask for each window of an image."""
    n = q.size(-2)
    scores = q * q.size(-1) ** -0.5 @ k.mT + table[index.view(-1)].view(n, n, -1).permute(2, 0, 1)[None]
    if mask is not None:
        count = mask.size(0)
        scores = scores.view(-1, count, *scores.shape[1:]) + mask[:, None]
        scores = scores.view(-1, *scores.shape[2:])
    return F.softmax(scores, dim=-1) @ v


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("side", "d"), [(4, 32), (7, 32), (8, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_windows(dtype, side, d, masked):
    n, index = side * side, window_index(side)
    qkv = [randn(40, 3, n, d, dtype=dtype) for _ in range(3)]
    table = randn((2 * side - 1) ** 2, 3, dtype=dtype)
    mask = [torch.where(torch.rand(4, n, n, device="cuda") < 0.3, -100.0, 0.0).to(dtype)] if masked else []
    # a row of the table sums some thousand terms of random sign
    check(lambda q, k, v, t: windows(q, k, v, t, index, *mask), [*qkv, table], noise=float(40 * n) ** 0.5 / n)


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "d", "dv"), [(1, 2, 16, 16), (64, 2, 64, 64), (1, 64, 8, 40), (17, 33, 24, 64), (64, 64, 64, 64)]
)
def test_one_tile(dtype, m, n, d, dv):
    check(plain, [randn(5, 3, m, d, dtype=dtype), randn(5, 3, n, d, dtype=dtype), randn(5, 3, n, dv, dtype=dtype)])


def alibi(q, k, v, slopes):
    i = torch.arange(q.size(-2), device=q.device)
    j = torch.arange(k.size(-2), device=q.device)
    scores = q @ k.mT * 0.125 + slopes[:, None, None] * (j[None, :] - i[:, None])
    keep = j[None, :] <= i[:, None] + (k.size(-2) - q.size(-2))
    return torch.where(keep, scores, -torch.inf).softmax(-1).to(q.dtype) @ v


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "d"), [(300, 300, 64), (200, 1111, 128), (2048, 2048, 64), (1, 700, 64)])
def test_alibi(dtype, m, n, d):
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(4)], device="cuda")
    check(alibi, [randn(2, 4, m, d, dtype=dtype), *(randn(2, 4, n, d, dtype=dtype) for _ in range(2)), slopes])


def test_gradients_have_the_order_of_their_operands():
    torch._dynamo.reset()
    x = torch.randn(2, 300, 12, 64, device="cuda", dtype=HALF)
    q, k, v = (x[:, :, 4 * i : 4 * i + 4].transpose(1, 2).detach().requires_grad_() for i in range(3))
    out = torch.compile(plain, backend=flash_fx)(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.transpose(1, 2).is_contiguous() for g in grads)


def surrounded(t):
    """The same tensor inside a larger one of NaN: before it, behind it and between its rows."""
    wide = torch.full([s + 2 for s in t.shape], torch.nan, device=t.device, dtype=t.dtype)
    inside = wide[tuple(slice(1, 1 + s) for s in t.shape)]
    inside.copy_(t.detach())
    return inside


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "d"), [(49, 20), (200, 72), (333, 120)])
def test_nothing_outside_a_tensor_is_read(dtype, n, d):
    def biased(q, k, v, bias):
        return (q @ k.mT * 0.125 + bias).softmax(-1) @ v

    args = [*(randn(2, 3, n, d, dtype=dtype) for _ in range(3)), randn(3, n, n, dtype=dtype)]
    torch._dynamo.reset()
    compiled = torch.compile(biased, backend=flash_fx)
    poisoned = [surrounded(a).requires_grad_() for a in args]
    for a, b in zip(run(compiled, args), run(compiled, poisoned), strict=True):
        assert a.isfinite().all() and (a - b).norm() <= 0.02 * a.norm()
