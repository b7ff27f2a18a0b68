"""Gemma 4 with experts: an MLP beside them in every layer, keys that are values too, post-norms.

The text part of a checkpoint that also reads images, or a checkpoint of that part alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.config import (
    Attention,
    LayerKind,
    LinearScaling,
    Mlp,
    MlpAndMoe,
    ModelConfig,
    Moe,
    Rope,
    Router,
)
from moejax.errors import ConfigError
from moejax_converters import fused, hf_config, hf_rope, rules
from moejax_converters.hf_config import Fields
from moejax_converters.rules import Rule, Skip

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "feed_forward.mlp_norm",
    "pre_feedforward_layernorm_2": "feed_forward.moe_norm",
    "post_feedforward_layernorm": "feed_forward_post_norm",
    "post_feedforward_layernorm_1": "feed_forward.mlp_post_norm",
    "post_feedforward_layernorm_2": "feed_forward.moe_post_norm",
}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json`."""
    fields = hf_config.text_fields(hf, _DEFAULTS, "gemma4_text")
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("enable_moe_block", True)
    fields.only("hidden_size_per_layer_input", 0)
    fields.only("num_kv_shared_layers", 0)
    fields.only("use_double_wide_mlp", False)
    fields.only("rope_scaling", None)
    # Images only, which are not read.
    fields.only("use_bidirectional_attention", None, "vision")
    feed_forward = MlpAndMoe(
        mlp=Mlp(width=fields.integer("intermediate_size"), activation="gelu_tanh"),
        moe=Moe(
            router=Router(
                num_experts=fields.integer("num_experts", "num_local_experts"),
                experts_per_token=fields.integer("top_k_experts", "num_experts_per_tok"),
                renormalize=True,
                float32_weights=True,
                input_norm=True,
                expert_scale=True,
            ),
            expert_width=fields.integer("moe_intermediate_size"),
            activation="gelu_tanh",
        ),
    )
    layers = [
        LayerKind(
            attention=attention, feed_forward=feed_forward, post_norms=True, output_scale=True
        )
        for attention in _attention(fields)
    ]
    config = hf_config.decoder("gemma4_text", fields, layers)
    return dataclasses.replace(
        config,
        norm="rms_float32",
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def tensor_rules(config: ModelConfig, hf: Mapping[str, Any]) -> tuple[Rule | Skip, ...]:
    """What the tensors of a checkpoint are."""
    layer, target = rules.LAYER, r"layers.\1.feed_forward."
    return (
        *rules.top_rules(config),
        *(
            Rule(layer + rf"{name}\.weight", rf"layers.\1.{norm}.weight")
            for name, norm in _NORMS.items()
        ),
        *rules.ATTENTION_RULES,
        *rules.QK_NORM_RULES,
        Rule(layer + "layer_scalar", r"layers.\1.output_scale"),
        Rule(layer + r"mlp\.(gate|up|down)_proj\.weight", target + r"mlp.\2.weight"),
        Rule(layer + r"router\.proj\.weight", target + "moe.router.weight"),
        Rule(layer + r"router\.scale", target + "moe.router.input_scale"),
        Rule(layer + r"router\.per_expert_scale", target + "moe.router.expert_scale"),
        Rule(layer + r"experts\.gate_up_proj", r"layers.\1.experts", fused.gate_up_rows),
        Rule(layer + r"experts\.down_proj", r"layers.\1.experts", fused.down_rows),
        Skip(r"(?:model\.)?(?:vision_tower|embed_vision)\..*", "images", unserved=True),
        Skip(r"(?:model\.)?(?:audio_tower|embed_audio)\..*", "sound", unserved=True),
    )


def _attention(fields: Fields) -> list[Attention]:
    """That of each layer."""
    kinds = _layer_types(fields)
    return [
        Attention(
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=kv_heads,
            head_size=head_size,
            scale=1.0,
            rope=_rope(fields, kind, head_size),
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            qk_norm="head",
            v_norm=True,
            keys_are_values=kind == _FULL and fields.flag("attention_k_eq_v"),
            window=fields.integer("sliding_window") if kind == _SLIDING else None,
        )
        for kind, (kv_heads, head_size) in zip(kinds, _heads(fields, kinds), strict=True)
    ]


def _layer_types(fields: Fields) -> list[str]:
    """Without `layer_types`, every sixth layer sees all tokens; the last always does."""
    count = hf_config.num_layers(fields)
    default = [_SLIDING if (n + 1) % 6 else _FULL for n in range(count - 1)] + [_FULL]
    kinds = hf_config.layer_types(fields, default, _SLIDING, _FULL)
    if kinds[-1] != _FULL:
        raise ConfigError(
            f"config.json: {fields.at}layer_types ends with {kinds[-1]!r}, "
            f"but the last layer of this family has {_FULL!r}"
        )
    return kinds


def _heads(fields: Fields, kinds: list[str]) -> list[tuple[int, int]]:
    """KV heads of each layer, and their size."""
    if "per_layer_config" in fields.hf:
        return [
            (layer.integer("num_key_value_heads"), layer.integer("head_dim"))
            for layer in _overrides(fields, len(kinds))
        ]
    kv_heads, size = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    full_heads, full_size = kv_heads, fields.integer("global_head_dim")
    if fields.flag("attention_k_eq_v") and fields.value("num_global_key_value_heads") is not None:
        full_heads = fields.integer("num_global_key_value_heads")
    return [(full_heads, full_size) if kind == _FULL else (kv_heads, size) for kind in kinds]


def _overrides(fields: Fields, count: int) -> list[Fields]:
    """The settings of `count` layers: those of `per_layer_config`, else those of all."""
    common = {name: fields.value(name) for name in ("num_key_value_heads", "head_dim")}
    layers = [Fields(common, {}, at=fields.at) for _ in range(count)]
    given = fields.value("per_layer_config")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(
            f"config.json: {fields.at}per_layer_config is {given!r}, needed an object"
        )
    for key, settings in given.items():
        at = f"{fields.at}per_layer_config.{key}"
        # Python refuses to read thousands of digits.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < count):
            raise ConfigError(f"config.json: {at}: needed a number of a layer, below {count}")
        if not isinstance(settings, dict) or not settings.keys() <= common.keys():
            raise ConfigError(
                f"config.json: {at} is {settings!r}, needed an object of {' and '.join(common)}"
            )
        layers[int(key)] = Fields(common | settings, {}, at=f"{at}.")
    return layers


def _rope(fields: Fields, kind: str, head_size: int) -> Rope:
    """Rotary positions of layers of this kind."""
    by_kind = fields.value("rope_parameters")
    by_kind = _ROPE if by_kind is None else by_kind
    if not isinstance(by_kind, dict) or not isinstance(by_kind.get(kind), dict):
        raise ConfigError(
            f"config.json: {fields.at}rope_parameters is {by_kind!r}, "
            f"needed an object with an object {kind}"
        )
    parameters = Fields(
        by_kind[kind], {"partial_rotary_factor": 1.0}, at=f"{fields.at}rope_parameters.{kind}."
    )
    theta = hf_rope.theta(fields, parameters)
    if hf_rope.rope_type(parameters, "default", "proportional") == "default":
        hf_rope.refuse_partial(fields, parameters)
        hf_rope.refuse_other_keys(parameters, "default", ())
        return Rope(theta=theta)
    hf_rope.refuse_other_keys(parameters, "proportional", ("factor",))
    share = parameters.number("partial_rotary_factor")
    pairs = int(min(share, 2) * head_size // 2)
    if not 1 <= pairs <= head_size // 2:
        raise ConfigError(
            f"config.json: {parameters.at}partial_rotary_factor {share} is not supported: "
            f"a head has {head_size // 2} pairs to rotate"
        )
    factor = 1.0 if parameters.value("factor") is None else parameters.number("factor")
    return Rope(
        theta=theta,
        active_pairs=None if pairs == head_size // 2 else pairs,
        scaling=None if factor == 1 else LinearScaling(factor=factor),
    )
