"""Qwen3-MoE: routed experts only; q and k are normed per head before they are rotated."""

from collections.abc import Mapping
from typing import Any

from moejax.config import LayerKind, Mlp, ModelConfig, Moe, Router
from moejax_converters import hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    attention = hf_config.attention(
        fields,
        rope=hf_rope.rope(fields),
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        qk_norm="head",
        window=hf_config.window(fields),
    )
    moe = Moe(
        router=Router(
            num_experts=fields.integer("num_experts", "num_local_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            renormalize=fields.flag("norm_topk_prob"),
            float32_weights=False,
        ),
        expert_width=fields.integer("moe_intermediate_size"),
    )
    dense = Mlp(width=fields.integer("intermediate_size"))
    layers = [
        LayerKind(attention=attention, feed_forward=moe if is_sparse else dense)
        for is_sparse in hf_config.sparse_layers(fields)
    ]
    return hf_config.decoder("qwen3_moe", fields, layers)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    return (
        *rules.decoder_rules(config),
        *rules.QK_NORM_RULES,
        *rules.MLP_RULES,
        *rules.ROUTER_RULES,
        *rules.MOE_RULES,
        *rules.FUSED_MOE_RULES,
    )
