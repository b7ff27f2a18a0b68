"""Mixtral: every layer has routed experts, whose weights are divided by their sum."""

from collections.abc import Mapping
from typing import Any

from moejax.config import LayerKind, ModelConfig, Moe, Router
from moejax_converters import hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    layer = LayerKind(
        attention=hf_config.attention(
            fields,
            rope=hf_rope.rope(fields),
            window=fields.optional_integer("sliding_window"),
        ),
        feed_forward=Moe(
            router=Router(
                num_experts=fields.integer("num_local_experts", "num_experts"),
                experts_per_token=fields.integer("num_experts_per_tok"),
                renormalize=True,
                float32_weights=True,
            ),
            expert_width=fields.integer("intermediate_size"),
        ),
    )
    return hf_config.decoder("mixtral", fields, [layer] * hf_config.num_layers(fields))


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    return (
        *rules.decoder_rules(config),
        Rule(
            rules.LAYER + r"block_sparse_moe\.gate\.weight", r"layers.\1.feed_forward.router.weight"
        ),
        *rules.MIXTRAL_EXPERT_RULES,
        *rules.ROUTER_RULES,
        *rules.FUSED_MOE_RULES,
    )
