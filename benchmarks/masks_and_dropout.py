"""What a finite fill and dropout cost on one GPU: causal legacy code, forward and backward, against a fill of -inf.

    python benchmarks/masks_and_dropout.py [--seq 4096] [--dim 64 128]

bf16, 16k tokens a batch, 2048 wide. Times in ms, medians of triton.testing.do_bench. "left padding" fills half of the
keys of every other sequence, so that rows without a key walk the tiles that the causal mask covers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from triton.testing import do_bench

import flash_fx

TOKENS, WIDTH = 16384, 2048
LEAST = torch.finfo(torch.bfloat16).min
Tensors = tuple[torch.Tensor, ...]


def causal(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).tril()


def replaced(fill: float) -> Callable:
    return lambda q, k, v: torch.where(causal(q), q @ k.mT * q.size(-1) ** -0.5, fill).softmax(-1) @ v


def added(fill: float) -> Callable:
    return lambda q, k, v: (
        (q @ k.mT * q.size(-1) ** -0.5 + torch.where(causal(q), 0.0, fill).to(q.dtype)).softmax(-1) @ v
    )


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    real = (
        torch.arange(q.size(-2), device=q.device)
        >= (torch.arange(q.size(0), device=q.device) % 2 * q.size(-2) // 2)[:, None]
    )
    return torch.where(causal(q) & real[:, None, None], q @ k.mT * q.size(-1) ** -0.5, LEAST).softmax(-1) @ v


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.dropout((q @ k.mT * q.size(-1) ** -0.5).softmax(-1), 0.1) @ v


PEERS = {
    "-inf": replaced(-torch.inf), "replaced by -1e9": replaced(-1e9), "replaced by min": replaced(LEAST),
    "added -1e9": added(-1e9), "added min": added(LEAST), "left padding": padded,
    "full": lambda q, k, v: (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v, "full, dropout": dropped,
}  # fmt: skip


def measure(peer: Callable, tensors: Tensors) -> tuple[float, float]:
    torch._dynamo.reset()
    compiled = torch.compile(peer, backend=flash_fx)
    out = compiled(*tensors)
    grad = torch.randn_like(out)
    forward = do_bench(lambda: compiled(*tensors), return_mode="median")
    backward = do_bench(lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True), return_mode="median")
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", type=int, nargs="+", default=[4096])
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args()
    for dim in options.dim:
        for seq in options.seq:
            shape = (max(2, TOKENS // seq), WIDTH // dim, seq, dim)
            tensors = tuple(
                torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
            )
            for name, peer in PEERS.items():
                print(
                    f"D={dim} S={seq} {name:16s} forward {{:7.3f}}  backward {{:7.3f}}".format(*measure(peer, tensors))
                )


if __name__ == "__main__":
    main()
