"""Gemma 4 with experts: what its config.json means, alone or within that of a larger model."""

import dataclasses

import pytest

from converters import checkpoints
from moejax.config import Attention, LayerKind, LinearScaling, Mlp, MlpAndMoe, Moe, Rope, Router
from moejax.errors import ConfigError
from moejax_converters.families import model_config

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
}


def read(**changes):
    return model_config(checkpoints.config_of("gemma4_text", **changes))


def attention(**changes):
    return [kind.attention for kind in read(**changes).layers]


def full_rope(**changes):
    return ROPE | {FULL: ROPE[FULL] | changes}


def test_by_hand():
    config = read(final_logit_softcapping=30.0)
    base = {"num_heads": 4, "scale": 1.0, "qk_norm": "head", "v_norm": True}
    sliding = Attention(**base, num_kv_heads=2, head_size=8, rope=Rope(theta=1e4), window=8)
    full = Attention(
        **base,
        num_kv_heads=1,
        head_size=16,
        rope=Rope(theta=1e6, active_pairs=2),
        keys_are_values=True,
    )
    feed_forward = MlpAndMoe(
        mlp=Mlp(width=72, activation="gelu_tanh"),
        moe=Moe(
            router=Router(
                num_experts=4,
                experts_per_token=2,
                renormalize=True,
                float32_weights=True,
                input_norm=True,
                expert_scale=True,
            ),
            expert_width=24,
            activation="gelu_tanh",
        ),
    )
    layer = LayerKind(
        attention=sliding, feed_forward=feed_forward, post_norms=True, output_scale=True
    )
    assert config.layers == (layer, layer, dataclasses.replace(layer, attention=full))
    assert (config.family, config.norm, config.tie_embeddings) == (
        "gemma4_text",
        "rms_float32",
        True,
    )
    assert (config.embedding_scale, config.logit_softcap) == (32**0.5, 30.0)


def test_both_names_of_the_sizes_of_full_layers_mean_the_same():
    new = checkpoints.config_of(
        "gemma4_text",
        global_head_dim=None,
        num_global_key_value_heads=None,
        per_layer_config={"02": {"head_dim": 16, "num_key_value_heads": 1}},
    )
    assert model_config(new) == read()


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        # A number of heads of full layers is for those whose keys are values.
        ({"attention_k_eq_v": False}, [(2, 8), (2, 8), (2, 16)]),
        ({"num_global_key_value_heads": None}, [(2, 8), (2, 8), (2, 16)]),
        ({"per_layer_config": {}}, [(2, 8)] * 3),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, [(2, 4), (2, 8), (2, 8)]),
    ],
)
def test_sizes_of_each_layer(changes, heads):
    assert [(part.num_kv_heads, part.head_size) for part in attention(**changes)] == heads


def test_without_layer_types_every_sixth_layer_is_full_and_the_last():
    layers = attention(layer_types=None, num_hidden_layers=8)
    assert [part.window is None for part in layers] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert [part.keys_are_values for part in layers] == [0, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        (ROPE, Rope(theta=500.0, active_pairs=2)),
        (full_rope(partial_rotary_factor=0.9), Rope(theta=500.0, active_pairs=7)),
        (full_rope(partial_rotary_factor=None), Rope(theta=500.0)),
        (full_rope(partial_rotary_factor=1), Rope(theta=500.0)),
        (
            full_rope(factor=4.0),
            Rope(theta=500.0, active_pairs=2, scaling=LinearScaling(factor=4.0)),
        ),
        (full_rope(factor=1), Rope(theta=500.0, active_pairs=2)),
        (full_rope(rope_type="default", partial_rotary_factor=None), Rope(theta=500.0)),
        (full_rope(rope_theta=None), Rope(theta=10000.0, active_pairs=2)),  # of the top level
    ],
)
def test_positions_differ_by_layer(parameters, rope):
    layers = attention(rope_parameters=parameters)
    assert layers[2].rope == rope
    assert layers[0].rope == Rope(theta=100.0)


def test_a_model_with_images_is_its_text_part():
    assert model_config(checkpoints.config_of("gemma4")) == read()


def test_switches():
    config = read(attention_bias=True, use_bidirectional_attention="vision")
    part = config.layers[0].attention
    assert (part.qkv_bias, part.output_bias, config.logit_softcap) == (True, True, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, r"hidden_activation 'silu' is not supported"),
        ({"enable_moe_block": False}, r"enable_moe_block False is not supported"),
        ({"enable_moe_block": None}, r"enable_moe_block False is not supported"),
        ({"hidden_size_per_layer_input": 256}, r"hidden_size_per_layer_input 256 is not supported"),
        ({"hidden_size_per_layer_input": None}, r"hidden_size_per_layer_input 256 is not support"),
        ({"num_kv_shared_layers": 1}, r"num_kv_shared_layers 1 is not supported \(supported: 0\)"),
        ({"use_double_wide_mlp": True}, r"use_double_wide_mlp True is not supported"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention 'all' is not supp"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling \{'type': 'linear'\} is not support"),
        ({"num_experts": None}, r"num_experts is None, needed an integer of at least 1"),
        ({"top_k_experts": 3}, r"top_k_experts 3 and num_experts_per_tok 2 disagree"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size is None, needed an integer"),
        ({"final_logit_softcapping": 0}, r"final_logit_softcapping is 0, needed a positive number"),
        ({"layer_types": [SLIDING] * 3}, r"layer_types ends with 'sliding_attention', but the las"),
        ({"layer_types": [FULL]}, r"layer_types is .*, needed a list of 3, one per layer, of slid"),
        ({"global_head_dim": 0}, r"global_head_dim is 0, needed an integer of at least 1"),
        ({"per_layer_config": [1]}, r"per_layer_config is \[1\], needed an object"),
        ({"per_layer_config": {"3": {}}}, r"per_layer_config\.3: needed a number of a layer, belo"),
        ({"per_layer_config": {"9" * 5000: {}}}, r"needed a number of a layer, below 3$"),
        ({"per_layer_config": {"x": {}}}, r"per_layer_config\.x: needed a number of a layer, belo"),
        ({"per_layer_config": {"0": 1}}, r"per_layer_config\.0 is 1, needed an object of num_key"),
        ({"per_layer_config": {"0": {"skip": ["mlp"]}}}, r"per_layer_config\.0 is \{'skip': \['m"),
        ({"per_layer_config": {"0": {"head_dim": 0}}}, r"per_layer_config\.0\.head_dim is 0, need"),
        ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters is .*, needed an object with"),
        ({"rope_parameters": ROPE | {FULL: None}}, r"needed an object with an object full_attenti"),
        (
            {"rope_parameters": full_rope(rope_type="yarn")},
            r"rope type 'yarn' is not supported \(supported: default, proportional\)",
        ),
        (
            {"rope_parameters": full_rope(rope_type="default")},
            r"rope_parameters\.full_attention\.partial_rotary_factor 0\.25 is not supported",
        ),
        (
            {"rope_parameters": full_rope(partial_rotary_factor=1.5)},
            r"rope_parameters\.full_attention\.partial_rotary_factor 1\.5 is not supported: a head",
        ),
        (
            {"rope_parameters": full_rope(partial_rotary_factor=0.1)},
            r"partial_rotary_factor 0\.1 is not supported: a head has 8 pairs to rotate",
        ),
        (
            {"rope_parameters": full_rope(beta_fast=2)},
            r"rope_parameters\.full_attention\.beta_fast is 2, but rope type 'proportional' does",
        ),
    ],
)
def test_refuses_by_name_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)
