"""The models of the demo: unmodified Transformers models with random weights, and the hand-written GPT of examples/."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import TargetError


@dataclass(frozen=True)
class Size:
    """How large a model is built; dropout is off, so that all runs compute the same function."""

    layers: int
    width: int
    heads: int
    vocab: int
    longest: int


FULL = Size(layers=12, width=768, heads=12, vocab=50257, longest=8192)
SMALL = Size(layers=2, width=128, heads=4, vocab=512, longest=512)


@dataclass(frozen=True)
class DemoModel:
    """`logits(model, ids)` for inference, `loss(model, ids)` for training; both take the model or its compiled form."""

    title: str
    model: nn.Module
    logits: Callable[[Any, Tensor], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def build(name: str | None, size: Size) -> DemoModel:
    """A model by name; None is GPT-2 where Transformers is installed and minGPT elsewhere. Raises TargetError."""
    name = name or ("gpt2" if has_transformers() else "mingpt")
    torch.manual_seed(0)
    if name == "mingpt":
        return _mingpt(size)
    if not has_transformers():
        raise TargetError(f"--model {name} needs transformers (pip install transformers); --model mingpt does not")
    return _TRANSFORMERS[name](size)


def _mingpt(size: Size) -> DemoModel:
    module = _load_example("mingpt")
    model = module.GPT(size.vocab, size.layers, size.width, size.heads, size.longest, dropout=0.0)
    return DemoModel(
        "minGPT (examples/mingpt.py)", model, lambda m, ids: m(ids)[0], lambda m, ids: m(ids, ids)[1]
    )  # fmt: skip


def _load_example(name: str) -> Any:
    """`examples/` beside the package in a checkout, `flash_fx/_examples` in a wheel."""
    package = Path(__file__).resolve().parent
    paths = [folder / f"{name}.py" for folder in (package / "_examples", package.parent / "examples")]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise TargetError(f"the demo's model {name}.py is neither in {paths[0].parent} nor in {paths[1].parent}")
    spec = importlib.util.spec_from_file_location(f"flash_fx_example_{name}", path)
    assert spec is not None and spec.loader is not None, f"cannot import {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo imports the module of a traced function by name
    spec.loader.exec_module(module)
    return module


def _gpt2(size: Size) -> DemoModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.heads, vocab_size=size.vocab, n_positions=size.longest,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _language_model("GPT-2", GPT2LMHeadModel(config))


def _llama(size: Size) -> DemoModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.layers, hidden_size=size.width, intermediate_size=3 * size.width,
        num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 4), vocab_size=size.vocab,
        max_position_embeddings=size.longest, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return _language_model("Llama", LlamaForCausalLM(config))


def _bert(size: Size) -> DemoModel:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=size.layers, hidden_size=size.width, intermediate_size=4 * size.width,
        num_attention_heads=size.heads, vocab_size=size.vocab, max_position_embeddings=size.longest,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return _language_model("BERT", BertForMaskedLM(config))


def _language_model(name: str, model: nn.Module) -> DemoModel:
    import transformers

    title = f"{name} (transformers {transformers.__version__}, unmodified, attn_implementation=eager)"
    return DemoModel(
        title,
        model,
        lambda m, ids: m(input_ids=ids).logits,
        lambda m, ids: m(input_ids=ids, labels=ids).loss,
    )


_TRANSFORMERS: dict[str, Callable[[Size], DemoModel]] = {"gpt2": _gpt2, "llama": _llama, "bert": _bert}
