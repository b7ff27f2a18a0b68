"""Phi-3.5-MoE: SparseMixer's routing, layer norms, biases everywhere, longrope."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.config import LayerKind, ModelConfig, Moe, Rope, Router
from moejax.errors import ConfigError
from moejax_converters import hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "attention_bias": False,
    "lm_head_bias": False,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "router_jitter_noise": 0.01,
}
_LONGROPE_KEYS = (
    *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    "original_max_position_embeddings",
)


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    layer = LayerKind(
        attention=hf_config.attention(
            fields,
            rope=_rope(fields),
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            window=fields.optional_integer("sliding_window"),
        ),
        feed_forward=Moe(
            router=Router(
                num_experts=fields.integer("num_local_experts", "num_experts"),
                experts_per_token=fields.integer("num_experts_per_tok"),
                renormalize=False,
                float32_weights=False,
                score="sparsemixer",
                jitter=fields.nonnegative("router_jitter_noise"),
            ),
            expert_width=fields.integer("intermediate_size"),
        ),
    )
    config = hf_config.decoder("phimoe", fields, [layer] * hf_config.num_layers(fields))
    has_bias = fields.flag("lm_head_bias")
    if has_bias and config.tie_embeddings:
        raise ConfigError(
            "config.json: lm_head_bias True with tie_word_embeddings True is not supported"
        )
    return dataclasses.replace(config, norm="layer", head_bias=has_bias)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    router = r"(?:block_sparse_moe\.gate|mlp\.router)\.weight"
    return (
        *rules.decoder_rules(config),
        Rule(rules.LAYER + router, r"layers.\1.feed_forward.router.weight"),
        *rules.MIXTRAL_EXPERT_RULES,
        *rules.FUSED_MOE_RULES,
    )


def _rope(fields: Fields) -> Rope:
    """Magnitudes of its own stand in the file, in place of those that longrope computes."""
    parameters = hf_rope.rope_parameters(fields)
    if hf_rope.rope_type(parameters, "default", "longrope") == "default":
        return hf_rope.rope(fields)
    hf_rope.refuse_partial(fields, parameters)
    hf_rope.refuse_other_keys(parameters, "longrope of phimoe", _LONGROPE_KEYS)
    return Rope(
        theta=hf_rope.theta(fields, parameters),
        scaling=hf_rope.longrope(
            fields,
            parameters,
            short_magnitude=parameters.number("short_mscale"),
            long_magnitude=parameters.number("long_mscale"),
        ),
    )
