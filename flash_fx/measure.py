"""Time, peak memory and errors of the demo's runs.

Times are medians. Memory is what one step needs on top of what is there before it.

On CUDA memory is the allocator's own count. On Linux CPUs it is the growth of the process' resident set (the kernel's
high-water mark, reset before the step); elsewhere it is not measured.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_PROCESS = Path("/proc/self")


def median_seconds(step: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of one step; the caller has warmed it up."""
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        step()
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Most memory one step held beyond what was held before it, None where that cannot be measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        _synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        _synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not hide a step's need
        (_PROCESS / "clear_refs").write_text("5")  # the high-water mark starts again at the present size
        before = _resident("VmRSS")
        step()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AttributeError, KeyError):
        return None


def relative_errors(ours: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> tuple[float, float]:
    """Greatest over all tensors of max |error| / max |golden|, and of mean |error| / mean |golden|."""
    worst, mean = 0.0, 0.0
    for name, truth in golden.items():
        error = (ours[name].double() - truth).abs()
        size = truth.abs()
        worst = max(worst, (error.max() / size.max().clamp_min(1e-30)).item())
        mean = max(mean, (error.mean() / size.mean().clamp_min(1e-30)).item())
    return worst, mean


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(key: str) -> int:
    lines = (line.split() for line in (_PROCESS / "status").read_text().splitlines())
    values = {words[0]: words[1] for words in lines if len(words) == 3}
    return int(values[f"{key}:"]) * 1024
