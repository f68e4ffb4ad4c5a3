"""Random attentions, compiled: result and every gradient against float64 eager, whatever is rewritten.

`FLASH_FX_EXAMPLES=2000 pytest tests/test_attention_programs.py` tries more of them.
"""

from __future__ import annotations

import os

import numerics
import torch
from attention_programs import Plan, plans
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import flash_fx

EXAMPLES = int(os.environ.get("FLASH_FX_EXAMPLES", "100"))
TRIES = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def results(plan: Plan, dtype: torch.dtype, *, compiled: bool) -> dict[str, Tensor]:
    run, tensors = plan.build()
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend=flash_fx.make_backend(inner="eager"), dynamic=plan.dynamic)
    out = run(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * direction).sum(), leaves, allow_unused=True)
    named = {
        f"grad{i}": torch.zeros_like(t) if g is None else g for i, (t, g) in enumerate(zip(leaves, grads, strict=True))
    }
    return {"out": out.detach(), **named}


def check(plan: Plan) -> int:
    """How many sites were fused."""
    golden = results(plan, torch.float64, compiled=False)
    eager = results(plan, torch.float32, compiled=False)
    with flash_fx.recording() as reports:
        ours = results(plan, torch.float32, compiled=True)
    largest = max((g.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for g in golden.values() if g.numel()), default=0.0)
    finite = {n: t for n, t in golden.items() if torch.isfinite(t).all()}
    numerics.assert_within_budget(ours, eager, finite, scales=dict.fromkeys(finite, 8 * largest))
    if "out" not in finite:  # rows without a key: NaN where eager has NaN
        assert torch.equal(ours["out"].isnan(), eager["out"].isnan())
    return sum(r.fused for r in reports)


@TRIES
@given(plans(twisted=False))
def test_attention_is_right(plan: Plan) -> None:
    check(plan)


@TRIES
@given(plans(twisted=True))
def test_what_resembles_attention_is_right(plan: Plan) -> None:
    check(plan)
