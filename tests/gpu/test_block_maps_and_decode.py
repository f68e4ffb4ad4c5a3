"""Block maps, split keys and short sequences on a GPU: outputs and every gradient against fp64 eager."""

from __future__ import annotations

import math

import pytest
import torch
from test_numerics import check, plain, randn

from flash_fx.rewriting import rewrite_graph

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16


def masked(condition, q, k, v, fill=-math.inf):
    return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~condition, fill).softmax(-1) @ v


def ordered(q, k):
    i, j = (torch.arange(t.size(-2), device=t.device) for t in (q, k))
    return j[None] <= i[:, None]


def documents(q, k, v, ids):
    return masked((ids[:, :, None] == ids[:, None, :])[:, None], q, k, v)


def causal_documents(q, k, v, ids):
    return masked((ids[:, :, None] == ids[:, None, :])[:, None] & ordered(q, k), q, k, v)


def padded(q, k, v, lengths):
    real = torch.arange(k.size(-2), device=k.device) < lengths[:, None]
    return masked(real[:, None, None], q, k, v)


def causal_left_padded(q, k, v, lengths):
    """Rows without a key: filled with one finite number, they attend to every key."""
    real = torch.arange(k.size(-2), device=k.device) >= k.size(-2) - lengths[:, None]
    return masked(real[:, None, None] & ordered(q, k), q, k, v, torch.finfo(q.dtype).min)


def added(q, k, v, lengths):
    real = torch.arange(k.size(-2), device=k.device) < lengths[:, None]
    hidden = ~(real[:, None, None] & ordered(q, k))
    return (q @ k.mT * q.size(-1) ** -0.5 + hidden.to(q.dtype) * torch.finfo(q.dtype).min).softmax(-1) @ v


def mask_tensor(q, k, v, mask):
    return masked(mask, q, k, v)


def ids(*ends):
    marks = torch.zeros(len(ends), 1100, dtype=torch.int64, device="cuda")
    for row, places in enumerate(ends):
        marks[row, list(places)] = 1
    return marks.cumsum(1)


def blocky():
    keep = torch.rand(1, 4, 9, 9, device="cuda") < 0.4
    keep |= torch.eye(9, dtype=torch.bool, device="cuda")
    return keep.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :1100, :1100]


CASES = {
    "documents": (documents, lambda: ids((300, 301, 800), (512,))),
    "causal documents": (causal_documents, lambda: ids((300, 301, 800), (512,))),
    "padding": (padded, lambda: torch.tensor([1100, 130], device="cuda")),
    "left padding": (causal_left_padded, lambda: torch.tensor([1100, 200], device="cuda")),
    "added": (added, lambda: torch.tensor([1100, 640], device="cuda")),
    "mask tensor": (mask_tensor, blocky),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "d"), [(HALF, 64), (HALF, 128), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_block_maps(name, dtype, d, dynamic):
    fn, make = CASES[name]
    check(fn, [*(randn(2, 4, 1100, d, dtype=dtype) for _ in range(3)), make()], dynamic=dynamic)


def test_one_map_for_all_layers_and_no_matrix():
    def model(x, ids):
        for _ in range(3):
            q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in (x, x * 0.5, x + 1))
            x = causal_documents(q, k, v, ids).transpose(1, 2).flatten(2)
        return x

    graphs = []

    def keep_graph(gm, example_inputs):
        rewrite_graph(gm)
        graphs.append(gm)
        return gm

    args = randn(2, 1100, 256, dtype=HALF), ids((300,), (512,))
    torch._dynamo.reset()
    torch.compile(model, backend=keep_graph)(*args)
    targets = [str(n.target) for n in graphs[0].graph.nodes]
    assert sum("block_map" in t for t in targets) == 1 and sum("flash_fx.attention" in t for t in targets) == 3
    values = [n.meta.get("example_value") for n in graphs[0].graph.nodes]
    assert not [v for v in values if isinstance(v, torch.Tensor) and list(v.shape).count(1100) > 1]


def grouped(q, k, v):
    g = q.size(1) // k.size(1)
    return plain(q, *(t.repeat_interleave(g, 1) for t in (k, v)))


def cached(q, k, v, length):
    real = torch.arange(k.size(-2), device=k.device) <= length
    g = q.size(1) // k.size(1)
    return masked(real, q, *(t.repeat_interleave(g, 1) for t in (k, v)))


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "d"), [(4097, 128), (700, 80), (2048, 256), (1024, 64)])
@pytest.mark.parametrize(("heads", "groups", "m"), [(32, 8, 1), (8, 8, 1), (8, 1, 3)])
def test_decode(dtype, n, d, heads, groups, m):
    # a product over 256 channels is summed in order here, in parts by cuBLAS for a single row
    slack = 3.0 if (dtype, d) == (torch.float32, 256) else 1.0
    tensors = [randn(2, heads, m, d, dtype=dtype), *(randn(2, groups, n, d, dtype=dtype) for _ in range(2))]
    check(grouped, tensors, slack=slack)


@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_with_a_static_cache(dynamic):
    tensors = [randn(2, 32, 1, 128, dtype=HALF), *(randn(2, 8, 4096, 128, dtype=HALF) for _ in range(2))]
    check(cached, [*tensors, torch.tensor(1234, device="cuda")], dynamic=dynamic)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("n", [7, 16, 31, 32, 49, 64, 65, 128, 197, 256, 400])
def test_short_sequences(dtype, d, n):
    check(plain, [randn(3, 4, n, d, dtype=dtype) for _ in range(3)])
    if n in (31, 197):
        check(lambda q, k, v: masked(ordered(q, k), q, k, v), [randn(3, 4, n, d, dtype=dtype) for _ in range(3)])
