"""Whole models on one GPU: a training step and inference, in every way a user could run them.

    python benchmarks/models.py [--csv FILE] [--only gpt2 swin ...]

transformers models with random weights, bf16: eager attention run as it is, under stock torch.compile and under flash_fx,
and the model's own scaled_dot_product_attention under stock torch.compile. Times are medians; memory is the peak of a
training step; "compile" is the time of the first training step. The longest sequences are measured by the demo.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor, nn

import flash_fx

COLUMNS = (
    "gpu", "torch", "triton", "transformers", "date", "model", "variant",
    "train_ms", "train_gib", "infer_ms", "compile_s",
)  # fmt: skip
SEQUENCE = 2048


@dataclass
class Case:
    """`build` makes the model for an attention implementation, `inputs` its keyword arguments."""

    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def ids(batch: int, vocabulary: int, padded: bool = False, labels: bool = True) -> dict[str, Tensor]:
    found = {"input_ids": torch.randint(0, vocabulary, (batch, SEQUENCE), device="cuda")}
    if padded:
        lengths = torch.linspace(SEQUENCE // 2, SEQUENCE, batch, device="cuda").long()
        found["attention_mask"] = (torch.arange(SEQUENCE, device="cuda") < lengths[:, None]).long()
    return {**found, "labels": found["input_ids"]} if labels else found


def pixels(batch: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16),
        "labels": torch.randint(0, 1000, (batch,), device="cuda"),
    }


def model(name: str, kind: str, **sizes: Any) -> Callable[[str], nn.Module]:
    def build(attention: str) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**sizes)
        config.use_cache = False
        return getattr(transformers, f"{name}{kind}")._from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )

    return build


BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA_1B = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192,
}  # fmt: skip
SWIN_B = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "num_labels": 1000}
CASES = {
    "gpt2": Case(model("GPT2", "LMHeadModel", n_positions=SEQUENCE), lambda: ids(8, 50257)),
    "bert-large": Case(
        model("Bert", "ForMaskedLM", **BERT_LARGE, max_position_embeddings=SEQUENCE), lambda: ids(4, 30000, padded=True)
    ),
    "llama-1b": Case(model("Llama", "ForCausalLM", **LLAMA_1B), lambda: ids(4, 32000)),
    "swin-b": Case(model("Swin", "ForImageClassification", **SWIN_B), lambda: pixels(32)),
    "vit-b": Case(model("ViT", "ForImageClassification", num_labels=1000), lambda: pixels(64)),
    "t5-base": Case(
        model(
            "T5", "ForConditionalGeneration", d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
        ),
        lambda: ids(4, 32000),
    ),
}
VARIANTS = ("flash_fx", "sdpa + compile", "compile", "eager")


class Run:
    """One model in one variant."""

    def __init__(self, case: Case, variant: str) -> None:
        torch.manual_seed(0)
        self.model = case.build("sdpa" if variant.startswith("sdpa") else "eager").cuda()
        self.inputs = case.inputs()
        backend: Any = flash_fx if variant == "flash_fx" else "inductor"
        self.call = self.model if variant == "eager" else torch.compile(self.model, backend=backend)

    def train(self) -> None:
        self.call(**self.inputs).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def infer(self) -> None:
        with torch.no_grad():
            self.call(**self.inputs)

    def compile(self) -> float:
        """Seconds of the first training step."""
        self.model.train()
        seconds = _seconds(self.train)
        self.train()
        self.model.eval()
        self.infer()
        return seconds

    def measure(self) -> dict[str, float]:
        gc.collect()
        torch.cuda.empty_cache()
        self.model.train()
        self.train()
        torch.cuda.reset_peak_memory_stats()
        train = statistics.median(_seconds(self.train) for _ in range(10))
        peak = torch.cuda.max_memory_allocated() / 2**30
        self.model.eval()
        self.infer()
        infer = statistics.median(_seconds(self.infer) for _ in range(20))
        return {"train_ms": train * 1e3, "train_gib": peak, "infer_ms": infer * 1e3}


def _seconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/models.csv"))
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument(
        "--compile-only", action="store_true", help="fill the caches, so that a second run starts faster"
    )
    options = parser.parse_args()
    stamp = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "transformers": transformers.__version__, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in options.only:
            for variant in options.variants:
                row = one(CASES[name], variant, options.compile_only)
                print(f"{name:12s} {variant:15s}", "  ".join(f"{k} {v:8.2f}" for k, v in row.items()), flush=True)
                writer.writerow(
                    {**stamp, "model": name, "variant": variant, **{k: round(v, 3) for k, v in row.items()}}
                )
                file.flush()


def one(case: Case, variant: str, compile_only: bool) -> dict[str, float]:
    torch._dynamo.reset()
    try:
        run = Run(case, variant)
        found = {"compile_s": run.compile()}
        return found if compile_only else {**run.measure(), **found}
    except torch.OutOfMemoryError:
        return {}
    finally:
        run = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
