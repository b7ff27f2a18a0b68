"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, softmax over experts, perhaps in groups."""

from collections.abc import Mapping
from typing import Any

from moejax.config import ExpertGroups, ModelConfig, Router
from moejax_converters import deepseek
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "attention_bias": False,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = Fields(hf, _DEFAULTS)
    fields.only("mlp_bias", False)
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    # The first code divided by the sum, transformers never does.
    fields.only("norm_topk_prob", False)
    groups = None
    if fields.value("topk_method") == "group_limited_greedy":
        groups = ExpertGroups(
            count=fields.integer("n_group"), kept=fields.integer("topk_group"), best=1
        )
    router = Router(
        num_experts=fields.integer("n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        renormalize=False,
        float32_weights=True,
        float32_logits=True,
        groups=groups,
        scale=fields.number("routed_scaling_factor"),
    )
    attention = deepseek.attention(fields, "neighbors")
    return deepseek.decoder("deepseek_v2", fields, attention, router)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    return deepseek.tensor_rules(config)
