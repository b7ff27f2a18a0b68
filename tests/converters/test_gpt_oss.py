"""gpt-oss: what its config.json means."""

import dataclasses
import math

import pytest

from converters import checkpoints
from moejax.config import Attention, ClampedSwiglu, LayerKind, Moe, Rope, Router, YarnScaling
from moejax.errors import ConfigError
from moejax_converters.families import model_config

SLIDING, FULL = "sliding_attention", "full_attention"


def read(**changes):
    return model_config(checkpoints.config_of("gpt_oss", **changes))


def windows(**changes):
    return [kind.attention.window for kind in read(**changes).layers]


def test_by_hand():
    config = read()
    sliding = Attention(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        scale=8**-0.5,
        # The class has these, where the file has none.
        rope=Rope(
            theta=1e4,
            scaling=YarnScaling(
                factor=32.0,
                original_length=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                magnitude=0.1 * math.log(32) + 1,
            ),
        ),
        qkv_bias=True,
        output_bias=True,
        window=8,
        sinks=True,
    )
    moe = Moe(
        router=Router(
            num_experts=4,
            experts_per_token=2,
            renormalize=True,
            float32_weights=False,
            bias=True,
        ),
        expert_width=24,
        activation=ClampedSwiglu(limit=7.0, alpha=1.702),
        expert_bias=True,
    )
    layer = LayerKind(attention=sliding, feed_forward=moe)
    full = dataclasses.replace(layer, attention=dataclasses.replace(sliding, window=None))
    assert config.layers == (layer, full, layer)
    assert (config.family, config.norm, config.norm_epsilon) == ("gpt_oss", "rms_float32", 1e-5)


def test_positions_of_the_file_count():
    parameters = {"rope_type": "default", "rope_theta": 7.0}
    assert read(rope_parameters=parameters).layers[0].attention.rope == Rope(theta=7.0)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    scaling = read(rope_scaling=yarn).layers[0].attention.rope.scaling
    assert (scaling.factor, scaling.original_length, scaling.truncate) == (2.0, 32, True)


def test_windows():
    assert windows() == [8, None, 8]
    assert windows(layer_types=[FULL, SLIDING, SLIDING]) == [None, 8, 8]
    assert windows(sliding_window=None) == [128, None, 128]
    full = checkpoints.config_of("gpt_oss", layer_types=[FULL] * 3) | {"sliding_window": None}
    assert model_config(full).layers[0].attention.window is None


def test_switches():
    config = read(attention_bias=False, swiglu_limit=5, swiglu_alpha=1.5, experts_per_token=2)
    part = config.layers[0].attention
    assert (part.qkv_bias, part.output_bias) == (False, False)
    assert config.moe.activation == ClampedSwiglu(limit=5.0, alpha=1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported \(supported: silu\)"),
        ({"experts_per_token": 3}, r"num_experts_per_tok 2 and experts_per_token 3 disagree"),
        ({"swiglu_limit": 0}, r"swiglu_limit is 0, needed a positive number"),
        ({"swiglu_alpha": "1"}, r"swiglu_alpha is '1', needed a positive number"),
        ({"layer_types": ["chunked_attention"] * 3}, r"needed a list of 3, one per layer, of slid"),
        ({"sliding_window": -1}, r"sliding_window is -1, needed an integer of at least 1"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"rope type 'dynamic' is not supported"),
    ],
)
def test_refuses_by_name_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_windows_need_a_size():
    hf = checkpoints.config_of("gpt_oss") | {"sliding_window": None}
    with pytest.raises(ConfigError, match=r"sliding_window is None, but layer_types has sliding_a"):
        model_config(hf)
