"""Every tile that a table holds or a search may choose, forced once: numbers against float64, and the forward repeats bit by bit.

Sites that no two kernels share: each kind of kernel is forced alone, so that the others stay as they are measured.
"""

from __future__ import annotations

import pytest
import torch

from flash_fx.kernels import launch, matrix, tiles, tuning
from flash_fx.kernels.tiles import tile_for
from flash_fx.score.evaluate import reference
from flash_fx.score.text import parse

pytestmark = pytest.mark.gpu
KINDS = ("forward", "decode", "backward_dq", "backward_dkdv", "backward_capture", "backward_dq_matrix")
PROGRAM = parse("score = score * 0.125 + c0[h, q_idx, kv_idx]; keep = kv_idx <= q_idx + 330")
EPS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}


def operands(kind, dtype, d):
    torch.manual_seed(0)
    m = 1 if kind == "decode" else 300
    shapes = ((2, 4, m, d), (2, 2, 650, d), (2, 2, 650, d), (4, m, 650), (2, 4, m, d))
    return [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]


def gold(kind, dtype, d, compute):
    q, k, v, bias, g = operands(kind, dtype, d)
    leaves = [t.to(compute).requires_grad_() for t in (q, k, v, bias)]
    out, _ = reference(*leaves[:3], leaves[3:], program=PROGRAM)
    return [out.detach(), *torch.autograd.grad(out, leaves, g.to(compute))]


def ours(kind, dtype, d):
    q, k, v, bias, g = operands(kind, dtype, d)
    out, lse = launch.forward(q, k, v, [bias], [], None, PROGRAM)
    return [out, *launch.backward(g, q, k, v, [bias], [], None, out, lse, PROGRAM, [True] * 4)]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(kind, dtype, d, monkeypatch):
    batches = 2 if kind == "backward_dq_matrix" else 1
    if batches * d > matrix.MOST:
        pytest.skip("stays apart")
    monkeypatch.setattr(matrix, "FEWEST", 0)
    monkeypatch.setattr(matrix, "MOST", matrix.MOST if batches > 1 else 0)
    q, _, v, bias, _ = operands(kind, dtype, d)
    spec = launch.make_spec(q, v, [bias], 0, PROGRAM)
    limit = launch.shared_memory(q.device)
    wanted = gold(kind, dtype, d, torch.float64)
    kernels = tuning.candidates(kind, spec, tile_for(kind, spec, limit, batches=batches), limit, batches)
    ran = []
    for tile in kernels:
        with tiles.override(tile, kind):
            try:
                found, again = ours(kind, dtype, d), ours(kind, dtype, d)
            except Exception as e:
                assert type(e).__name__ == "OutOfResources", e  # a search skips it; a table's tile must not
                assert tile != kernels[0], tile
                continue
        ran.append(tile)
        assert all(map(torch.equal, found, again)), f"{tile}: not the same bits again"
        for a, b in zip(found, wanted, strict=True):
            error = (a.double() - b).abs()
            for statistic, factor in ((torch.amax, 8), (torch.mean, 2)):
                size = statistic(b.abs())
                assert statistic(error) <= factor * (16 if dtype is torch.float32 else 1) * EPS[dtype] * size, tile
    print(f"{kind} {dtype} {d}: {len(ran)} of {len(kernels)} tiles")


@pytest.mark.parametrize(("heads", "kinds"), [(4, {"backward_dq", "backward_capture"}), (16, {"backward_dq_matrix"})])
def test_a_search_on_the_gpu(heads, kinds, monkeypatch, tmp_path):
    """mode="max-autotune" end to end, with Inductor's own searches left out."""
    import flash_fx
    from flash_fx import compat

    def attention(q, k, v, bias):
        return (q @ k.mT * 0.125 + bias).softmax(-1) @ v

    monkeypatch.setenv("FLASH_FX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compat, "searches_for_the_fastest", lambda: True)
    args = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in [(2, heads, 512, 64)] * 3]
    args.append(torch.randn(heads, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True))
    torch._dynamo.reset()
    out = torch.compile(attention, backend=flash_fx)(*args)
    grads = torch.autograd.grad(out.sum(), args)
    (path,) = tmp_path.glob("tiles_*.json")
    print(path.read_text())
    assert {line.split()[0] for line in tuning._recall(path)} == kinds | {"forward", "backward_dkdv"}
    wanted = attention(*(a.double() for a in args))
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    assert all(g.isfinite().all() for g in grads)
