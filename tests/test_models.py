"""Unmodified models, random weights: every layer fused, logits and all parameter gradients against float64 eager."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_fx
from flash_fx.match.normalize import example_value
from flash_fx.testing import capture_rewrites

transformers = pytest.importorskip("transformers")
MINGPT = Path(__file__).resolve().parents[1] / "examples" / "mingpt.py"
EAGER = {"attn_implementation": "eager"}
TOKENS, DECODER_TOKENS, PATCHES = 37, 21, 26  # lengths that no other size of a model equals


@dataclass
class Model:
    """A model, its arguments, its number of attentions, and the sequence lengths to look for in graphs."""

    module: nn.Module
    inputs: dict[str, Any]
    sites: int
    lengths: set[int]
    allowed: set[tuple[int, int]] = field(default_factory=set)  # score-shaped tensors that are the model's parameters


def tokens(length: int) -> Tensor:
    return torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(length))


def gpt2() -> Model:
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=100, n_positions=128, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **EAGER,
    )  # fmt: skip
    return Model(transformers.GPT2LMHeadModel(config), {"input_ids": tokens(TOKENS), "use_cache": False}, 2, {TOKENS})


def bert() -> Model:
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **EAGER,
    )  # fmt: skip
    padding = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [20]])).long()
    inputs = {"input_ids": tokens(TOKENS), "attention_mask": padding}
    return Model(transformers.BertForMaskedLM(config), inputs, 2, {TOKENS})


def llama() -> Model:
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=100, **EAGER,
    )  # fmt: skip
    return Model(transformers.LlamaForCausalLM(config), {"input_ids": tokens(TOKENS), "use_cache": False}, 2, {TOKENS})


def t5() -> Model:
    config = transformers.T5Config(
        d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=128, vocab_size=100, decoder_start_token_id=0,
        dropout_rate=0.0, **EAGER,
    )  # fmt: skip
    inputs = {"input_ids": tokens(TOKENS), "decoder_input_ids": tokens(DECODER_TOKENS), "use_cache": False}
    position_bias = {(n, n) for n in (TOKENS, DECODER_TOKENS)}
    model = transformers.T5ForConditionalGeneration(config)
    return Model(model, inputs, 6, {TOKENS, DECODER_TOKENS}, position_bias)


def vit() -> Model:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=40, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **EAGER,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    return Model(transformers.ViTForImageClassification(config), {"pixel_values": pixels}, 2, {PATCHES})


def mingpt() -> Model:
    if not MINGPT.exists():
        pytest.skip("no examples/mingpt.py")
    spec = importlib.util.spec_from_file_location("mingpt_example", MINGPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, _ = example.build()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    sites = sum(type(m).__name__ == "CausalSelfAttention" for m in model.modules())
    return Model(model, {"idx": tokens(TOKENS)}, sites, {TOKENS})


EACH = pytest.mark.parametrize("build", [gpt2, bert, llama, t5, vit, mingpt], ids=lambda f: f.__name__)


def made(build: Callable[[], Model], *, train: bool) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    model.module.train(train)
    return model


def logits_of(result: Any) -> Tensor:
    return result.logits if hasattr(result, "logits") else result[0]


def step(module: nn.Module, call: Callable, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter in one fixed random direction."""
    module.zero_grad()
    logits = logits_of(call(**inputs))
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (logits.double() * direction).mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    return {"logits": logits.detach(), **grads}


def infer(module: nn.Module, call: Callable, inputs: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"logits": logits_of(call(**inputs))}


def in_double(model: Model) -> tuple[nn.Module, dict[str, Any]]:
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in model.inputs.items()}
    return copy.deepcopy(model.module).double(), wide


def rms(t: Tensor) -> float:
    return t.double().square().mean().sqrt().item()


def problems(ours: dict[str, Tensor], eager: dict[str, Tensor], golden: dict[str, Tensor]) -> list[str]:
    """Errors above eager's own plus a few eps; a nearly zero gradient is measured by the scale of the largest one."""
    largest = max(rms(g) for n, g in golden.items() if n != "logits") if len(golden) > 1 else 0.0
    found = []
    for name, truth in golden.items():
        unit = max(rms(truth), 0.0 if name == "logits" else 1e-2 * largest)
        error, theirs = (rms(t[name].double() - truth) / unit for t in (ours, eager))
        budget = 1.5 * theirs + 4 * torch.finfo(torch.float32).eps
        if not error <= budget:
            found.append(f"{name}: error {error:.2e}, eager {theirs:.2e}, budget {budget:.2e}")
    return found


# *** what is left of the graph ***


def score_shaped(graph: torch.fx.Graph, lengths: set[int], allowed: Any = ()) -> list[tuple[str, tuple[int, ...]]]:
    """Nodes with two sequence axes, other than the allowed pairs."""
    found = []
    for node in graph.nodes:
        value = example_value(node)
        if isinstance(value, Tensor) and node.op != "placeholder":
            shape = tuple(int(s) for s in value.shape)
            axes = tuple(s for s in shape if s in lengths)
            if len(axes) > 1 and axes not in allowed:
                found.append((node.name, shape))
    return found


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@EACH
def test_every_layer_is_fused_and_no_score_matrix_remains(build: Callable[[], Model], train: bool) -> None:
    model = made(build, train=train)
    before, after, report = capture_rewrites(model.module, **model.inputs)
    assert (report.fused, report.left) == (model.sites, 0), str(report)
    assert any(score_shaped(g.graph, model.lengths) for g in before)  # the check can fail
    for graph in (g.graph for g in after):
        assert not any("softmax" in str(n.target) for n in graph.nodes)
        assert score_shaped(graph, model.lengths, model.allowed) == []


# *** numbers ***


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@EACH
def test_numbers(build: Callable[[], Model], train: bool) -> None:
    model, run = made(build, train=train), step if train else infer
    wide, wide_inputs = in_double(model)
    compiled = torch.compile(model.module, backend=flash_fx.make_backend(inner="aot_eager", strict=True))
    with flash_fx.recording() as reports:
        ours = run(model.module, compiled, model.inputs)
    assert (sum(r.fused for r in reports), sum(r.left for r in reports)) == (model.sites, 0)
    ours = {n: t.clone() for n, t in ours.items()}
    eager = {n: t.clone() for n, t in run(model.module, model.module, model.inputs).items()}
    assert not problems(ours, eager, run(wide, wide, wide_inputs))


def test_one_graph_of_gpt2_serves_every_length() -> None:
    model = made(gpt2, train=True)
    wide = copy.deepcopy(model.module).double()
    compiled = torch.compile(model.module, backend=flash_fx.make_backend(inner="aot_eager"), dynamic=True)
    counts = []
    with flash_fx.recording() as reports:
        for length in (33, 65, 100):
            inputs = {"input_ids": tokens(length), "use_cache": False}
            ours = {n: t.clone() for n, t in step(model.module, compiled, inputs).items()}
            eager = {n: t.clone() for n, t in step(model.module, model.module, inputs).items()}
            assert not problems(ours, eager, step(wide, wide, inputs))
            counts.append(len(reports))
    assert counts[0] == counts[-1]  # Dynamo may start the first compile over, no later length compiles again
    assert {(r.fused, r.left) for r in reports} == {(2, 0)}
