"""Errors against a float64 truth, compared with the error that eager makes in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FEW_EPS = 4


def errors(ours: Tensor, golden: Tensor) -> tuple[float, float]:
    """Greatest and mean absolute error; the tensors must agree on where they are not finite."""
    difference = (ours.double() - golden).abs()
    both = ~torch.isfinite(golden) & ((ours.isnan() & golden.isnan()) | (ours.double() == golden))
    difference = difference.masked_fill(both, 0.0)
    if difference.numel() == 0:
        return 0.0, 0.0
    difference = difference.nan_to_num(nan=math.inf, posinf=math.inf)
    return difference.max().item(), difference.mean().item()


def check(
    name: str, ours: Tensor, eager: Tensor, golden: Tensor, rounding: torch.dtype | None = None, scale: float = 0.0
) -> list[str]:
    """What is wrong with the tensor; nothing if its error is within eager's own plus a few eps of the truth.

    `rounding` names the dtype the computation rounds to where that is not the tensor's own; `scale` is
    the size of the terms where the tensor is a sum that cancels.
    """
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return [f"{name}: {tuple(ours.shape)} {ours.dtype}, wanted {tuple(eager.shape)} {eager.dtype}"]
    finite = golden[torch.isfinite(golden)].abs()
    largest = max(scale, finite.max().item() if finite.numel() else 0.0)
    allowed = FEW_EPS * torch.finfo(rounding or ours.dtype).eps * largest
    problems = []
    for kind, mine, theirs in zip(("max", "mean"), errors(ours, golden), errors(eager, golden), strict=True):
        budget = theirs + allowed
        if not mine <= budget:
            problems.append(f"{name}: {kind} error {mine:.3e}, eager {theirs:.3e}, budget {budget:.3e}")
    return problems


def assert_within_budget(
    ours: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    rounding: torch.dtype | None = None,
    scales: Mapping[str, float] | None = None,
) -> None:
    """Every named tensor against eager in its dtype and against the float64 truth."""
    scales = scales or {}
    problems = []
    for name in golden:
        problems += check(name, ours[name], eager[name], golden[name], rounding, scales.get(name, 0.0))
    assert not problems, "\n".join(problems)
