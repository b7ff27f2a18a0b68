"""Llama 4: what its config.json means, alone or within that of a model that reads images."""

import pytest

from converters import checkpoints
from moejax.config import (
    Attention,
    AttentionTemperature,
    LayerKind,
    Mlp,
    Moe,
    Rope,
    Router,
    SharedExpert,
)
from moejax.errors import ConfigError
from moejax_converters.families import model_config

LAYERS = 4


def read(**changes):
    return model_config(checkpoints.config_of("llama4_text", **changes))


def attention(**changes):
    return [kind.attention for kind in read(**changes).layers]


def test_by_hand():
    config = read()
    base = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 8**-0.5}
    rotated = Attention(
        **base, rope=Rope(theta=1e4, pairing="neighbors"), qk_norm="rotated", chunk=8
    )
    anywhere = Attention(
        **base, rope=None, temperature=AttentionTemperature(scale=0.1, floor=8192.0)
    )
    moe = Moe(
        router=Router(
            num_experts=4,
            experts_per_token=1,
            renormalize=False,
            float32_weights=False,
            score="sigmoid",
        ),
        expert_width=24,
        weights_input=True,
        shared=SharedExpert(width=24, gated=False),
    )
    dense = Mlp(width=72)
    assert config.layers == (
        LayerKind(attention=rotated, feed_forward=dense),
        LayerKind(attention=rotated, feed_forward=moe),
        LayerKind(attention=rotated, feed_forward=dense),
        LayerKind(attention=anywhere, feed_forward=moe),
    )
    assert (config.family, config.norm) == ("llama4_text", "rms")


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, [1, 1, 1, 0]),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0]),
        ({"no_rope_layers": [0, 1, 1, 0]}, [0, 1, 1, 0]),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 1]}, [0, 1, 1, 0]),
        ({"no_rope_layers": []}, [1, 1, 1, 0]),
    ],
)
def test_which_layers_have_positions(changes, rotated):
    layers = attention(**changes)
    assert [part.rope is not None for part in layers] == rotated
    assert [part.qk_norm == "rotated" for part in layers] == rotated
    assert [part.chunk == 8 for part in layers] == rotated
    assert [part.temperature is None for part in layers] == rotated


def test_layer_types_say_which_layers_have_chunks():
    kinds = ["chunked_attention", "full_attention", "full_attention", "chunked_attention"]
    layers = attention(layer_types=kinds)
    assert [part.chunk for part in layers] == [8, None, None, 8]
    assert [part.rope is not None for part in layers] == [1, 1, 1, 0]


def test_without_a_chunk_size_no_layer_has_chunks():
    hf = checkpoints.config_of("llama4_text") | {"attention_chunk_size": None}
    assert [kind.attention.chunk for kind in model_config(hf).layers] == [None] * LAYERS
    del hf["attention_chunk_size"]
    assert model_config(hf).layers[0].attention.chunk == 8192


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 0, 1]),
        ({"interleave_moe_layer_step": 1}, [1, 1, 1, 1]),
        ({"interleave_moe_layer_step": 3}, [0, 0, 1, 0]),
        ({"moe_layers": [0, 3]}, [1, 0, 0, 1]),
    ],
)
def test_which_layers_have_experts(changes, sparse):
    assert [kind.moe is not None for kind in read(**changes).layers] == sparse


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({"attn_temperature_tuning": 4}, (0.1, 8192.0)),
        ({"attn_temperature_tuning": False}, None),
        ({"attn_temperature_tuning": 0}, None),
        ({"floor_scale": 16.0, "attn_scale": 0.5}, (0.5, 16.0)),
        ({"attn_scale": 0}, None),
    ],
)
def test_temperature(changes, temperature):
    part = attention(**changes)[3].temperature
    assert (part and (part.scale, part.floor)) == temperature


def test_switches():
    part = attention(use_qk_norm=False, attention_bias=True)[0]
    assert (part.qk_norm, part.qkv_bias, part.output_bias) == ("none", True, True)


def test_a_model_with_images_is_its_text_part():
    assert model_config(checkpoints.config_of("llama4")) == read()
    # What stands in one of the two places counts.
    wrapped = checkpoints.config_of("llama4")
    wrapped["text_config"] |= {
        name: wrapped.pop(name) for name in ("torch_dtype", "tie_word_embeddings")
    }
    assert model_config(wrapped) == read()


def test_the_text_part_may_leave_out_its_type_and_everything():
    config = model_config({"model_type": "llama4", "dtype": "bfloat16"})
    assert config == model_config({"model_type": "llama4_text", "dtype": "bfloat16"})
    assert (len(config.layers), config.hidden_size, config.moe.expert_width) == (48, 5120, 8192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 1}, r"text_config is 1, needed an object of model type 'llama4_text'"),
        (
            {"text_config": {"model_type": "gemma4_text"}},
            r"needed an object of model type 'llama4_",
        ),
        (
            {"text_config": {"hidden_size": "5120"}},
            r"text_config\.hidden_size is '5120', needed an",
        ),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            r"text_config\.tie_word_embeddings False and tie_word_embeddings True disagree",
        ),
        (
            {"dtype": "bfloat16", "text_config": {"dtype": "float32"}},
            r"text_config\.dtype float32 and dtype bfloat16 disagree",
        ),
    ],
)
def test_refuses_a_wrapper_that_does_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config({"model_type": "llama4", "dtype": "bfloat16"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"no_rope_layers": [1, 1]}, r"no_rope_layers is \[1, 1\], needed a list of 0 and 1, one"),
        ({"no_rope_layers": [1, 1, 2, 0]}, r"no_rope_layers is \[1, 1, 2, 0\], needed a list of 0"),
        ({"no_rope_layers": "1110"}, r"no_rope_layers is '1110', needed a list of integers"),
        ({"no_rope_layer_interval": 0}, r"no_rope_layer_interval is 0, needed an integer of at le"),
        ({"moe_layers": []}, r"llama4_text: no layer has routed experts"),
        ({"moe_layers": [True]}, r"moe_layers is \[True\], needed a list of integers"),
        ({"interleave_moe_layer_step": 0}, r"interleave_moe_layer_step is 0, needed an integer"),
        ({"attention_chunk_size": 0}, r"attention_chunk_size is 0, needed an integer of at least"),
        ({"attn_temperature_tuning": "yes"}, r"attn_temperature_tuning is 'yes', needed true, fal"),
        ({"attn_scale": -1}, r"attn_scale is -1, needed a positive number"),
        ({"floor_scale": 0}, r"floor_scale is 0, needed a positive number"),
        ({"use_qk_norm": 1}, r"use_qk_norm is 1, needed true or false"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            r"needed a list of 4, one per layer, of full_",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, r"rope type 'dynamic' is not supported"),
    ],
)
def test_refuses_by_name_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_chunks_need_a_size():
    hf = checkpoints.config_of("llama4_text", layer_types=["chunked_attention"] * LAYERS)
    with pytest.raises(ConfigError, match=r"needed a list of 4, one per layer, of full_attention$"):
        model_config(hf | {"attention_chunk_size": None})
