"""`flash-fx bench`: how time and memory of one attention grow with its length, ours and its peers.

A training step of causal attention, legacy code with `masked_fill`: forward and backward, medians; memory is what a step
needs beyond its inputs. A peer that runs out of memory at one length is not asked for longer ones.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backend
from .errors import TargetError
from .measure import median_seconds, peak_bytes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LENGTHS = {"cuda": [512 * 4**i for i in range(5)], "cpu": [128, 256, 512, 1024]}
LABELS = {"ms": "time of a training step, ms", "mib": "memory of a training step, MiB"}


@dataclass(frozen=True)
class Shape:
    """[batch, heads, length, head_dim] of query, key and value."""

    batch: int = 1
    heads: int = 16
    head_dim: int = 64


@dataclass(frozen=True)
class Point:
    """One peer at one length; `mib` is None where memory cannot be measured."""

    peer: str
    length: int
    ms: float
    mib: float | None


def legacy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is compiled: [B, H, S, D] each."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex(length: int, device: torch.device) -> Attention:
    """FlexAttention with its block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block)  # type: ignore[return-value]


def peers(length: int, device: torch.device) -> dict[str, Callable[[], Attention]]:
    """How each peer is made: by name, in the order of the table."""
    found: dict[str, Callable[[], Attention]] = {
        "flash_fx": lambda: torch.compile(legacy, backend=backend.flash_fx, dynamic=False),
        "scaled_dot_product_attention": lambda: sdpa,
        "torch.compile": lambda: torch.compile(legacy, dynamic=False),
        "eager": lambda: legacy,
    }
    return {**found, "FlexAttention": lambda: flex(length, device)} if device.type == "cuda" else found


def measure(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype, shape: Shape = Shape(), repeats: int = 5
) -> Iterator[Point]:
    """Every peer at every length, shortest first."""
    left = list(peers(1, device))
    for length in sorted(lengths):
        made = peers(length, device)
        for peer in list(left):
            torch._dynamo.reset()
            point = _point(peer, made[peer], length, device, dtype, shape, repeats)
            if point is None:
                left.remove(peer)
            else:
                yield point


def _point(
    peer: str, make: Callable[[], Attention], length: int, device: torch.device, dtype: torch.dtype, shape: Shape, repeats: int
) -> Point | None:  # fmt: skip
    """None where memory is too small."""
    sizes = (shape.batch, shape.heads, length, shape.head_dim)
    q, k, v = (torch.randn(sizes, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.ones_like(q)
    try:
        attention = make()

        def step() -> None:
            torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

        step()
        peak = peak_bytes(step, device)
        return Point(peer, length, median_seconds(step, repeats, device) * 1e3, None if peak is None else peak / 2**20)
    except torch.OutOfMemoryError:
        return None


def write_csv(points: Sequence[Point], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(p) for p in points)


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Time and memory against length, both axes logarithmic. Raises TargetError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise TargetError("--plot needs matplotlib: pip install matplotlib") from e
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(1, 2), LABELS.items(), strict=True):
        for peer in dict.fromkeys(p.peer for p in points):
            known = [(p.length, getattr(p, field)) for p in points if p.peer == peer and getattr(p, field) is not None]
            axes.loglog(*zip(*known), marker="o", label=peer) if known else None
        axes.set_xlabel("length")
        axes.set_ylabel(label)
        axes.set_xticks(sorted({p.length for p in points}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def run(
    seq: Sequence[int] | None, dtype: str | None, plot_to: Path | None, csv_to: Path | None, repeats: int = 5
) -> int:
    """The command: measures, prints a row for each point, writes what is asked for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = Shape() if device.type == "cuda" else Shape(heads=4)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sizes = f"batch {shape.batch}, {shape.heads} heads of {shape.head_dim}, {str(kind).removeprefix('torch.')}"
    title = f"causal attention, {sizes}, {where}, torch {torch.__version__}"
    print(title)
    points: list[Point] = []
    for p in measure(seq or LENGTHS[device.type], device, kind, shape, repeats):
        points.append(p)
        memory = "" if p.mib is None else f"{p.mib:12.1f} MiB"
        print(f"{p.length:8d}  {p.peer:30s} {p.ms:12.3f} ms {memory}", flush=True)
    if csv_to is not None:
        write_csv(points, csv_to)
    if plot_to is not None:
        plot(points, plot_to, title)
        print(f"plot: {plot_to}")
    return 0
