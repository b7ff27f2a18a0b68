"""OLMoE: q and k are normed over all heads at once, and q, k and v may be clipped."""

from collections.abc import Mapping
from typing import Any

from moejax.config import LayerKind, ModelConfig, Moe, Router
from moejax_converters import hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "attention_bias": False,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    layer = LayerKind(
        attention=hf_config.attention(
            fields,
            rope=hf_rope.rope(fields),
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            qk_norm="projection",
            qkv_clip=fields.optional_number("clip_qkv"),
        ),
        feed_forward=Moe(
            router=Router(
                num_experts=fields.integer("num_experts", "num_local_experts"),
                experts_per_token=fields.integer("num_experts_per_tok"),
                renormalize=fields.flag("norm_topk_prob"),
                float32_weights=False,
            ),
            expert_width=fields.integer("intermediate_size"),
        ),
    )
    return hf_config.decoder("olmoe", fields, [layer] * hf_config.num_layers(fields))


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    return (
        *rules.decoder_rules(config),
        *rules.QK_NORM_RULES,
        *rules.ROUTER_RULES,
        *rules.MOE_RULES,
        *rules.FUSED_MOE_RULES,
    )
