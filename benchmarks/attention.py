"""Attention on one GPU, peers side by side in one run: medians, forward and backward, peak extra memory.

    python benchmarks/attention.py [--csv FILE] [--only full|causal|host] [--seq 1024 4096 16384] [--dim 64 128]

Peers: legacy code eager, under stock torch.compile and under flash_fx; FlexAttention compiled; SDPA with cuDNN and with
flash attention. bf16, 16k tokens a batch, 2048 wide. Causal legacy code fills with -inf where a `tril` made in forward
is zero. FLOPs: 4 B H S^2 D forward, 2.5 times that backward, halved for causal.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flash_fx

TOKENS, WIDTH = 16384, 2048
COLUMNS = (
    "gpu", "torch", "triton", "date", "peer", "mask", "batch", "heads", "seq", "dim",
    "fwd_ms", "bwd_ms", "fwd_tflops", "bwd_tflops", "extra_mib",
)  # fmt: skip


def legacy_full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return torch.softmax(att, dim=-1) @ v


def legacy_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    t = q.size(-2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    mask = torch.tril(torch.ones(t, t, device=q.device))
    att = att.masked_fill(mask == 0, float("-inf"))
    return torch.softmax(att, dim=-1) @ v


def sdpa(backend: SDPBackend, causal: bool) -> Callable:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def flex(causal: bool, seq: int) -> Callable:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, seq, seq) if causal else None
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def peers(causal: bool, seq: int) -> dict[str, Callable]:
    legacy = legacy_causal if causal else legacy_full
    return {
        "eager": legacy,
        "torch.compile": torch.compile(legacy),
        "flex": flex(causal, seq),
        "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION, causal),
        "flash_fx": torch.compile(legacy, backend=flash_fx),
    }


def measure(call: Callable, batch: int, heads: int, seq: int, dim: int) -> dict[str, float]:
    """Milliseconds forward (no_grad) and backward, MiB above the inputs at the peak of one training step."""
    q, k, v, grad = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    with torch.no_grad():
        call(q, k, v)
        fwd = triton.testing.do_bench(lambda: call(q, k, v), warmup=50, rep=200, return_mode="median")
    for t in (q, k, v):
        t.requires_grad_()
    torch.autograd.grad(call(q, k, v), (q, k, v), grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**20
    del grads
    bwd = triton.testing.do_bench(
        lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), warmup=50, rep=200, return_mode="median"
    )
    return {"fwd_ms": fwd, "bwd_ms": bwd, "extra_mib": extra}


def run(mask: str, seq: int, dim: int, writer: csv.DictWriter, stamp: dict[str, str]) -> dict[str, dict[str, float]]:
    batch, heads = TOKENS // seq, WIDTH // dim
    flops = 4 * batch * heads * seq * seq * dim * (0.5 if mask == "causal" else 1.0)
    results: dict[str, dict[str, float]] = {}
    for peer, call in peers(mask == "causal", seq).items():
        try:
            row = measure(call, batch, heads, seq, dim)
        except torch.OutOfMemoryError:
            row = {}
        results[peer] = row
        full = {
            **stamp, "peer": peer, "mask": mask, "batch": batch, "heads": heads, "seq": seq, "dim": dim,
            **{key: round(value, 4) for key, value in row.items()},
        }  # fmt: skip
        if row:
            full["fwd_tflops"] = round(flops / row["fwd_ms"] / 1e9, 1)
            full["bwd_tflops"] = round(2.5 * flops / row["bwd_ms"] / 1e9, 1)
        writer.writerow(full)
        gc.collect()
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    return results


def host_time(calls: int = 32) -> dict[str, float]:
    """Microseconds of host time per attention call inside compiled code, no_grad: `calls` in a chain, small tensors."""
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = {}
    for peer, one, backend in (
        ("sdpa", torch.nn.functional.scaled_dot_product_attention, "inductor"),
        ("flash_fx", legacy_full, flash_fx),
    ):

        def chain(x: torch.Tensor, one: Callable = one) -> torch.Tensor:
            for _ in range(calls):
                x = one(x, k, v)
            return x

        torch._dynamo.reset()
        compiled = torch.compile(chain, backend=backend)
        with torch.no_grad():
            for _ in range(5):
                compiled(q)
            times = []
            for _ in range(30):
                torch.cuda.synchronize()
                start = time.perf_counter()
                compiled(q)
                times.append(time.perf_counter() - start)
        out[peer] = sorted(times)[len(times) // 2] / calls * 1e6
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/attention.csv"))
    parser.add_argument("--only", choices=("full", "causal", "host"))
    parser.add_argument("--seq", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--dim", type=int, nargs="*", default=[64, 128])
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # the backward is timed alone, again and again
    stamp = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for mask in ("full", "causal"):
            for dim in args.dim if args.only in (None, mask) else ():
                for seq in args.seq:
                    show(mask, seq, dim, run(mask, seq, dim, writer, stamp))
                    file.flush()
    if args.only in (None, "host"):
        print("host us/call:", {k: round(v, 1) for k, v in host_time().items()})


def show(mask: str, seq: int, dim: int, results: dict[str, dict[str, float]]) -> None:
    ours = results["flash_fx"]
    for peer, row in results.items():
        if not row:
            print(f"{mask:6s} S={seq:<6d} D={dim:<4d} {peer:14s} out of memory")
            continue
        ratio = f"{row['fwd_ms'] / ours['fwd_ms']:.2f} {row['bwd_ms'] / ours['bwd_ms']:.2f}" if ours else ""
        print(
            f"{mask:6s} S={seq:<6d} D={dim:<4d} {peer:14s} fwd {row['fwd_ms']:8.3f} bwd {row['bwd_ms']:8.3f} ms "
            f"extra {row['extra_mib']:9.1f} MiB  x ours {ratio}",
            flush=True,
        )


if __name__ == "__main__":
    main()
