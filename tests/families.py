"""Model families, tiny and with random weights: what each is built from, what it is called with, what is to be fused.

A row is a class of transformers or an architecture of timm, the configuration that makes it small, a maker of inputs,
the number of attentions that can be fused, and the reasons of those that cannot. Weights are random, dropout is off,
attention is the eager one. Where a graph break makes Dynamo compile one layer's code once for all layers, a site counts
once (`train=`). `pending` marks rows where the matcher still finds fewer sites than there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """`model` names a class of transformers, an architecture of timm or, with dots, a class by its module."""

    name: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    sites: int | None = None
    left: tuple[str, ...] = ()
    train: tuple[Any, ...] | None = None  # (sites, *left) in training, where Dynamo makes other graphs of it
    pending: tuple[str, ...] = ()  # "eval", "train", "autocast": where not all that can be fused is fused yet
    library: str = "transformers"
    broken: str = ""  # why stock torch.compile cannot run it
    broken_in: tuple[str, ...] = ("eval", "train")
    double: bool = True  # eager runs in float64
    random: bool = False  # training draws random numbers

    def expected(self, *, train: bool) -> tuple[int | None, tuple[str, ...]]:
        """(sites fused, reasons of those left)"""
        if train and self.train is not None:
            return self.train[0], self.train[1:]
        return self.sites, self.left

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = BUILDERS[self.library](self)
            for p in model.parameters():  # zero or constant weights would hide wrong gradients
                if p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                    p.data.add_(torch.randn_like(p), alpha=0.05)
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        return model


def without_dropout(config: Any) -> None:
    """Every rate of dropout in a configuration, and in those inside it, to 0."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def build_transformers(family: Family) -> nn.Module:
    module, _, name = family.model.rpartition(".")
    model_class = getattr(importlib.import_module(module or "transformers"), name)
    config = model_class.config_class(**family.config)
    without_dropout(config)
    config._experts_implementation = "batched_mm"  # the default has no float64
    return model_class._from_config(config, attn_implementation="eager")


def build_timm(family: Family) -> nn.Module:
    timm, layers = importlib.import_module("timm"), importlib.import_module("timm.layers")
    fused = layers.use_fused_attn()
    layers.set_fused_attn(False)
    module, _, name = family.model.rpartition(".")
    try:
        if module:
            return getattr(importlib.import_module(module), name)(num_classes=10, **family.config)
        return timm.create_model(name, pretrained=False, num_classes=10, **family.config)
    finally:
        layers.set_fused_attn(bool(fused))


BUILDERS = {"transformers": build_transformers, "timm": build_timm}

# *** inputs ***

LENGTH, TARGETS = 37, 21


