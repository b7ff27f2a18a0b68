"""DeepSeek-V3, R1 and Kimi-K2: latent attention, sigmoid scores with a bias for the choice."""

from collections.abc import Mapping
from typing import Any

from moejax.config import MAX_LAYERS, ExpertGroups, ModelConfig, Router
from moejax_converters import deepseek, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "rope_interleave": True,
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    _num_prediction_layers(fields)  # The rules need it: a fault is found here.
    groups = ExpertGroups(
        count=fields.integer("n_group"), kept=fields.integer("topk_group"), best=2
    )
    router = Router(
        num_experts=fields.integer("n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        score="sigmoid",
        renormalize=fields.flag("norm_topk_prob"),
        float32_weights=True,
        float32_logits=True,
        choice_bias=True,
        groups=None if groups.kept == groups.count else groups,
        scale=fields.number("routed_scaling_factor"),
    )
    attention = deepseek.attention(
        fields, "neighbors" if fields.flag("rope_interleave") else "half"
    )
    return deepseek.decoder(str(fields.value("model_type")), fields, attention, router)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    first = len(config.layers)
    extra = range(first, first + _num_prediction_layers(Fields(hf, _DEFAULTS)))
    return (
        *deepseek.tensor_rules(config),
        Rule(
            rules.LAYER + r"mlp\.gate\.e_score_correction_bias",
            r"layers.\1.feed_forward.router.choice_bias",
        ),
        Skip(
            rules.MODEL + rf"layers\.(?:{'|'.join(map(str, extra))})\..*",
            "prediction of further tokens",
            unserved=True,
        ),
    )


def _num_prediction_layers(fields: Fields) -> int:
    """Layers after the decoder's that predict the tokens after the next one."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return fields.integer(*names, least=0, most=MAX_LAYERS)
