"""`flash-fx demo`: one model through eager, stock torch.compile and flash_fx, in training and inference.

Prints what was found and fused, errors against a float64 eager copy, then time and peak memory. Needs no network.
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
from .demo_models import FULL, SMALL, DemoModel, Size, build, has_transformers
from .explaining import explain
from .measure import median_seconds, peak_bytes, relative_errors
from .report import Report, recording

RUNS = ("eager", "stock", "flash_fx")  # stock is torch.compile with its default backend
CUDA_LENGTHS, CPU_LENGTHS = (1024, 4096, 8192), (512,)
CUDA_TOKENS, CPU_TOKENS = 8192, 1024  # of one step; short sequences come in larger batches
EXPLAINED = 1024  # longest input of explain, which runs the model once in eager
Errors = dict[str, tuple[float, float]]  # "logits" and "gradients": greatest and mean relative error


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

    def ids(self, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, self.size.vocab, (self.batch(length), length), generator=generator).to(self.device)


@dataclass(frozen=True)
class Result:
    """One row of the last table; `failure` in place of numbers."""

    seconds: float = 0.0
    bytes: int | None = None
    failure: str = ""


def run(
    model: str | None = None, lengths: Sequence[int] | None = None, dtype: str | None = None, steps: int | None = None
) -> int:
    """Run the demo and print to the terminal. Returns the exit code: 1 if nothing was fused."""
    console = Console(highlight=False)
    setting = _setting(lengths, dtype, steps)
    with _working(console, "building the model"):
        _quiet_transformers()
        demo = build(model, setting.size)
        demo.model.to(setting.device, setting.dtype)
    _print_title(console, demo, setting)
    report = _found(console, demo, setting)
    _print_report(console, report)
    golden = _golden(console, demo, setting)
    for length in setting.lengths:  # a graph for each length: every compiler at its best
        errors, results = _measure_length(console, demo, setting, length, golden)
        _print_speed(console, results, setting, length)
        _print_errors(console, errors, setting)
    return 0 if report.fused else 1


def _setting(lengths: Sequence[int] | None, dtype: str | None, steps: int | None) -> Setting:
    cuda = torch.cuda.is_available()
    size = FULL if cuda else SMALL
    chosen = tuple(lengths or (CUDA_LENGTHS if cuda else CPU_LENGTHS))
    size = Size(size.layers, size.width, size.heads, size.vocab, longest=max(chosen))
    return Setting(
        device=torch.device("cuda" if cuda else "cpu"),
        dtype=getattr(torch, dtype or ("bfloat16" if cuda else "float32")),
        lengths=chosen,
        size=size,
        tokens=CUDA_TOKENS if cuda else CPU_TOKENS,
        steps=steps or (20 if cuda else 10),
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
    ids = setting.ids(min(setting.lengths[0], EXPLAINED))[:2]
    with _working(console, "looking for attention (flash_fx.explain)"):
        return explain(partial(demo.loss, demo.model), ids)


def _measure_length(
    console: Console, demo: DemoModel, setting: Setting, length: int, golden: dict[str, dict[str, Tensor]]
) -> tuple[dict[str, Errors], dict[tuple[str, str], Result]]:
    """Errors by run (at the first length alone), and results by (run, kind of step)."""
    errors: dict[str, Errors] = {}
    results: dict[tuple[str, str], Result] = {}
    ids = setting.ids(length)
    for name in RUNS:
        _forget_compiled()
        model = _compiled(name, demo)
        for kind in STEPS:
            with _compiling(console, name, f"{kind}, {ids.shape[0]} x {length} tokens"):
                results[name, kind] = _measure(demo, model, ids, kind, setting)
        if golden and name != "stock" and length == setting.lengths[0]:
            errors[name] = _errors(demo, model, ids, golden)
    _forget_compiled()
    return errors, results


def _golden(console: Console, demo: DemoModel, setting: Setting) -> dict[str, dict[str, Tensor]]:
    """The truth for the first length, empty where a float64 copy does not fit."""
    ids = setting.ids(setting.lengths[0])
    with _working(console, f"float64 eager copy, {ids.shape[0]} x {ids.shape[1]} tokens") as notes:
        try:
            twin = copy.deepcopy(demo.model).double()
            return _outputs(DemoModel(demo.title, twin, demo.logits, demo.loss), twin, ids)
        except torch.OutOfMemoryError:
            notes.append("out of memory, so errors are not measured; try --seq 1024")
            return {}


def _errors(demo: DemoModel, model: Any, ids: Tensor, golden: dict[str, dict[str, Tensor]]) -> Errors:
    outputs = _outputs(demo, model, ids)
    return {kind: relative_errors(outputs[kind], truth) for kind, truth in golden.items()}


def _outputs(demo: DemoModel, model: Any, ids: Tensor) -> dict[str, dict[str, Tensor]]:
    """Logits and gradients of the steps that are also timed, by name."""
    demo.model.train()
    demo.model.zero_grad(set_to_none=True)
    demo.loss(model, ids).backward()
    grads = {name: p.grad.clone() for name, p in demo.model.named_parameters() if p.grad is not None}
    demo.model.zero_grad(set_to_none=True)
    demo.model.eval()
    with torch.no_grad():
        return {"logits": {"logits": demo.logits(model, ids)}, "gradients": grads}


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
    console.print(
        f"{s.layers} layers, width {s.width}, {s.heads} heads, vocabulary {s.vocab}, random weights, dropout off"
    )
    console.print(f"{_name(setting.dtype)}, {place}, torch {torch.__version__}\n")


def _print_report(console: Console, report: Report) -> None:
    """The explain text with equal sites counted."""
    console.print(f"found: {report.fused} fused, {report.left} left", style="bold")
    for text, count in Counter(str(s) for s in report.sites).items():
        console.print(f"{count} x {text}", soft_wrap=True, markup=False)
    console.print()


def _print_errors(console: Console, errors: dict[str, Errors], setting: Setting) -> None:
    if len(errors) < 2:
        return
    length = setting.lengths[0]
    table = Table("", "flash_fx max", "flash_fx mean", "eager max", "eager mean", box=box.ASCII2)
    for kind in errors["eager"]:
        table.add_row(kind, *(f"{e:.2e}" for e in (*errors["flash_fx"][kind], *errors["eager"][kind])))
    console.print(
        f"\nrelative error against a float64 eager copy, {setting.batch(length)} x {length} tokens", style="bold"
    )
    console.print("gradients: the worst parameter", style="dim")
    console.print(table)


def _print_speed(console: Console, results: dict[tuple[str, str], Result], setting: Setting, length: int) -> None:
    table = Table("step", "run", "time", "memory", "ratio", "ratio", box=box.ASCII2)
    for kind in STEPS:
        for name in RUNS:
            cells = _cells(results[name, kind], results["eager", kind])
            table.add_row(kind if name == RUNS[0] else "", name, *cells, end_section=name == RUNS[-1])
    console.print(f"\n{setting.batch(length)} x {length} tokens, median of {setting.steps} steps", style="bold")
    where = ", as growth of the resident set" if setting.device.type == "cpu" else ""
    console.print("stock is plain torch.compile; ratios are to eager", style="dim")
    console.print(f"memory: what one step needs on top of weights and inputs{where}", style="dim")
    console.print(table)


def _cells(result: Result, eager: Result) -> tuple[str, str, str, str]:
    if result.failure:
        return result.failure, "-", "-", "-"
    memory = "not measured" if result.bytes is None else f"{result.bytes / 2**20:,.0f} MiB"
    time_ratio = "-" if eager.failure else f"{result.seconds / eager.seconds:.2f}"
    memory_ratio = f"{result.bytes / eager.bytes:.2f}" if result.bytes is not None and eager.bytes else "-"
    return f"{result.seconds * 1e3:,.1f} ms", memory, time_ratio, memory_ratio


@contextlib.contextmanager
def _compiling(console: Console, name: str, what: str) -> Iterator[None]:
    """Progress of one run; for flash_fx also how many sites the compiled graphs had fused."""
    with recording() as reports, _working(console, f"{name}: {what}") as note:
        yield
        if name == "flash_fx" and reports:
            note.append(f"{sum(r.fused for r in reports)} sites fused")


@contextlib.contextmanager
def _working(console: Console, what: str) -> Iterator[list[str]]:
    """A spinner with the time so far, then one line that stays. Texts put into the list go into that line."""
    columns = SpinnerColumn(spinner_name="line"), TextColumn("{task.description}"), TimeElapsedColumn()
    notes: list[str] = []
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield notes
    console.print(f"  {what}: {'; '.join([f'{time.perf_counter() - start:.1f} s', *notes])}", style="dim")


def _quiet_transformers() -> None:
    """Its advice on configurations would break the display."""
    if has_transformers():
        import transformers

        transformers.logging.set_verbosity_error()


def _forget_compiled() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
