"""Kernels for NVIDIA's profilers: what they read and write in device memory, and whether they stay inside their tensors.

    ncu --clock-control none --metrics dram__bytes_read.sum,dram__bytes_write.sum -k regex:flash_fx --csv \
        python benchmarks/traffic.py > ncu.csv
    compute-sanitizer --tool memcheck --kernel-regex kns=flash_fx python benchmarks/traffic.py --small
    compute-sanitizer --tool racecheck --kernel-regex kns=flash_fx python benchmarks/traffic.py --small

Without --small: 4 x 16 x 4096 and 1 x 16 x 16384 queries and keys of 64 channels, bf16, full and causal. The counters are
those of the whole device, so nothing else may run on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_fx.kernels import launch
from flash_fx.score.text import parse

PLAIN, CAUSAL = "score = score * 0.125", "score = score * 0.125; keep = kv_idx <= q_idx"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def step(
    text: str, b: int, h: int, hk: int, m: int, n: int, d: int,
    captures: Sequence[Tensor] = (), dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Forward and every gradient, once."""
    program = parse(text)
    q, k, v, grad = (randn(b, heads, s, d, dtype=dtype) for heads, s in ((h, m), (hk, n), (hk, n), (h, m)))
    seed = torch.tensor([3, 4], device="cuda") if program.drop else None
    out, lse = launch.forward(q, k, v, captures, (), seed, program)
    launch.backward(grad, q, k, v, captures, (), seed, out, lse, program, [True] * (3 + len(captures)))
    torch.cuda.synchronize()


def large() -> None:
    for text in (PLAIN, CAUSAL):
        for s, b in ((4096, 4), (16384, 1)):
            step(text, b, 16, 16, s, s, 64)


def small() -> None:
    """Ragged edges everywhere: a bias with a gradient, a mask and dropout; windows of one tile; few queries; float32."""
    biased = "score = score * 0.125 + c0[h, q_idx, kv_idx]"
    step(f"{biased}; keep = kv_idx <= q_idx + 140; drop = 0.1", 2, 2, 2, 200, 333, 72, [randn(2, 200, 333)])
    step(CAUSAL, 1, 4, 2, 333, 333, 64)
    step(biased, 6, 2, 2, 49, 49, 32, [randn(2, 49, 49)])
    step(PLAIN, 2, 8, 2, 1, 1000, 64)
    step(PLAIN, 1, 2, 2, 70, 70, 40, dtype=torch.float32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--small", action="store_true")
    small() if parser.parse_args().small else large()
