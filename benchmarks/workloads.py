"""Legacy attention of many kinds on one GPU, every peer in one run: medians, forward and backward, peak extra memory.

    python benchmarks/workloads.py [--csv FILE] [--only TEXT ...] [--peers flash_fx flex ...]

Peers: the legacy code eager, under stock torch.compile and under flash_fx; FlexAttention rewritten by hand (BlockMasks are
made beforehand and not timed); scaled_dot_product_attention where it says the same. bf16 unless a row says otherwise.
Small rows are timed with CUDA graphs, as end to end code would run them; decode rows give bandwidth of K and V.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flash_fx

COLUMNS = (
    "gpu", "torch", "triton", "date", "row", "peer", "fwd_ms", "bwd_ms", "extra_mib", "gb_per_s",
)  # fmt: skip
BF16 = torch.bfloat16
Attention = Callable[..., Tensor]


@dataclass
class Row:
    """`legacy` and each of `others` take the tensors of `shapes`, and `fixed` after them; the last of `fixed` may be trained."""

    name: str
    legacy: Attention
    shapes: Sequence[tuple[int, ...]]
    fixed: Sequence[Tensor] = ()
    others: dict[str, Attention] = field(default_factory=dict)
    backward: bool = True
    graphs: bool = False


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=grad)


# *** legacy code ***


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, dim=-1) @ v


def masked(condition: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *fixed: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    return torch.softmax(scores.masked_fill(~condition(q, *fixed), -torch.inf), dim=-1) @ v


def positions(q: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(q.size(-2), device=q.device)
    return i[:, None], i[None, :]


def causal(q: Tensor) -> Tensor:
    return torch.tril(torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device))


def window(q: Tensor) -> Tensor:
    i, j = positions(q)
    return (j <= i) & (i - j < 256)


def documents(q: Tensor, ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def padding(q: Tensor, real: Tensor) -> Tensor:
    return real[:, None, None, :]


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + bias, dim=-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(q)
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    return torch.softmax(scores + slopes[:, None, None] * (j - i), dim=-1).to(q.dtype) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 / 30) * 30, dim=-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, dim=-1), 0.1) @ v


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeats = q.size(1) // k.size(1)
    return masked(causal, q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Buckets of Raffel et al. (2020), one direction: half of them exact, the rest logarithmic to 128."""
    i, j = positions(q)
    distance = (i - j).clamp(min=0)
    far = 16 + (torch.log(distance.float().clamp(min=1) / 16) / math.log(128 / 16) * 16).long()
    bucket = torch.where(distance < 16, distance, far.clamp(max=31))
    bias = F.embedding(bucket, table).permute(2, 0, 1)[None]
    return torch.softmax(q @ k.transpose(-2, -1) + bias, dim=-1) @ v


def windows(q: Tensor, k: Tensor, v: Tensor, index: Tensor, table: Tensor) -> Tensor:
    n = q.size(-2)
    bias = table[index.view(-1)].view(n, n, -1).permute(2, 0, 1)[None]
    return torch.softmax(q * q.size(-1) ** -0.5 @ k.transpose(-2, -1) + bias, dim=-1) @ v


def window_index(side: int) -> Tensor:
    """Row numbers of a table of (2 side - 1)^2 relative positions in a window, [side^2, side^2]."""
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    apart = at[:, None] - at[None, :] + side - 1
    return (apart[..., 0] * (2 * side - 1) + apart[..., 1]).cuda()


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeats = q.size(1) // k.size(1)
    return plain(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


# *** peers ***


def flex(score_mod: Any = None, block_mask: Any = None, gqa: bool = False) -> Attention:
    compiled = torch.compile(flex_attention)
    return lambda q, k, v, *_: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa)


