"""Programs of public bug reports against attention fusion in other projects, and how one of them is checked.

`@report(7, ...)` adds a program under the number of its report; `tests/test_field_reports.py` lists the reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numerics
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from zoo import T, floats

import flash_fx

Named = dict[str, Tensor]
B, H, L, D = 2, 4, 8, 16
QKV = floats(*((B, H, L, D),) * 3)
AOT = flash_fx.make_backend(inner="aot_eager")


@dataclass(frozen=True)
class Program:
    """`fused` sites are replaced, and one is left for every reason in `left`; `wide` is the float64 truth of `fn`."""

    name: str
    fn: Callable
    tensors: tuple[T | Callable[[], Tensor], ...]
    fused: int = 1
    left: tuple[str, ...] = ()
    wide: Callable | None = None
    rounding: torch.dtype | None = None
    empty_rows: bool = False  # gradients count where eager's are finite: elsewhere ours may be finite too
    settings: dict[str, Any] = field(default_factory=dict)  # of torch.compile

    def arguments(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(17)
        return tuple(t.make(generator) if isinstance(t, T) else t() for t in self.tensors)


PROGRAMS: list[Program] = []


def report(number: int, *tensors: Any, name: str = "", left: Sequence[str] = (), **fields: Any):
    """Add the function below under a report; `left` without `fused` means that nothing is fused."""

    def add(fn: Callable) -> Callable:
        fused = fields.pop("fused", 0 if left else 1)
        title = f"report_{number:02}_{name or fn.__name__}"
        PROGRAMS.append(Program(title, fn, tensors or QKV, fused, tuple(left), **fields))
        return fn

    return add


def number_of(name: str) -> int | None:
    """7 for `report_07_bias` and `test_report_07_bias`."""
    found = re.match(r"(?:test_)?report_(\d\d)_", name)
    return int(found[1]) if found else None


def sm(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


# *** checking ***


def widened(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a.clone() for a in args
    )


def fresh(args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies, as a program may write into its arguments; with the strides of the originals."""
    return tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)


def run(call: Callable, args: Sequence[Tensor], *, train: bool = True) -> Named:
    """Outputs, arguments without a gradient as they are afterwards, and every gradient in one fixed direction."""
    with torch.set_grad_enabled(train):
        outs = [o for o in pytree.tree_leaves(call(*args)) if isinstance(o, Tensor)]
    named = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    named |= {f"argument{i}": a for i, a in enumerate(args) if not a.requires_grad}
    loss = torch.zeros((), dtype=torch.float64)
    for i, o in enumerate(outs):
        generator = torch.Generator().manual_seed(i)
        loss = loss + (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
    leaves = [a for a in args if a.requires_grad]
    if loss.requires_grad and leaves:
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        named |= {f"grad{i}": torch.zeros_like(a) if g is None else g for i, (g, a) in enumerate(zip(grads, leaves))}
    return named


def scales(golden: Named) -> dict[str, float]:
    """What is summed over more terms than the largest gradient has elements rounds as those terms do."""
    grads = {n: g for n, g in golden.items() if n.startswith("grad") and g.numel()}
    terms = max((g.numel() for g in grads.values()), default=0)
    largest = max((g[g.isfinite()].abs().max().item() for g in grads.values() if g.isfinite().any()), default=0.0)
    return {n: largest * (terms / g.numel()) ** 0.5 for n, g in grads.items()}


def compare(ours: Named, eager: Named, golden: Named, rounding: torch.dtype | None = None) -> None:
    """NaN at the same places as the truth, errors within eager's own plus a few roundings; other dtypes exactly."""
    assert ours.keys() == eager.keys() == golden.keys()
    exact = [n for n, t in eager.items() if not t.is_floating_point()]
    assert all(torch.equal(ours[n], eager[n]) for n in exact)
    rest = {n: g.double() for n, g in golden.items() if n not in exact}
    numerics.assert_within_budget(ours, eager, rest, rounding, scales(rest))


def _where_finite(named: Named, golden: Named) -> Named:
    """The gradients with 0 where those of the truth are NaN."""
    return {n: t.masked_fill(golden[n].isnan(), 0) if n.startswith("grad") else t for n, t in named.items()}


def check(program: Program, *, train: bool = True, inner: str = "aot_eager") -> None:
    """Verdict, outputs, what is left in the arguments, and gradients."""
    args = program.arguments()
    compiled = torch.compile(program.fn, backend=flash_fx.make_backend(inner=inner), **program.settings)
    with flash_fx.recording() as reports:
        ours = run(compiled, fresh(args), train=train)
    sites = [s for r in reports for s in r.sites]
    verdict = sum(s.status == "fused" for s in sites), tuple(s.reason for s in sites if s.reason)
    assert verdict == (program.fused, program.left), "\n".join(map(str, reports))
    eager = run(program.fn, fresh(args), train=train)
    golden = run(program.wide or program.fn, widened(args), train=train)
    if program.empty_rows:
        ours, eager, golden = (_where_finite(named, golden) for named in (ours, eager, golden))
    compare(ours, eager, golden, program.rounding)
