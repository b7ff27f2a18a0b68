"""Llama 4: attention in chunks with positions, and everywhere without; routing on the input.

The text part of a checkpoint that also reads images, or a checkpoint of that part alone.
"""

from collections.abc import Mapping
from typing import Any

from moejax.config import (
    Attention,
    AttentionTemperature,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Router,
    SharedExpert,
)
from moejax.errors import ConfigError
from moejax_converters import fused, hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "attention_bias": False,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = hf_config.text_fields(hf, _DEFAULTS, "llama4_text")
    hf_config.check_plain(fields)
    width = fields.integer("intermediate_size")
    dense = Mlp(width=fields.integer("intermediate_size_mlp"))
    moe = Moe(
        router=Router(
            num_experts=fields.integer("num_local_experts", "num_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            score="sigmoid",
            renormalize=False,
            float32_weights=False,
        ),
        expert_width=width,
        weights_input=True,
        shared=SharedExpert(width=width, gated=False),
    )
    sparse = _sparse_layers(fields)
    layers = [
        LayerKind(attention=attention, feed_forward=moe if n in sparse else dense)
        for n, attention in enumerate(_attention(fields))
    ]
    return hf_config.decoder("llama4_text", fields, layers)


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    moe = rules.LAYER + r"feed_forward\."
    target = r"layers.\1.feed_forward."
    return (
        *rules.decoder_rules(config),
        Rule(moe + r"(gate|up|down)_proj\.weight", target + r"\2.weight"),
        Rule(moe + r"shared_expert\.(gate|up|down)_proj\.weight", target + r"shared.\2.weight"),
        Rule(moe + r"router\.weight", target + "router.weight"),
        Rule(moe + r"experts\.gate_up_proj", r"layers.\1.experts", fused.gate_up_columns),
        Rule(moe + r"experts\.down_proj", r"layers.\1.experts", fused.down_columns),
        Skip(r"(?:model\.)?(?:vision_model|multi_modal_projector)\..*", "images", unserved=True),
    )


def _attention(fields: Fields) -> list[Attention]:
    """That of each layer."""
    rope = hf_rope.rope(fields, pairing="neighbors")
    has_qk_norm = fields.flag("use_qk_norm")
    temperature = _temperature(fields)
    chunk = fields.optional_integer("attention_chunk_size")
    rotated = _rotated_layers(fields)
    supported = ("full_attention", *["chunked_attention"] * (chunk is not None))
    default = [supported[-1] if is_rotated else "full_attention" for is_rotated in rotated]
    kinds = hf_config.layer_types(fields, default, *supported)
    return [
        hf_config.attention(
            fields,
            rope=rope if is_rotated else None,
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            qk_norm="rotated" if is_rotated and has_qk_norm else "none",
            chunk=chunk if kind == "chunked_attention" else None,
            temperature=None if is_rotated else temperature,
        )
        for is_rotated, kind in zip(rotated, kinds, strict=True)
    ]


def _rotated_layers(fields: Fields) -> list[bool]:
    """Which layers have positions: 1 in `no_rope_layers`."""
    count = hf_config.num_layers(fields)
    # transformers takes an empty list for none.
    if fields.value("no_rope_layers") in (None, []):
        interval = fields.integer("no_rope_layer_interval")
        return [(n + 1) % interval != 0 for n in range(count)]
    marks = fields.integers("no_rope_layers")
    if len(marks) < count or not set(marks) <= {0, 1}:
        raise ConfigError(
            f"config.json: no_rope_layers is {marks}, needed a list of 0 and 1, one per layer, "
            f"for {count} layers"
        )
    return [mark == 1 for mark in marks[:count]]


def _sparse_layers(fields: Fields) -> set[int]:
    """Which layers have routed experts."""
    if fields.value("moe_layers") is not None:
        return set(fields.integers("moe_layers"))
    step = fields.integer("interleave_moe_layer_step")
    return set(range(step - 1, hf_config.num_layers(fields), step))


def _temperature(fields: Fields) -> AttentionTemperature | None:
    """The setting is true or false, or a number, as in the first published files."""
    is_on = fields.value("attn_temperature_tuning")
    if not isinstance(is_on, int | float):
        raise ConfigError(
            f"config.json: attn_temperature_tuning is {is_on!r}, needed true, false or a number"
        )
    scale = fields.nonnegative("attn_scale")
    if not is_on or not scale:
        return None
    return AttentionTemperature(scale=scale, floor=fields.number("floor_scale"))
