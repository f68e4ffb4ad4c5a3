"""Unmodified Hugging Face models on a GPU: every layer fused, logits and all parameter gradients against fp64 eager."""

from __future__ import annotations

import copy

import pytest
import torch

import flash_fx

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")


def tokens(length):
    return torch.randint(0, 100, (2, length), device="cuda")


def gpt2():
    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=256, vocab_size=100, n_positions=256, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(200), "use_cache": False}, 3


def bert():
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, vocab_size=100,
        attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = (torch.arange(150, device="cuda") < torch.tensor([[150], [90]], device="cuda")).long()
    return transformers.BertForMaskedLM(config), {"input_ids": tokens(150), "attention_mask": mask}, 3


def llama():
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
        vocab_size=100, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(200), "use_cache": False}, 3


def t5():
    config = transformers.T5Config(
        d_model=256, num_layers=2, num_heads=4, d_kv=64, d_ff=512, vocab_size=100, decoder_start_token_id=0,
        attn_implementation="eager", dropout_rate=0.0,
    )  # fmt: skip
    inputs = {"input_ids": tokens(140), "decoder_input_ids": tokens(70), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), inputs, 6


def vit():
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, image_size=64, patch_size=8,
        attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64, device="cuda")}, 3


def step(model, call, inputs):
    """Logits and every parameter gradient of one training step."""
    model.zero_grad()
    logits = call(**inputs).logits
    generator = torch.Generator("cuda").manual_seed(3)
    direction = torch.randn(logits.shape, generator=generator, device="cuda", dtype=torch.float64)
    (logits.double() * direction).mean().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [logits.detach().double(), *(g.double() for g in grads)]


def cast(inputs, dtype):
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [gpt2, bert, llama, t5, vit], ids=lambda f: f.__name__)
def test_model(build, dtype, monkeypatch):
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ViT's convolution
    model, inputs, sites = build()
    model = model.to("cuda", dtype).train()
    wide = copy.deepcopy(model).double()
    gold = step(wide, wide, cast(inputs, torch.float64))
    eager = step(model, model, cast(inputs, dtype))
    with flash_fx.recording() as reports:
        compiled = torch.compile(model, backend=flash_fx)
        ours = step(model, compiled, cast(inputs, dtype))
        with torch.no_grad():
            inference = compiled(**cast(inputs, dtype)).logits.double()
    assert sum(r.left for r in reports) == 0
    assert sum(r.fused for r in reports) == 2 * sites  # the training graph and the inference graph
    scale = max(g.norm().item() / g.numel() ** 0.5 for g in gold[1:])
    eps = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}[dtype]
    for number, (a, b, g) in enumerate(zip(ours, eager, gold, strict=True)):
        unit = max(g.norm().item() / g.numel() ** 0.5, 0 if number == 0 else 0.01 * scale) * g.numel() ** 0.5
        error, reference = (a - g).norm().item() / unit, (b - g).norm().item() / unit
        assert error <= 1.1 * reference + 4 * eps, f"tensor {number}: {error:.2e} against eager's {reference:.2e}"
    error, reference = ((t - gold[0]).norm().item() / gold[0].norm().item() for t in (inference, eager[0]))
    assert error <= 1.1 * reference + 4 * eps
