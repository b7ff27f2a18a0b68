"""gpt-oss: sinks, windows on every other layer, biases everywhere, a clamped activation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.config import ClampedSwiglu, LayerKind, ModelConfig, Moe, Router
from moejax.errors import ConfigError
from moejax_converters import fused, hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1.5e5,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    full = hf_config.attention(
        fields,
        rope=hf_rope.rope(fields, default=_ROPE),
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        sinks=True,
    )
    moe = Moe(
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        router=Router(
            num_experts=fields.integer("num_local_experts", "num_experts"),
            experts_per_token=fields.integer("num_experts_per_tok", "experts_per_token"),
            renormalize=True,
            float32_weights=False,
            bias=True,
        ),
        expert_width=fields.integer("intermediate_size"),
        activation=ClampedSwiglu(
            limit=fields.number("swiglu_limit"), alpha=fields.number("swiglu_alpha")
        ),
        expert_bias=True,
    )
    layers = [
        LayerKind(attention=dataclasses.replace(full, window=window), feed_forward=moe)
        for window in _windows(fields)
    ]
    config = hf_config.decoder("gpt_oss", fields, layers)
    return dataclasses.replace(config, norm="rms_float32")


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    moe = rules.LAYER + r"mlp\."
    bias = r"layers.\1.feed_forward.expert_bias"
    return (
        *rules.decoder_rules(config),
        Rule(rules.LAYER + r"self_attn\.sinks", r"layers.\1.attention.sinks"),
        Rule(moe + r"router\.weight", r"layers.\1.feed_forward.router.weight"),
        Rule(moe + r"router\.bias", r"layers.\1.feed_forward.router.bias"),
        Rule(moe + r"experts\.gate_up_proj", r"layers.\1.experts", fused.gate_up_alternating),
        Rule(moe + r"experts\.down_proj", r"layers.\1.experts", fused.down_columns),
        Rule(moe + r"experts\.gate_up_proj_bias", bias, fused.alternating_bias),
        Rule(moe + r"experts\.down_proj_bias", bias + ".down"),
    )


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer; without `layer_types`, layers 0, 2, 4 … have one."""
    sliding, full = "sliding_attention", "full_attention"
    default = [full if n % 2 else sliding for n in range(hf_config.num_layers(fields))]
    kinds = hf_config.layer_types(fields, default, sliding, full)
    window = fields.optional_integer("sliding_window")
    if window is None and sliding in kinds:
        raise ConfigError(f"config.json: sliding_window is None, but layer_types has {sliding}")
    return [window if kind == sliding else None for kind in kinds]
