"""Every family of tests/families.py, compiled: how many attentions are fused, outputs and gradients against float64."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from families import BY_NAME, FAMILIES, Family
from torch import Tensor, nn

import flash_fx

Named = dict[str, Tensor]
FACTOR, FEW_EPS = 3, 8  # eager's error is one draw; batch norms enlarge it, gradients that cancel have no scale
LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096, "suppress_errors": False}


@dataclass(frozen=True)
class Run:
    """What one family came to: wrong numbers, sites fused, and the reasons of the others."""

    problems: list[str]
    fused: int
    left: Counter[str]


# *** one run ***


def floats_of(result: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def evaluate(family: Family, module: nn.Module, call: Callable, inputs: dict[str, Any], *, train: bool) -> Named:
    """Outputs; in training also the loss (the outputs in a fixed random direction) and every gradient of it."""
    module.zero_grad()
    torch.manual_seed(0)
    with torch.set_grad_enabled(train):
        outs = floats_of(call(**inputs) if family.library == "transformers" else call(*inputs.values()))
    named = {f"out{i}": o.detach().clone() for i, o in enumerate(outs)}
    if not train:
        return named
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros((), dtype=torch.float64)
    for out in outs:
        direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        if out.requires_grad:
            loss = loss + (out.double().masked_fill(~torch.isfinite(out), 0.0) * direction).mean()
    loss.backward()
    for name, p in module.named_parameters():
        if p.is_floating_point():
            named[f"grad {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return named | {"loss": loss.detach()}


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def size(t: Tensor) -> float:
    """Root mean square of what is finite."""
    finite = t.double()[torch.isfinite(t)]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def distance(ours: Tensor, golden: Tensor) -> float:
    """Root mean square error; infinite where the tensors disagree on what is not finite."""
    if golden.numel() == 0:
        return 0.0
    ours, golden = ours.double(), golden.double()
    same = ~torch.isfinite(golden) & ((ours.isnan() & golden.isnan()) | (ours == golden))
    return (ours - golden).masked_fill(same, 0.0).square().nan_to_num(nan=float("inf")).mean().sqrt().item()


def problems(ours: Named, eager: Named, golden: Named, eps: float) -> list[str]:
    """Errors above eager's own and a few eps; a nearly zero gradient is measured by the scale of the largest one."""
    if not ours.keys() == eager.keys() == golden.keys():
        return [f"other results: {sorted(ours)}, {sorted(eager)}, {sorted(golden)}"]
    largest = max((size(g) for n, g in golden.items() if n.startswith("grad")), default=0.0)
    outputs = max((size(g) for n, g in golden.items() if n.startswith("out")), default=0.0)
    found = []
    for name, truth in golden.items():
        if ours[name].shape != truth.shape or ours[name].dtype != eager[name].dtype:
            found.append(f"{name}: {tuple(ours[name].shape)} {ours[name].dtype}, wanted {tuple(truth.shape)}")
            continue
        floor = 1e-2 * largest if name.startswith("grad") else outputs if name == "loss" else 0.0
        unit = max(size(truth), floor) or 1.0
        error, theirs = (distance(t[name], truth) / unit for t in (ours, eager))
        budget = FACTOR * theirs + FEW_EPS * eps
        if not error <= budget:
            found.append(f"{name}: error {error:.2e}, eager {theirs:.2e}, budget {budget:.2e}")
    return found


def run(family: Family, train: bool, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Run:
    """Compile the family once and compare one call, or one training step, with eager and with eager in float64."""
    if family.library == "timm":
        pytest.importorskip("timm", exc_type=Exception)
    else:
        pytest.importorskip("transformers")
    if family.broken and ("train" if train else "eval") in family.broken_in:
        pytest.skip(family.broken)
    torch._dynamo.reset()
    model, inputs = family.build().train(train), family.inputs()
    wide, wide_inputs = copy.deepcopy(model).double(), in_double(inputs)
    if dtype != torch.float32 and not autocast:
        model = model.to(dtype)
        inputs = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    original = copy.deepcopy(model)
    cast = functools.partial(torch.autocast, "cpu", dtype) if autocast else nullcontext
    with torch._dynamo.config.patch(LIMITS), flash_fx.recording() as reports, cast():
        compiled = torch.compile(model, backend=flash_fx.make_backend("aot_eager"))
        ours = evaluate(family, model, compiled, inputs, train=train)
        eager = evaluate(family, original, original, inputs, train=train)
    eps = torch.finfo(dtype).eps
    if family.double:
        golden = evaluate(family, wide, wide, wide_inputs, train=train)
    else:
        golden, eps = eager, 16 * eps
    sites = [s for r in reports for s in r.sites]
    left = Counter(str(s.reason) for s in sites if s.status == "left")
    wrong = [] if family.random and train else problems(ours, eager, golden, eps)
    torch._dynamo.reset()
    return Run(wrong, len(sites) - left.total(), left)


# *** tests ***

QUICK = ("gemma2", "bloom", "xlnet", "swin", "deberta-v2")
HALF = (
    "bert", "gpt2", "gemma2", "t5", "falcon-alibi", "swinv2", "xlnet", "mistral", "wav2vec2-conformer", "whisper", "cohere",
    "mpt", "layoutlm", "deepseek-v3",
)  # fmt: skip


def marks(family: Family) -> Any:
    return pytest.param(family.name, marks=() if family.name in QUICK else pytest.mark.families)


MODES = pytest.mark.parametrize("mode", ["eval", "train"])


def check(family: Family, found: Run, mode: str, *pending: str) -> None:
    """Numbers first; then the sites, unless the row says that some of them are still missed under one of `pending`."""
    assert not found.problems
    fused, left = family.expected(train=mode == "train")
    reached = (found.fused, found.left) == (fused, Counter(left))
    if set(pending) & set(family.pending):
        assert not reached, f"all sites are fused now: take {pending} out of the row's `pending`"
        pytest.xfail(f"{fused} attentions can be fused, {found.fused} are")
    assert reached, f"{found.fused} fused, left {dict(found.left)}; wanted {fused}, {left}"


@pytest.mark.parametrize("name", [marks(f) for f in FAMILIES])
@MODES
def test_family(name: str, mode: str) -> None:
    family = BY_NAME[name]
    check(family, run(family, mode == "train"), mode, mode)


@pytest.mark.families
@pytest.mark.parametrize("name", HALF)
@MODES
def test_bfloat16(name: str, mode: str) -> None:
    family = BY_NAME[name]
    check(family, run(family, mode == "train", torch.bfloat16), mode, mode)


@pytest.mark.families
@pytest.mark.parametrize("name", HALF)
@MODES
def test_autocast(name: str, mode: str) -> None:
    family = BY_NAME[name]
    check(family, run(family, mode == "train", torch.bfloat16, autocast=True), mode, mode, "autocast")


def test_the_numbers_can_fail() -> None:
    eager = {"out0": torch.ones(4), "grad a": torch.ones(4), "loss": torch.ones(())}
    golden = {n: t.double() for n, t in eager.items()}
    assert not problems(eager, eager, golden, 1e-7)
    for name in eager:
        wrong = eager | {name: eager[name] * (1 + 1e-6)}
        assert [p.split(":")[0] for p in problems(wrong, eager, golden, 1e-7)] == [name]
    assert problems(eager | {"out0": torch.full((4,), torch.nan)}, eager, golden, 1e-7)
