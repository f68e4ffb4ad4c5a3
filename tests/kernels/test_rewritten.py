"""Rewritten graphs that run as they are, without a compiler after the pass: masks with block maps, and sinks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: run `pytest tests/kernels` on its own", allow_module_level=True)
pytest.importorskip("triton")

from test_interpret import Shape, operands

from flash_fx import block_maps
from flash_fx.rewriting import rewrite_graph

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
SHAPE = Shape(b=2, h=2, m=40, n=140, d=4, dv=4)
LENGTHS = torch.tensor([0, 130])
IDS = torch.arange(140) // torch.tensor([[35], [129]]) - 2
INF = math.inf


def attend(q, k, v, drop, fill=-INF):
    return (q @ k.mT).masked_fill(drop, fill).softmax(-1) @ v


def beyond(k, lengths):
    return torch.arange(k.size(2)) >= lengths[:, None, None, None]


def without_a_key(q, k, v, lengths):
    return attend(q, k, v, beyond(k, lengths))


def all_filled(q, k, v, lengths):
    return attend(q, k, v, beyond(k, lengths), torch.finfo(torch.float32).min)


def lengths_that_change_between_layers(q, k, v, lengths):
    lengths = lengths.clone()
    q = attend(q, k, v, beyond(k, lengths), -1e9)
    lengths -= 20
    return attend(q, k, v, beyond(k, lengths), -1e9)


def lengths_that_grow_between_layers(q, k, v, lengths):
    """The second layer needs blocks that the map of the first leaves out."""
    lengths = lengths - 20
    q = attend(q, k, v, beyond(k, lengths), -1e9)
    lengths += 20
    return attend(q, k, v, beyond(k, lengths), -1e9)


def first_layer_without_gradient(q, k, v, lengths):
    drop = beyond(k, lengths)
    with torch.no_grad():
        first = attend(q, k, v, drop, -1e9)
    return attend(q + first, k, v, drop, -1e9)


def one_mask_for_other_lengths(q, k, v, lengths):
    drop = beyond(k, lengths)
    return attend(q, k, v, drop, -1e9) + attend(q[:, :, :30], k, v, drop, -1e9).sum()


def documents_below_zero(q, k, v, ids):
    keep = (ids[:, None, : q.size(2), None] == ids[:, None, None, :]) & (ids >= 0)[:, None, None]
    return attend(q, k, v, ~keep, -1e9)


def view_of_a_flipped_batch(q, k, v, ids):
    turned = torch.stack([ids, ids + 1], -1)[..., 1].flip(0)
    return attend(q, k, v, turned[:, None, 50 : 50 + q.size(2), None] != turned[:, None, None, :], -1e9)


def sink(q, k, v, lengths):
    scores, logit = (q @ k.mT).masked_fill(beyond(k, lengths), -INF), v[0, :, 0, 0]
    column = logit[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def sink_by_half_the_head(q, k, v, lengths):
    scores, logit = q @ k.mT, k[0, 0, :3, 0]
    column = logit[torch.arange(q.size(1)) // 2][:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores.masked_fill(beyond(k, lengths), -1e9), column], -1).softmax(-1)[..., :-1] @ v


def rewritten(report: list) -> Callable:
    def backend(gm: Any, _: Any) -> Any:
        report.append(rewrite_graph(gm))
        return gm

    return backend


def results(f: Callable, tensors: list[Tensor], data: Tensor, dtype: torch.dtype) -> list[Tensor]:
    args = [t.to(dtype).requires_grad_() for t in tensors]
    out = f(*args, data)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), args)]


@pytest.mark.parametrize(
    ("f", "data"),
    [
        *((f, LENGTHS) for f in (without_a_key, all_filled, lengths_that_change_between_layers)),
        *(
            (f, LENGTHS)
            for f in (lengths_that_grow_between_layers, first_layer_without_gradient, one_mask_for_other_lengths)
        ),
        *((f, IDS) for f in (documents_below_zero, view_of_a_flipped_batch)),
        *((f, LENGTHS) for f in (sink, sink_by_half_the_head)),
    ],
)
def test_equals_eager(f: Callable, data: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_maps, "LEAST", 16)
    torch._dynamo.reset()
    tensors, report = operands(SHAPE, torch.float32)[:3], []
    ours = results(torch.compile(f, backend=rewritten(report)), tensors, data, torch.float32)
    assert all(r.fused for r in report)
    for a, b in zip(ours, results(f, tensors, data, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5, equal_nan=True)