def flex_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    def add(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[0, h, i, j]

    return flex_attention(q, k, v, score_mod=add)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def cudnn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def with_mask(mask: Tensor) -> Attention:
    return lambda q, k, v, *_: sdpa(q, k, v, mask)


# *** rows ***


def rows() -> Iterator[Row]:
    b, h, s, d = 4, 16, 4096, 64
    qkv = [(b, h, s, d)] * 3
    block = partial(create_block_mask, Q_LEN=s, KV_LEN=s, device="cuda")
    bias = randn(1, h, s, s)
    yield Row("bias fixed", biased, qkv, [bias], {"flex": torch.compile(flex_bias), "sdpa": sdpa})
    trained = randn(1, h, s, s, grad=True)
    yield Row("bias trained", biased, qkv, [trained], {"flex": torch.compile(flex_bias), "sdpa": sdpa})
    del bias, trained
    slopes = torch.tensor([2 ** (-8 / h * (i + 1)) for i in range(h)], device="cuda")
    yield Row("ALiBi", alibi, qkv, [slopes], {"flex": flex(lambda x, b, h, i, j: x + slopes[h] * (j - i))})
    yield Row("softcap 30", softcap, qkv, [], {"flex": flex(lambda x, b, h, i, j: torch.tanh(x / 30) * 30)})
    real = torch.arange(s, device="cuda") < torch.tensor([[4096], [3072], [2048], [2304]], device="cuda")
    yield Row(
        "key padding", partial(masked, padding), qkv, [real],
        {"flex": flex(block_mask=block(lambda b, h, i, j: real[b, j], B=b, H=None)), "sdpa": with_mask(real[:, None, None])},
    )  # fmt: skip
    yield Row(
        "window 256", partial(masked, window), qkv, [],
        {
            "flex": flex(block_mask=block(lambda b, h, i, j: (j <= i) & (i - j < 256), B=None, H=None)),
            "sdpa": with_mask(window(torch.empty(s, 1, device="cuda"))),
        },
    )  # fmt: skip
    ids = (torch.arange(s, device="cuda") // 512).expand(b, s).contiguous()
    yield Row(
        "documents of 512", partial(masked, documents), qkv, [ids],
        {
            "flex": flex(block_mask=block(lambda b, h, i, j: ids[b, i] == ids[b, j], B=b, H=None)),
            "sdpa": with_mask(documents(None, ids)),  # type: ignore[arg-type]
        },
    )  # fmt: skip
    yield Row("dropout 0.1", dropped, qkv, [], {"sdpa": partial(sdpa, dropout_p=0.1)})
    yield Row("fp32 softmax", upcast, qkv)
    wide = block(lambda b, h, i, j: j <= i, B=None, H=None)
    yield Row(
        "GQA 32/8 causal D128", grouped, [(b, 32, s, 128), (b, 8, s, 128), (b, 8, s, 128)], [],
        {"flex": flex(block_mask=wide, gqa=True), "cudnn": partial(cudnn, is_causal=True, enable_gqa=True)},
    )  # fmt: skip
    yield Row("plain D128", plain, [(b, h, s, 128)] * 3, [], {"flex": flex(), "cudnn": cudnn})
    yield Row("plain D64", plain, [(b, 32, s, 64)] * 3, [], {"flex": flex(), "cudnn": cudnn})
    for n in (4096, 16384, 65536):
        shapes = [(8, 32, 1, 128), (8, 8, n, 128), (8, 8, n, 128)]
        others = {"flex": flex(gqa=True), "sdpa": partial(sdpa, enable_gqa=True)}
        yield Row(f"decode {n}", decode, shapes, [], others, backward=False, graphs=True)
    yield Row("T5 buckets trained", t5, qkv, [randn(32, h, grad=True)])
    table = randn(169, 8, grad=True)
    yield Row("Swin windows", windows, [(1024, 8, 49, 32)] * 3, [window_index(7), table], graphs=True)
    for length, batch, heads, dim in SMALL:
        yield Row(f"small {length} D{dim}", plain, [(batch, heads, length, dim)] * 3, [], {"sdpa": sdpa}, graphs=True)


# length, batch, heads, head_dim: windows, images, short texts; about 16k tokens and 12 heads
SMALL = (
    (16, 1024, 12, 64), (49, 512, 8, 32), (49, 64, 32, 32), (64, 256, 12, 64), (64, 256, 12, 32),
    (128, 128, 12, 64), (197, 64, 12, 64), (256, 64, 12, 64), (256, 32, 16, 128),
)  # fmt: skip


# *** measurement ***


def compile_only(row: Row, call: Attention) -> dict[str, float]:
    """One call of everything that is timed, to fill the compile caches."""
    tensors = [randn(*shape) for shape in row.shapes]
    with torch.no_grad():
        call(*tensors, *row.fixed)
    if row.backward:
        leaves = [t.requires_grad_() for t in tensors] + [t for t in row.fixed if t.requires_grad]
        torch.autograd.grad(call(*tensors, *row.fixed).sum(), leaves)
    return {}


def measure(row: Row, call: Attention) -> dict[str, float]:
    """Milliseconds forward (no_grad) and backward; MiB above the inputs at the peak of one training step."""
    tensors = [randn(*shape) for shape in row.shapes]
    bench = partial(triton.testing.do_bench, warmup=30, rep=120, return_mode="median")
    if row.graphs:
        bench = partial(triton.testing.do_bench_cudagraph, rep=60, return_mode="median")
    with torch.no_grad():
        call(*tensors, *row.fixed)
        found = {"fwd_ms": bench(lambda: call(*tensors, *row.fixed))}
    if not row.backward:
        read = sum(t.numel() * t.element_size() for t in tensors[1:])
        return {**found, "gb_per_s": read / found["fwd_ms"] / 1e6}
    leaves = [t.requires_grad_() for t in tensors] + [t for t in row.fixed if t.requires_grad]
    grad = torch.randn_like(call(*tensors, *row.fixed))
    torch.autograd.grad(call(*tensors, *row.fixed), leaves, grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*tensors, *row.fixed)
    grads = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    torch.cuda.synchronize()
    found["extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    del grads
    if row.graphs:  # a graph holds both: its forward is taken off again
        del out

        def step() -> None:
            torch.autograd.grad(call(*tensors, *row.fixed), leaves, grad)

        found["bwd_ms"] = bench(step) - found["fwd_ms"]
    else:
        found["bwd_ms"] = bench(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    return found


def peers(row: Row, wanted: Sequence[str]) -> dict[str, Attention]:
    every = {
        "flash_fx": torch.compile(row.legacy, backend=flash_fx), "torch.compile": torch.compile(row.legacy),
        **row.others, "eager": row.legacy,
    }  # fmt: skip
    if "cudnn" in row.others:
        every["flash_fx any order"] = torch.compile(row.legacy, backend=flash_fx.make_backend(deterministic=False))
    return {name: call for name, call in every.items() if not wanted or name in wanted}


def show(row: Row, peer: str, found: dict[str, float], ours: dict[str, float]) -> None:
    ratios = " ".join(f"{found[k] / ours[k]:5.2f}" for k in ("fwd_ms", "bwd_ms") if ours.get(k) and k in found)
    numbers = "  ".join(f"{k} {v:9.3f}" for k, v in found.items())
    print(f"{row.name:22s} {peer:14s} {numbers}   x ours {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/workloads.csv"))
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name holds one of these")
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the caches, so that a second run starts faster"
    )
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # the backward is timed alone, again and again
    stamp = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows():
            if not options.only or any(text in row.name for text in options.only):
                run(row, options.peers, writer, stamp, compile_only if options.compile_only else measure)
                file.flush()


def run(row: Row, wanted: Sequence[str], writer: csv.DictWriter, stamp: dict[str, str], measure: Callable) -> None:
    torch._dynamo.reset()
    ours: dict[str, float] = {}
    for name, call in peers(row, wanted).items():
        try:
            found = measure(row, call)
        except torch.OutOfMemoryError:
            found = {"fwd_ms": math.nan}
        ours = ours or found
        show(row, name, found, ours)
        writer.writerow({**stamp, "row": row.name, "peer": name, **{k: round(v, 4) for k, v in found.items()}})
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
