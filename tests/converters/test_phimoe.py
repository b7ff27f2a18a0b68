"""Phi-3.5-MoE: what its config.json means."""

import pytest

from converters import checkpoints
from moejax.config import Attention, LayerKind, LongRopeScaling, Moe, Rope, Router
from moejax.errors import ConfigError
from moejax_converters.families import model_config

LONGROPE = checkpoints.CONFIGS["phimoe"]["rope_scaling"]


def read(**changes):
    return model_config(checkpoints.config_of("phimoe", **changes))


def test_by_hand():
    config = read()
    assert set(config.layers) == {
        LayerKind(
            attention=Attention(
                num_heads=4,
                num_kv_heads=2,
                head_size=8,
                scale=8**-0.5,
                rope=Rope(
                    theta=1e4,
                    scaling=LongRopeScaling(
                        short_factors=(1.0, 1.25, 1.5, 2.0),
                        long_factors=(1.0, 2.0, 4.0, 8.0),
                        short_magnitude=1.1,
                        long_magnitude=1.3,
                        original_length=16,
                    ),
                ),
                qkv_bias=True,
                output_bias=True,
            ),
            feed_forward=Moe(
                router=Router(
                    num_experts=4,
                    experts_per_token=2,
                    renormalize=False,
                    float32_weights=False,
                    score="sparsemixer",
                    jitter=0.01,
                ),
                expert_width=40,
            ),
        )
    }
    assert (config.family, config.norm, config.head_bias) == ("phimoe", "layer", True)
    assert (config.norm_epsilon, config.long_rope_after, len(config.layers)) == (1e-5, 16, 3)


def test_switches():
    config = read(
        attention_bias=False,
        lm_head_bias=False,
        router_jitter_noise=0,
        sliding_window=8,
        head_dim=8,
    )
    attention = config.layers[0].attention
    assert (attention.qkv_bias, attention.output_bias, attention.window) == (False, False, 8)
    assert (config.head_bias, config.moe.router.jitter) == (False, 0.0)


def test_positions_may_be_plain():
    assert read(rope_scaling=None).layers[0].attention.rope == Rope(theta=1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 1}, r"sparsemixer chooses 2 experts, not 1"),
        ({"router_jitter_noise": -0.1}, r"router_jitter_noise is -0\.1, needed a positive number"),
        ({"router_jitter_noise": False}, r"router_jitter_noise is False, needed a positive number"),
        ({"lm_head_bias": 1}, r"lm_head_bias is 1, needed true or false"),
        (
            {"tie_word_embeddings": True},
            r"lm_head_bias True with tie_word_embeddings True is not supported",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"rope type 'yarn' is not supported"),
        ({"rope_scaling": LONGROPE | {"short_mscale": None}}, r"short_mscale is None, needed a po"),
        ({"rope_scaling": LONGROPE | {"long_mscale": 0}}, r"rope_scaling\.long_mscale is 0"),
        ({"rope_scaling": LONGROPE | {"attention_factor": 1.0}}, r"attention_factor is 1\.0, but"),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1, 2]}},
            r"longrope has 2 factors, a head ha",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
    ],
)
def test_refuses_by_name_and_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)
