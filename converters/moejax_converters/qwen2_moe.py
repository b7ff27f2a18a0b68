"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside a gated shared expert; biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from moejax.config import LayerKind, Mlp, ModelConfig, Moe, Router, SharedExpert
from moejax_converters import hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
    "qkv_bias": True,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    hf_config.check_plain(fields)
    sparse = hf_config.sparse_layers(fields)
    windows = _windows(fields, len(sparse))
    dense = Mlp(width=fields.integer("intermediate_size"))
    moe = Moe(
        router=Router(
            num_experts=fields.integer("num_experts", "num_local_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            renormalize=fields.flag("norm_topk_prob"),
            float32_weights=False,
        ),
        expert_width=fields.integer("moe_intermediate_size"),
        shared=SharedExpert(width=fields.integer("shared_expert_intermediate_size"), gated=True),
    )
    layers = [
        LayerKind(
            attention=hf_config.attention(
                fields,
                rope=hf_rope.rope(fields),
                qkv_bias=fields.flag("qkv_bias"),
                window=window,
            ),
            feed_forward=moe if is_sparse else dense,
        )
        for is_sparse, window in zip(sparse, windows, strict=True)
    ]
    return hf_config.decoder("qwen2_moe", fields, layers)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    shared = r"layers.\1.feed_forward.shared."
    return (
        *rules.decoder_rules(config),
        *rules.MLP_RULES,
        *rules.ROUTER_RULES,
        *rules.MOE_RULES,
        *rules.FUSED_MOE_RULES,
        Rule(
            rules.LAYER + r"mlp\.shared_expert\.(gate|up|down)_proj\.weight", shared + r"\2.weight"
        ),
        Rule(rules.LAYER + r"mlp\.shared_expert_gate\.weight", shared + "router.weight"),
    )


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    window = hf_config.window(fields)
    border = fields.integer("max_window_layers", least=0)
    default = [
        "sliding_attention" if window and n % 2 == 0 and n < border else "full_attention"
        for n in range(num_layers)
    ]
    supported = ("full_attention", *["sliding_attention"] * (window is not None))
    kinds = hf_config.layer_types(fields, default, *supported)
    return [window if kind == "sliding_attention" else None for kind in kinds]
