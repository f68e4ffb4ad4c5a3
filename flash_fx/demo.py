"""`flash-fx demo`: one model through eager, stock torch.compile and flash_fx, in training and inference.

Prints what was found and fused, errors against a float64 eager copy, then time and peak memory. Works without a network.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from .backend import flash_fx
from .demo_models import FULL, SMALL, DemoModel, Size, build
from .errors import TargetError
from .explaining import explain
from .measure import median_seconds, peak_bytes, relative_errors
from .report import Report, recording

RUNS = ("eager", "torch.compile", "flash_fx")
CUDA_LENGTHS, CPU_LENGTHS = (1024, 2048, 4096, 8192), (256, 512)
CUDA_TOKENS, CPU_TOKENS = 8192, 1024  # of one step; short sequences come in larger batches
TINY = 64  # batch 1 of this length is what the compilers see first


@dataclass(frozen=True)
class Setting:
    """Where and how the demo runs."""

    device: torch.device
    dtype: torch.dtype
    lengths: tuple[int, ...]
    size: Size
    tokens: int
    steps: int

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)

    def ids(self, length: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, self.size.vocab, (batch, length), generator=generator).to(self.device)


@dataclass(frozen=True)
class Result:
    """One row of the last table; `failure` in place of numbers."""

    seconds: float = 0.0
    bytes: int | None = None
    failure: str = ""


def run(model: str | None = None, lengths: Sequence[int] | None = None, dtype: str | None = None, steps: int | None = None) -> int:
    """Run the demo and print to the terminal. Returns the exit code: 1 if nothing was fused."""
    console = Console(highlight=False)
    setting = _setting(lengths, dtype, steps)
    with _working(console, "building the model"):
        demo = build(model, setting.size)
        demo.model.to(setting.device, setting.dtype)
    _print_title(console, demo, setting)
    report = _found(console, demo, setting)
    _print_report(console, report)
    _print_errors(console, demo, setting)
    _print_speed(console, demo, setting)
    return 0 if report.fused else 1


def _setting(lengths: Sequence[int] | None, dtype: str | None, steps: int | None) -> Setting:
    cuda = torch.cuda.is_available()
    size = FULL if cuda else SMALL
    chosen = tuple(lengths or (CUDA_LENGTHS if cuda else CPU_LENGTHS))
    size = Size(size.layers, size.width, size.heads, size.vocab, longest=max(*chosen, TINY))
    return Setting(
        device=torch.device("cuda" if cuda else "cpu"),
        dtype=getattr(torch, dtype or ("bfloat16" if cuda else "float32")),
        lengths=chosen,
        size=size,
        tokens=CUDA_TOKENS if cuda else CPU_TOKENS,
        steps=steps or (20 if cuda else 5),
    )


# *** what is run ***


def _compiled(name: str, demo: DemoModel) -> Any:
    """The model as eager, stock torch.compile or flash_fx run it."""
    if name == "eager":
        return demo.model
    return torch.compile(demo.model, backend=flash_fx if name == "flash_fx" else "inductor")


def _train_step(demo: DemoModel, model: Any, ids: Tensor) -> None:
    demo.model.zero_grad(set_to_none=True)
    demo.loss(model, ids).backward()


def _infer_step(demo: DemoModel, model: Any, ids: Tensor) -> None:
    with torch.no_grad():
        demo.logits(model, ids)


STEPS: dict[str, Callable] = {"training": _train_step, "inference": _infer_step}


def _found(console: Console, demo: DemoModel, setting: Setting) -> Report:
    demo.model.train()
    with _working(console, "looking for attention (flash_fx.explain)"):
        return explain(partial(demo.loss, demo.model), setting.ids(min(setting.lengths), 1))


def _errors(demo: DemoModel, model: Any, ids: Tensor) -> dict[str, dict[str, Tensor]]:
    """Logits and gradients of one training step, by name."""
    demo.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        logits = demo.logits(model, ids)
    demo.loss(model, ids).backward()
    grads = {name: p.grad.clone() for name, p in demo.model.named_parameters() if p.grad is not None}
    demo.model.zero_grad(set_to_none=True)
    return {"logits": {"logits": logits}, "gradients": grads}


def _measure(demo: DemoModel, model: Any, ids: Tensor, kind: str, setting: Setting) -> Result:
    """Warm up (this compiles), then time and weigh one kind of step."""
    step = partial(STEPS[kind], demo, model, ids)
    demo.model.train(kind == "training")
    try:
        step()
        step()
        seconds = median_seconds(step, setting.steps, setting.device)
        demo.model.zero_grad(set_to_none=True)
        return Result(seconds, peak_bytes(step, setting.device))
    except torch.OutOfMemoryError:
        return Result(failure="out of memory")
    finally:
        demo.model.zero_grad(set_to_none=True)


# *** what is printed ***


def _print_title(console: Console, demo: DemoModel, setting: Setting) -> None:
    s = setting.size
    place = torch.cuda.get_device_name() if setting.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(demo.title)
    console.print(f"{s.layers} layers, width {s.width}, {s.heads} heads, vocabulary {s.vocab}, random weights, dropout off")
    console.print(f"{_name(setting.dtype)}, {place}, torch {torch.__version__}\n")


def _print_report(console: Console, report: Report) -> None:
    """The explain text with equal sites counted."""
    console.print(f"found: {report.fused} fused, {report.left} left", style="bold")
    for text, count in Counter(str(s) for s in report.sites).items():
        console.print(f"{count} x {text}", soft_wrap=True, markup=False)
    console.print()


def _print_errors(console: Console, demo: DemoModel, setting: Setting) -> None:
    length = min(setting.lengths)
    ids = setting.ids(length, 1)
    demo.model.train()
    measured = {}
    for name in ("flash_fx", "eager"):
        with _compiling(console, name, f"errors, {length} tokens"):
            measured[name] = _errors(demo, _compiled(name, demo), ids)
    golden = _golden(demo, ids)
    table = Table("", "flash_fx max", "flash_fx mean", "eager max", "eager mean", box=box.ASCII2)
    for kind, truth in golden.items():
        ours, eager = (relative_errors(measured[name][kind], truth) for name in ("flash_fx", "eager"))
        table.add_row(kind, *(f"{e:.2e}" for e in (*ours, *eager)))
    console.print(f"relative error against a float64 eager copy, 1 x {length} tokens (gradients: worst parameter)", style="bold")
    console.print(table)
    console.print()


def _golden(demo: DemoModel, ids: Tensor) -> dict[str, dict[str, Tensor]]:
    twin = DemoModel(demo.title, copy.deepcopy(demo.model).double(), demo.logits, demo.loss)
    return _errors(twin, twin.model, ids)


def _print_speed(console: Console, demo: DemoModel, setting: Setting) -> None:
    table = Table("step", "tokens", "run", "time", "peak memory", "against eager", box=box.ASCII2)
    for length in setting.lengths:
        ids = setting.ids(length, setting.batch(length))
        for kind in STEPS:
            rows = {}
            for name in RUNS:
                _forget_compiled()
                with _compiling(console, name, f"{kind}, {ids.shape[0]} x {length} tokens"):
                    rows[name] = _measure(demo, _compiled(name, demo), ids, kind, setting)
            for name, result in rows.items():
                first = name == RUNS[0]
                table.add_row(
                    kind if first else "", f"{ids.shape[0]} x {length}" if first else "", name,
                    *_cells(result, rows["eager"]), end_section=name == RUNS[-1],
                )  # fmt: skip
    _forget_compiled()
    console.print(f"median of {setting.steps} steps; memory of one step on top of weights and inputs", style="bold")
    console.print(table)


def _cells(result: Result, eager: Result) -> tuple[str, str, str]:
    if result.failure:
        return result.failure, "-", "-"
    memory = "not measured" if result.bytes is None else f"{result.bytes / 2**20:,.0f} MiB"
    if eager.failure or result is eager:
        return f"{result.seconds * 1e3:,.1f} ms", memory, "-"
    ratio = f"{eager.seconds / result.seconds:.2f}x as fast"
    if result.bytes and eager.bytes:
        ratio += f", {result.bytes / eager.bytes:.2f}x memory"
    return f"{result.seconds * 1e3:,.1f} ms", memory, ratio


@contextlib.contextmanager
def _compiling(console: Console, name: str, what: str) -> Iterator[None]:
    """Progress of one run; for flash_fx also how many sites the compiled graphs had fused."""
    with recording() as reports, _working(console, f"{name}: {what}") as note:
        yield
        if name == "flash_fx":
            note.append(f"{sum(r.fused for r in reports)} sites fused")


@contextlib.contextmanager
def _working(console: Console, what: str) -> Iterator[list[str]]:
    """A spinner with the time so far, then one line that stays. Texts put into the list go into that line."""
    columns = SpinnerColumn(spinner_name="line"), TextColumn("{task.description}"), TimeElapsedColumn()
    notes: list[str] = []
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield notes
    console.print(f"  {what}: {'; '.join([f'{time.perf_counter() - start:.1f} s', *notes])}", style="dim")


def _forget_compiled() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["TargetError", "run"]