def tokens(length: int = LENGTH, seed: int = 0, low: int = 3, high: int = 100) -> Tensor:
    return torch.randint(low, high, (2, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def padding(length: int = LENGTH) -> Tensor:
    """A mask of tokens: the second sentence ends early."""
    return (torch.arange(length) < torch.tensor([[length], [length // 2]])).long()


def text(length: int = LENGTH, **more: Any) -> Callable[[], Inputs]:
    return lambda: {"input_ids": tokens(length), **made(more)}


def padded(length: int = LENGTH, **more: Any) -> Callable[[], Inputs]:
    return lambda: {"input_ids": tokens(length), "attention_mask": padding(length), **made(more)}


def translation(**more: Any) -> Callable[[], Inputs]:
    return lambda: {
        "input_ids": tokens(), "attention_mask": padding(), "decoder_input_ids": tokens(TARGETS, 1),
        "use_cache": False, **made(more),
    }  # fmt: skip


def pixels(size: int = 40, *, channels: int = 3, **more: Any) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": floats(2, channels, size, size), **made(more)}


def image(size: int, batch: int = 2) -> Callable[[], Inputs]:
    return lambda: {"x": floats(batch, 3, size, size)}


def sound(length: int = 2000, **more: Any) -> Callable[[], Inputs]:
    return lambda: {"input_values": floats(2, length), **made(more)}


def given(**more: Any) -> Callable[[], Inputs]:
    return lambda: made(more)


def made(values: dict[str, Any]) -> Inputs:
    """Tuples are shapes of random floats, functions are called, everything else is as it is."""
    return {k: floats(*v) if isinstance(v, tuple) else v() if callable(v) else v for k, v in values.items()}


# *** configurations that many share ***

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
SEQ2SEQ = {
    "vocab_size": 100, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 40,
    "patch_size": 8,
}  # fmt: skip
STAGES = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "image_size": 64, "patch_size": 4}
CONVS = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 8, 4), "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}  # fmt: skip
SPEECH = {**TEXT, **CONVS, "num_feat_extract_layers": 3}
EXPERTS = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO_TOWERS = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32}
NO_CACHE = {"use_cache": False}
WRONG_VIEW = "stock aot_eager fails at a view"
WRONG_MASK = "compiled, the model builds a mask of the wrong shape"


def row(name: str, model: str, config: dict, inputs: Callable, sites: int | None = None, *left: str, **more) -> Family:
    return Family(name, model, config, inputs, sites, left, **more)


def timm_row(
    name: str, model: str, config: dict, size: int, sites: int | None = None, *left: str, batch: int = 2, **more
) -> Family:
    return Family(name, model, config, image(size, batch), sites, left, library="timm", **more)


# *** the table ***

ENCODERS = [
    row("bert", "BertForMaskedLM", TEXT, padded(), 2),
    row("roberta", "RobertaForMaskedLM", TEXT, padded(), 2),
    row("distilbert", "DistilBertForMaskedLM", {**TEXT, "hidden_dim": 128}, padded(), 2),
    row("albert", "AlbertForMaskedLM", {**TEXT, "embedding_size": 32}, padded(), 2),
    row("electra", "ElectraForMaskedLM", {**TEXT, "embedding_size": 32}, padded(), 2),
    row("deberta", "DebertaModel", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": 16}, padded(), 0),
    row("deberta-v2", "DebertaV2Model", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}, padded(), 2 ),
    row("mpnet", "MPNetForMaskedLM", TEXT, padded(), 2),
    row("esm", "EsmForMaskedLM", {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 3,
        "token_dropout": False}, padded(), 2),
    row("esm-absolute", "EsmForMaskedLM", {**TEXT, "mask_token_id": 3, "token_dropout": False}, padded(), 2),
    row("convbert", "ConvBertModel", {**TEXT, "embedding_size": 64}, padded(), 2),
    row("squeezebert", "SqueezeBertModel", {**TEXT, "embedding_size": 64}, padded(), 2),
    row("mobilebert", "MobileBertModel", {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32,
        "true_hidden_size": 32}, padded(), 2),
    row("ibert", "IBertModel", {**TEXT, "quant_mode": False}, padded(), 2, train=(0, "weights-used")),
    row("roformer", "RoFormerModel", {**TEXT, "embedding_size": 64}, padded(), 2),
    row("rembert", "RemBertModel", {**TEXT, "input_embedding_size": 32, "output_embedding_size": 32}, padded(), 2),
    row("megatron-bert", "MegatronBertModel", TEXT, padded(), 2),
    row("ernie", "ErnieModel", TEXT, padded(), 2),
    row("canine", "CanineModel", {**TEXT, "downsampling_rate": 4, "num_hash_buckets": 64, "num_hash_functions": 4,
        "local_transformer_stride": 16, "max_position_embeddings": 64}, padded(64), 7),
    row("luke", "LukeModel", {**TEXT, "entity_vocab_size": 20, "entity_emb_size": 32}, padded(), 2),
    row("xlm", "XLMModel", {"vocab_size": 100, "emb_dim": 64, "n_layers": 2, "n_heads": 4,
        "max_position_embeddings": 64, **SPECIAL}, padded(), 2),
    row("xlnet", "XLNetModel", {"vocab_size": 100, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128,
        **SPECIAL}, padded(), 2),
    row("funnel", "FunnelModel", {"vocab_size": 100, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 64,
        "n_head": 4, "d_head": 16, "d_inner": 128, **SPECIAL}, padded(32), 3 ),
    row("longformer", "LongformerModel", {**TEXT, "attention_window": [8, 8]}, padded(32), 0,
        "weight-not-pointwise", "weight-not-pointwise"),
    row("big-bird", "BigBirdModel", {**TEXT, "attention_type": "block_sparse", "block_size": 4,
        "num_random_blocks": 1, "max_position_embeddings": 128}, padded(64), 0, "weights-used", "weights-used",
        "softmax-axis", "softmax-axis", "softmax-axis", "softmax-axis", "weights-used", "weights-used", random=True),
    row("big-bird-full", "BigBirdModel", {**TEXT, "attention_type": "original_full"}, padded(), 2),
    row("nystromformer", "NystromformerModel", {**TEXT, "num_landmarks": 8, "segment_means_seq_len": 32}, text(32),
        broken=WRONG_MASK),
    row("modernbert", "ModernBertModel", {**TEXT, "global_attn_every_n_layers": 2, "local_attention": 16,
        "cls_token_id": 1, "sep_token_id": 2}, padded(), 2),
    row("nomic-bert", "NomicBertModel", TEXT, padded(), 2),
    row("perceiver", "PerceiverModel", {"num_latents": 8, "d_latents": 32, "d_model": 16, "num_blocks": 1,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        given(inputs=(2, LENGTH, 16)), 3),
    row("reformer", "ReformerModel", {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4,
        "attention_head_size": 16, "attn_layers": ["local", "local"], "local_attn_chunk_length": 8,
        "feed_forward_size": 128, "axial_pos_embds": False, "max_position_embeddings": 64, "is_decoder": False,
        **SPECIAL}, text(32), 2),
    row("tapas", "TapasModel", {**TEXT, "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]}, padded(), 2),
    row("splinter", "SplinterModel", TEXT, padded(), 2),
]  # fmt: skip

DECODERS = [
    row("gpt2", "GPT2LMHeadModel", TEXT, text(**NO_CACHE), 2),
    row("gpt2-padded-scaled", "GPT2LMHeadModel", {**TEXT, "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True}, padded(**NO_CACHE), 2, double=False),
    row("gpt-bigcode", "GPTBigCodeForCausalLM", {**TEXT, "multi_query": True}, padded(**NO_CACHE), 2),
    row("openai-gpt", "OpenAIGPTLMHeadModel", TEXT, padded(), 2),
    row("ctrl", "CTRLLMHeadModel", {**TEXT, "dff": 128}, padded(**NO_CACHE), 2),
    row("gpt-neo", "GPTNeoForCausalLM", {**TEXT, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "window_size": 8}, padded(**NO_CACHE), 2),
    row("gpt-neox", "GPTNeoXForCausalLM", TEXT, padded(**NO_CACHE), 2),
    row("gptj", "GPTJForCausalLM", {**TEXT, "rotary_dim": 8}, padded(**NO_CACHE), 2),
    row("codegen", "CodeGenForCausalLM", {**TEXT, "rotary_dim": 8}, padded(**NO_CACHE), 2),
    row("bloom", "BloomForCausalLM", TEXT, padded(**NO_CACHE), 2),
    row("falcon", "FalconForCausalLM", {**TEXT, "alibi": False, "multi_query": True}, padded(**NO_CACHE), 2),
    row("falcon-alibi", "FalconForCausalLM", {**TEXT, "alibi": True, "new_decoder_architecture": True,
        "num_kv_heads": 2}, padded(**NO_CACHE), 2),
    row("mpt", "MptForCausalLM", {"vocab_size": 100, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
        "expansion_ratio": 2}, padded(**NO_CACHE), 2),
    row("opt", "OPTForCausalLM", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}, padded(**NO_CACHE), 2,
        train=(1,)),
    row("biogpt", "BioGptForCausalLM", TEXT, padded(**NO_CACHE), 2, train=(1,)),
    row("xglm", "XGLMForCausalLM", {**TEXT, "d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 128},
        padded(**NO_CACHE), 2, train=(1,), double=False),
    row("llama", "LlamaForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("mistral", "MistralForCausalLM", {**GROUPED, "sliding_window": 8},
        padded(**NO_CACHE), 2 ),
    row("gemma", "GemmaForCausalLM", {**TEXT, "num_key_value_heads": 1, "head_dim": 16}, padded(**NO_CACHE), 2),
    row("gemma2", "Gemma2ForCausalLM", {**GROUPED, "head_dim": 16, "sliding_window": 8},
        padded(**NO_CACHE), 2 ),
    row("gemma3-text", "Gemma3ForCausalLM", {**GROUPED, "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"]}, padded(**NO_CACHE), 2),
    row("qwen2", "Qwen2ForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("qwen3", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}, padded(**NO_CACHE), 2),
    row("phi", "PhiForCausalLM", TEXT, padded(**NO_CACHE), 2),
    row("phi3", "Phi3ForCausalLM", {**GROUPED, "sliding_window": 8}, padded(**NO_CACHE), 2),
    row("cohere", "CohereForCausalLM", {**GROUPED, "use_qk_norm": True}, padded(**NO_CACHE), 2),
    row("cohere2", "Cohere2ForCausalLM", {**GROUPED, "sliding_window": 8}, padded(**NO_CACHE), 2),
    row("olmo2", "Olmo2ForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("stablelm", "StableLmForCausalLM", {**GROUPED, "qk_layernorm": True}, padded(**NO_CACHE), 2),
    row("persimmon", "PersimmonForCausalLM", TEXT, padded(**NO_CACHE), 2),
    row("starcoder2", "Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 8}, padded(**NO_CACHE), 2),
    row("glm", "GlmForCausalLM", {**GROUPED, "head_dim": 16}, padded(**NO_CACHE), 2),
    row("granite", "GraniteForCausalLM", {**GROUPED, "attention_multiplier": 0.3}, padded(**NO_CACHE), 2),
    row("nemotron", "NemotronForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("smollm3", "SmolLM3ForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("exaone4", "Exaone4ForCausalLM", {**GROUPED, "sliding_window": 8}, padded(**NO_CACHE), 2),
    row("helium", "HeliumForCausalLM", {**GROUPED, "head_dim": 16}, padded(**NO_CACHE), 2),
    row("diffllama", "DiffLlamaForCausalLM", GROUPED, padded(**NO_CACHE), 4 ),
    row("doge", "DogeForCausalLM", {**GROUPED, "keep_window_size": 16}, padded(**NO_CACHE), 2,
        broken=WRONG_VIEW, broken_in=("train",)),
    row("nanochat", "NanoChatForCausalLM", GROUPED, padded(**NO_CACHE), 2),
    row("youtu", "YoutuForCausalLM", {**TEXT, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24}, padded(**NO_CACHE), 2),
    row("recurrent-gemma", "RecurrentGemmaForCausalLM", {**TEXT, "num_hidden_layers": 3, "lru_width": 64,
        "attention_window_size": 16, "head_dim": 16, "num_key_value_heads": 1}, padded(**NO_CACHE), 1),
    row("mixtral", "MixtralForCausalLM", {**EXPERTS, "sliding_window": 8}, padded(**NO_CACHE), 2),
    row("gpt-oss", "GptOssForCausalLM", {**EXPERTS, "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"]}, padded(**NO_CACHE), 2 ),
    row("deepseek-v3", "DeepseekV3ForCausalLM", {**TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 32,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24,
        "first_k_dense_replace": 1}, padded(**NO_CACHE), 2),
    row("qwen2-moe", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 32}, padded(**NO_CACHE),
        2),
    row("qwen3-moe", "Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16}, padded(**NO_CACHE), 2),
    row("phimoe", "PhimoeForCausalLM", EXPERTS, padded(**NO_CACHE), 2 , random=True),
    row("olmoe", "OlmoeForCausalLM", EXPERTS, padded(**NO_CACHE), 2),
    row("llama4-text", "Llama4ForCausalLM", {**EXPERTS, "head_dim": 16, "intermediate_size_mlp": 64,
        "attention_chunk_size": 8, "no_rope_layers": [1, 0], "moe_layers": [1]}, padded(**NO_CACHE), 2),
]  # fmt: skip

T5 = {"vocab_size": 100, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128,
      "decoder_start_token_id": 0, **SPECIAL}  # fmt: skip
TRANSLATORS = [
    row("t5", "T5ForConditionalGeneration", T5, translation(), 6),
    row("umt5", "UMT5ForConditionalGeneration", T5, translation(), 6),
    row("longt5-local", "LongT5Model", {**T5, "local_radius": 8}, translation(), 6),
    row("longt5-global", "LongT5Model", {**T5, "local_radius": 8, "encoder_attention_type": "transient-global",
        "global_block_size": 4}, translation(), 6 ),
    row("switch-transformers", "SwitchTransformersModel", {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}, translation(), 6),
    row("bart", "BartForConditionalGeneration", SEQ2SEQ, translation(), 6, train=(3,)),
    row("mbart", "MBartForConditionalGeneration", SEQ2SEQ, translation(), 6, train=(3,)),
    row("pegasus", "PegasusForConditionalGeneration", SEQ2SEQ, translation(), 6, train=(3,)),
    row("marian", "MarianMTModel", SEQ2SEQ, translation(), 6, train=(3,)),
    row("m2m-100", "M2M100ForConditionalGeneration", SEQ2SEQ, translation(), 6, train=(3,)),
    row("led", "LEDModel", {**SEQ2SEQ, "attention_window": [8, 8], "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}, translation(), 4, "weight-not-pointwise", "weight-not-pointwise",
        train=(2, "weight-not-pointwise")),
    row("bigbird-pegasus", "BigBirdPegasusModel", {**SEQ2SEQ, "block_size": 4, "attention_type": "original_full"},
        translation(), 6, train=(3,)),
    row("pegasus-x", "PegasusXModel", {**SEQ2SEQ, "block_size": 8, "num_global_tokens": 4}, translation(), 5,
        "softmax-axis", "softmax-axis", "softmax-axis", "softmax-axis", train=(4, "softmax-axis", "softmax-axis",
        "softmax-axis", "softmax-axis")),
    row("prophetnet", "ProphetNetModel", {"vocab_size": 100, "hidden_size": 64, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4, "max_position_embeddings": 64, "ngram": 2, "num_buckets": 8,
        "relative_max_distance": 16, **SPECIAL}, translation(), 8 ),
    row("fsmt", "FSMTModel", {**{k: v for k, v in SEQ2SEQ.items() if k != "vocab_size"}, "src_vocab_size": 100,
        "tgt_vocab_size": 100, "langs": ["en", "de"]}, translation(), 6, double=False),
    row("time-series-transformer", "TimeSeriesTransformerModel", {"prediction_length": 8, "context_length": 16,
        "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        given(past_values=(2, 18), past_time_features=(2, 18, 2), past_observed_mask=lambda: torch.ones(2, 18),
        future_values=(2, 8), future_time_features=(2, 8, 2), use_cache=False), 6, train=(3,)),
    row("informer", "InformerModel", {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2],
        "num_time_features": 2, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        given(past_values=(2, 18), past_time_features=(2, 18, 2), past_observed_mask=lambda: torch.ones(2, 18),
        future_values=(2, 8), future_time_features=(2, 8, 2), use_cache=False), broken=WRONG_MASK),
    row("patchtst", "PatchTSTModel", {"num_input_channels": 3, "context_length": 32, "patch_length": 4,
        "patch_stride": 4, "num_hidden_layers": 2, "d_model": 32, "num_attention_heads": 4, "ffn_dim": 64},
        given(past_values=(2, 32, 3)), 2, broken=WRONG_VIEW),
]  # fmt: skip

SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 1], "hidden_sizes": [16, 32],
             "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
             "decoder_hidden_size": 32}  # fmt: skip
RESNET = {"model_type": "resnet", "num_channels": 3, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
          "layer_type": "basic", "out_features": ["stage2"]}  # fmt: skip
DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": RESNET,
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 7}  # fmt: skip
EYES = [
    row("vit", "ViTForImageClassification", VISION, pixels(), 2),
    row("deit", "DeiTModel", VISION, pixels(), 2),
    row("vit-mae", "ViTMAEModel", {**VISION, "mask_ratio": 0.5}, pixels(noise=lambda: floats(2, 25).sigmoid()), 2),
    row("beit", "BeitModel", {**VISION, "use_relative_position_bias": True}, pixels(), 2),
    row("beit-shared", "BeitModel", {**VISION, "use_shared_relative_position_bias": True}, pixels(), 2),
    row("dinov2", "Dinov2Model", {**VISION, "mlp_ratio": 2}, pixels(), 2),
    row("dinov3-vit", "DINOv3ViTModel", VISION, pixels(), 2),
    row("swin", "SwinModel", {**STAGES, "window_size": 4}, pixels(64), 2),
    row("swinv2", "Swinv2Model", {**STAGES, "window_size": 4}, pixels(64), 2),
    row("donut-swin", "DonutSwinModel", {**STAGES, "window_size": 4}, pixels(64), 2),
    row("clip", "CLIPModel", TWO_TOWERS, padded(pixel_values=(2, 3, 40, 40)), 4),
    row("chinese-clip", "ChineseCLIPModel", TWO_TOWERS, padded(pixel_values=(2, 3, 40, 40)), 4),
    row("siglip", "SiglipModel", {"text_config": {**TEXT, "projection_size": 64}, "vision_config": VISION},
        padded(pixel_values=(2, 3, 40, 40)), 5),
    row("blip", "BlipModel", TWO_TOWERS, padded(pixel_values=(2, 3, 40, 40)), 4),
    row("groupvit", "GroupViTModel", {"text_config": TEXT, "vision_config": {**VISION, "hidden_size": 64,
        "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4]}, "projection_dim": 32,
        "projection_intermediate_dim": 64}, padded(pixel_values=(2, 3, 40, 40)), 7, "weight-not-pointwise",
        "weight-not-pointwise", random=True),
    row("owlvit", "OwlViTModel", {**TWO_TOWERS, "text_config": {**TEXT, "max_position_embeddings": LENGTH}},
        padded(pixel_values=(2, 3, 40, 40)), 4),
    row("flava-image", "FlavaImageModel", VISION, pixels(), 2),
    row("vilt", "ViltModel", {**TEXT, "image_size": 40, "patch_size": 8, "max_image_length": -1},
        padded(pixel_values=(2, 3, 40, 40)), 2),
    row("layoutlm", "LayoutLMModel", {**TEXT, "max_2d_position_embeddings": 64}, padded(), 2),
    row("layoutlmv3", "LayoutLMv3Model", {**TEXT, "max_2d_position_embeddings": 64, "coordinate_size": 8,
        "shape_size": 16, "rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "max_rel_2d_pos": 16,
        "input_size": 40, "patch_size": 8, "has_relative_attention_bias": True,
        "has_spatial_attention_bias": True}, padded(bbox=lambda: torch.arange(4).expand(2, LENGTH, 4) * 3,
        pixel_values=(2, 3, 40, 40)), 2 ),
    row("lilt", "LiltModel", {**TEXT, "hidden_size": 48, "max_2d_position_embeddings": 64,
        "channel_shrink_ratio": 2}, padded(bbox=lambda: torch.arange(4).expand(2, LENGTH, 4) * 3), 3),
    row("lxmert", "LxmertModel", {**TEXT, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 32},
        padded(visual_feats=(2, 9, 32), visual_pos=(2, 9, 4)), 6),
    row("visual-bert", "VisualBertModel", {**TEXT, "visual_embedding_dim": 32}, padded(visual_embeds=(2, 9, 32)),
        2),
    row("bridgetower", "BridgeTowerModel", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "text_config": TEXT, "vision_config": VISION}, padded(26, pixel_values=(2, 3, 40, 40)), 6, "weights-used",
        "weights-used", "weights-used", "weights-used"),
    row("yolos", "YolosModel", {**VISION, "image_size": [40, 40], "num_detection_tokens": 5}, pixels(), 2),
    row("detr", "DetrModel", DETR, pixels(64), 6),
    row("conditional-detr", "ConditionalDetrModel", DETR, pixels(64), 6),
    row("deformable-detr", "DeformableDetrModel", {**DETR, "num_feature_levels": 1}, pixels(64), 2),
    row("table-transformer", "TableTransformerModel", DETR, pixels(64), 6, train=(5,)),
    row("maskformer-swin", "MaskFormerSwinModel", {**STAGES, "window_size": 4}, pixels(64), 2),
    row("mask2former", "Mask2FormerModel", {"backbone_config": {**STAGES, "model_type": "swin", "window_size": 4,
        "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "out_features": ["stage1", "stage2", "stage3",
        "stage4"]}, "hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "encoder_layers": 1,
        "decoder_layers": 2, "num_attention_heads": 4, "dim_feedforward": 64, "encoder_feedforward_dim": 64,
        "num_queries": 7}, pixels(64), 6),
    row("segformer", "SegformerForSemanticSegmentation", SEGFORMER, pixels(64), 2),
    row("pvt", "PvtModel", {"num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [4, 1],
        "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "image_size": 64}, pixels(64), 2),
    row("glpn", "GLPNModel", SEGFORMER, pixels(64), 2),
    row("dpt", "DPTModel", VISION, pixels(), 2),
    row("sam-vision", "SamVisionModel", {**VISION, "mlp_dim": 128, "output_channels": 32, "window_size": 3,
        "image_size": 64, "global_attn_indexes": [1], "use_rel_pos": True}, pixels(64), 2 ),
    row("sam", "SamModel", {"vision_config": {**VISION, "mlp_dim": 128, "output_channels": 32, "window_size": 3,
        "image_size": 64, "global_attn_indexes": [1], "num_pos_feats": 16},
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "iou_head_hidden_dim": 32}}, pixels(64, input_points=lambda: floats(2, 1, 3, 2).sigmoid() * 64), 9 ),
    row("vitdet", "VitDetModel", {**VISION, "use_relative_position_embeddings": True, "window_block_indices": [0],
        "window_size": 3}, pixels(), 2 ),
    row("hiera", "HieraModel", {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1], "num_heads": [1, 2,
        4], "query_stride": [2, 2], "masked_unit_size": [8, 8], "masked_unit_attention": [True, True, False],
        "num_query_pool": 2, "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3]}, pixels(64),
        3),
    row("mobilevit", "MobileViTModel", {"image_size": 128, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8,
        8, 16, 16, 24, 24, 32], "num_attention_heads": 4}, pixels(128), 9),
    row("cvt", "CvtModel", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3],
        "mlp_ratio": [2.0, 2.0, 2.0], "attention_drop_rate": [0.0] * 3, "drop_rate": [0.0] * 3,
        "drop_path_rate": [0.0] * 3}, pixels(64), 6),
    row("levit-hf", "LevitModel", {"image_size": 128, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3,
        4], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "attention_ratio": [2, 2, 2], "mlp_ratio": [2, 2, 2]},
        pixels(128), 5),
    row("swiftformer", "SwiftFormerModel", {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24,
        32]}, pixels(64), 0, *("softmax-axis",) * 4),
    row("videomae", "VideoMAEModel", {**VISION, "num_frames": 4, "tubelet_size": 2, "image_size": 24},
        given(pixel_values=(2, 4, 3, 24, 24)), 2),
    row("timesformer", "TimesformerModel", {**VISION, "num_frames": 4, "image_size": 24}, given(pixel_values=(2, 4,
        3, 24, 24)), 4),
    row("vivit", "VivitModel", {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8], "image_size": 24},
        given(pixel_values=(2, 4, 3, 24, 24)), 2),
    row("imagegpt", "ImageGPTModel", {**TEXT, "n_positions": 64}, text(**NO_CACHE), 2),
    row("idefics2-vision", "transformers.models.idefics2.modeling_idefics2.Idefics2VisionTransformer", VISION,
        pixels(), 2),
    row("pix2struct-text", "Pix2StructTextModel", {"vocab_size": 100, "hidden_size": 64, "d_kv": 16, "d_ff": 128,
        "num_layers": 2, "num_heads": 4, "initializer_range": 0.02, **SPECIAL}, padded(**NO_CACHE), 2),
    row("pix2struct-vision", "Pix2StructVisionModel", {"hidden_size": 64, "patch_embed_hidden_size": 27,
        "d_ff": 128, "d_kv": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 64},
        given(flattened_patches=lambda: floats(2, 24, 29).abs().ceil()), 2),
    row("llava", "LlavaForConditionalGeneration", {"text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_id": 99}, padded(**NO_CACHE), 2),
    row("git", "GitModel", {**TEXT, "vision_config": VISION}, padded(pixel_values=(2, 3, 40, 40), use_cache=False),
        4),
    row("trocr", "TrOCRForCausalLM", {"vocab_size": 100, "d_model": 64, "decoder_layers": 2,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "max_position_embeddings": 64, **SPECIAL},
        padded(**NO_CACHE), 2, train=(1,)),
]  # fmt: skip

EARS = [
    row("whisper", "WhisperForConditionalGeneration", {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 30,
        "max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None},
        given(input_features=(2, 8, 60), decoder_input_ids=lambda: tokens(TARGETS), use_cache=False), 6,
        train=(3,)),
    row("wav2vec2", "Wav2Vec2Model", SPEECH, sound(), 2, train=(1,)),
    row("wav2vec2-conformer", "Wav2Vec2ConformerModel", {**SPEECH, "position_embeddings_type": "relative",
        "conv_depthwise_kernel_size": 5, "max_source_positions": 100}, sound(), 2, train=(1,)),
    row("wav2vec2-bert", "Wav2Vec2BertModel", {**TEXT, "feature_projection_input_dim": 16,
        "position_embeddings_type": "relative_key", "left_max_position_embeddings": 8,
        "right_max_position_embeddings": 4, "conv_depthwise_kernel_size": 5, "mask_time_prob": 0.0},
        given(input_features=(2, LENGTH, 16)), 2, train=(1,) ),
    row("hubert", "HubertModel", SPEECH, sound(), 2, train=(1,)),
    row("unispeech", "UniSpeechModel", SPEECH, sound(), 2, train=(1,)),
    row("wavlm", "WavLMModel", {**SPEECH, "num_buckets": 8, "max_bucket_distance": 16}, sound(), 2),
    row("sew", "SEWModel", {**SPEECH, "squeeze_factor": 2}, sound(4000), 2, train=(1,)),
    row("sew-d", "SEWDModel", {**SPEECH, "squeeze_factor": 2, "position_buckets": 8}, sound(4000), 2, train=(0, "hidden",
        "hidden")),
    row("data2vec-text", "Data2VecTextModel", TEXT, padded(), 2),
    row("data2vec-audio", "Data2VecAudioModel", SPEECH, sound(), 2, train=(1,)),
    row("speecht5", "SpeechT5ForSpeechToText", {**SEQ2SEQ, **CONVS, "hidden_size": 64,
        "num_feat_extract_layers": 3, "encoder_max_relative_position": 16},
        sound(decoder_input_ids=lambda: tokens(TARGETS), use_cache=False), 6, train=(3,) ),
    row("speech-to-text", "Speech2TextModel", {**SEQ2SEQ, "input_feat_per_channel": 8, "max_source_positions": 64,
        "max_target_positions": 64, "conv_channels": 16, "num_conv_layers": 2}, given(input_features=(2, 60, 8),
        decoder_input_ids=lambda: tokens(TARGETS), use_cache=False), 6, train=(3,)),
    row("audio-spectrogram", "ASTModel", {**VISION, "max_length": 40, "num_mel_bins": 16, "frequency_stride": 8,
        "time_stride": 8}, given(input_values=(2, 40, 16)), 2),
    row("clap-audio", "ClapAudioModel", {"spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4,
        4], "depths": [1, 1], "num_attention_heads": [2, 4], "patch_embeds_hidden_size": 16, "hidden_size": 32,
        "window_size": 4, "num_hidden_layers": 2}, given(input_features=(2, 1, 256, 16),
        is_longer=lambda: torch.zeros(2, 1, dtype=torch.bool)), 2),
    row("musicgen-decoder", "MusicgenForCausalLM", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 128, "num_codebooks": 2, "max_position_embeddings": 64, **SPECIAL},
        given(input_ids=lambda: tokens(LENGTH, high=90).repeat(2, 1), use_cache=False), 2, train=(1,)),
    row("moonshine", "MoonshineModel", {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4, **SPECIAL}, given(input_values=(2, 8000),
        decoder_input_ids=lambda: tokens(TARGETS), use_cache=False), 6),
    row("decision-transformer", "DecisionTransformerModel", {"state_dim": 5, "act_dim": 3, "hidden_size": 64,
        "n_layer": 2, "n_head": 4, "max_ep_len": 32}, given(states=(2, 9, 5), actions=(2, 9, 3), rewards=(2, 9, 1),
        returns_to_go=(2, 9, 1), timesteps=lambda: torch.arange(9).expand(2, 9),
        attention_mask=lambda: padding(9)), 2),
]  # fmt: skip

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
TIMM = [
    timm_row("timm-vit", "vit_tiny_patch16_224", VIT, 32, 2),
    timm_row("timm-vit-qk-norm", "vit_tiny_patch16_224", {**VIT, "qk_norm": True, "init_values": 0.1}, 32, 2),
    timm_row("timm-deit3", "deit3_small_patch16_224", VIT, 32, 2),
    timm_row("timm-swin", "swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "embed_dim": 32,
        "depths": (2, 2), "num_heads": (2, 4)}, 64, 4),
    timm_row("timm-swinv2", "swinv2_tiny_window8_256", {"img_size": 64, "window_size": 4, "embed_dim": 32,
        "depths": (2, 2), "num_heads": (2, 4)}, 64, 4),
    timm_row("timm-beit", "beit_base_patch16_224", VIT, 32, 2),
    timm_row("timm-eva", "eva02_tiny_patch14_224", VIT, 32, 2),
    timm_row("timm-cait", "cait_xxs24_224", {**VIT, "depth_token_only": 1}, 32, 1, "weight-not-pointwise",
        "weight-not-pointwise"),
    timm_row("timm-maxvit", "maxvit_rmlp_pico_rw_256", {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64),
        "stem_width": (16, 16), "block_type": ("M", "M")}, 64, 4),
    timm_row("timm-coatnet", "coatnet_nano_rw_224", {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64),
        "stem_width": (16, 16), "block_type": ("C", "T")}, 64, 1),
    timm_row("timm-mvitv2", "mvitv2_tiny", {"img_size": 64}, 64, 10 ),
    timm_row("timm-volo", "timm.models.volo.VOLO", {"img_size": 64, "layers": (1, 1), "embed_dims": (32, 64),
        "num_heads": (2, 4), "downsamples": (True, False), "outlook_attention": (True, False), "mlp_ratio": (2.0,
        2.0)}, 64, 3),
    # a batch norm over two samples would enlarge rounding errors a hundredfold
    timm_row("timm-levit", "levit_128s", {"img_size": 128, "embed_dim": (32, 48, 64), "key_dim": 8,
        "num_heads": (2, 3, 4), "depth": (1, 1, 1)}, 128, 5, batch=8),
    timm_row("timm-xcit", "xcit_nano_12_p16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2,
        "num_heads": 4}, 32, 4),
    timm_row("timm-twins-svt", "twins_svt_small", {"img_size": 64, "embed_dims": (32, 64), "depths": (2, 2),
        "num_heads": (2, 4), "mlp_ratios": (2, 2), "sr_ratios": (4, 2), "wss": (4, 4)}, 128, 4),
    timm_row("timm-pvt-v2", "pvt_v2_b0", {"depths": (1, 1, 1, 1)}, 64, 4),
    timm_row("timm-crossvit", "crossvit_tiny_240", {"embed_dim": [32, 64], "depth": [[1, 1, 0]], "num_heads": [2,
        2]}, 240, 4),
    timm_row("timm-coat", "coat_tiny", {"img_size": 64, "embed_dims": (32, 32, 32, 32), "serial_depths": (1, 1, 1,
        1), "parallel_depth": 1}, 64, 0),
    timm_row("timm-gcvit", "timm.models.gcvit.GlobalContextVit", {"img_size": 64, "depths": (1, 1),
        "num_heads": (2, 4), "embed_dim": 32, "window_ratio": (16, 16)}, 64, 2),
    timm_row("timm-davit", "davit_tiny", {"depths": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4),
        "window_size": 4}, 64, 4),
    timm_row("timm-nest", "timm.models.nest.Nest", {"img_size": 64, "num_levels": 2, "embed_dims": (32, 64),
        "num_heads": (2, 4), "depths": (1, 1)}, 64, 2),
    timm_row("timm-convit", "convit_tiny", {**VIT, "local_up_to_layer": 1, "embed_dim": 16}, 32, 1,
        "weight-not-pointwise"),
    timm_row("timm-tnt", "tnt_s_patch16_224", {"img_size": 32, "depth": 2}, 32, 4 ),
    timm_row("timm-pit", "timm.models.pit.PoolingVisionTransformer", {"img_size": 64, "base_dims": (16, 16, 16),
        "depth": (1, 1, 1), "heads": (2, 4, 8)}, 64, 3),
    timm_row("timm-visformer", "visformer_tiny", {"img_size": 64, "depth": (1, 1, 1)}, 64, 2),
    timm_row("timm-edgenext", "edgenext_xx_small", {"depths": (1, 1, 1, 1)}, 64, 3),
    timm_row("timm-mobilevitv2", "mobilevitv2_050", {}, 64, 0),
    timm_row("timm-efficientformer", "efficientformer_l1", {"depths": (1, 1, 1, 2)}, 224, 1),
    timm_row("timm-tiny-vit", "tiny_vit_5m_224", {"depths": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4),
        "window_sizes": (4, 4)}, 64, 1),
    timm_row("timm-botnet", "botnet26t_256", {"img_size": 64}, 64, 3 ),
    timm_row("timm-halonet", "halonet26t", {}, 256, 3 ),
    timm_row("timm-samvit", "samvit_base_patch16", {**VIT, "img_size": 64, "window_size": 3,
        "global_attn_indexes": (1,), "neck_chans": 16}, 64, 2 ),
    timm_row("timm-hiera", "hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "num_heads": 1, "stages": (1,
        1, 1, 1)}, 64, 4),
]  # fmt: skip

FAMILIES: list[Family] = [*ENCODERS, *DECODERS, *TRANSLATORS, *EYES, *EARS, *TIMM]
BY_NAME = {f.name: f for f in FAMILIES}
