"""DeepSeek V2, V3 and Kimi-K2: what their config.json means."""

import math

import pytest

from converters import checkpoints
from moejax.config import (
    ExpertGroups,
    LayerKind,
    Mla,
    Mlp,
    Moe,
    Rope,
    Router,
    SharedExpert,
    YarnScaling,
)
from moejax.errors import ConfigError
from moejax_converters.families import model_config

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 8,
}


def read(family, **changes):
    return model_config(checkpoints.config_of(family, **changes))


def test_v2_by_hand():
    config = read("deepseek_v2", routed_scaling_factor=16.0, num_experts_per_tok=2)
    attention = Mla(
        num_heads=4,
        q_latent_size=None,
        latent_size=20,
        nope_size=12,
        rope_size=4,
        value_size=10,
        scale=0.25,
        rope=Rope(theta=1e4, pairing="neighbors"),
        latent_norm_epsilon=1e-6,
    )
    moe = Moe(
        router=Router(
            num_experts=4,
            experts_per_token=2,
            renormalize=False,
            float32_weights=True,
            float32_logits=True,
            groups=ExpertGroups(count=2, kept=1, best=1),
            scale=16.0,
        ),
        expert_width=24,
        shared=SharedExpert(width=48, gated=False),
    )
    dense = LayerKind(attention=attention, feed_forward=Mlp(width=72))
    sparse = LayerKind(attention=attention, feed_forward=moe)
    assert config.layers == (dense, sparse, sparse)
    assert (config.family, config.norm, config.norm_epsilon) == ("deepseek_v2", "rms", 1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2"])
def test_v3_by_hand(family):
    config = read(family)
    attention = Mla(
        num_heads=4,
        q_latent_size=16,
        latent_size=20,
        nope_size=12,
        rope_size=4,
        value_size=10,
        scale=0.25,
        rope=Rope(theta=1e4, pairing="neighbors"),
        latent_norm_epsilon=1e-6,
        bias=True,
    )
    router = Router(
        num_experts=4,
        experts_per_token=2,
        renormalize=True,
        float32_weights=True,
        score="sigmoid",
        float32_logits=True,
        choice_bias=True,
        groups=ExpertGroups(count=2, kept=1, best=2),
        scale=2.5,
    )
    assert config.layers[0] == LayerKind(attention=attention, feed_forward=Mlp(width=72))
    assert config.layers[1].attention == attention
    assert config.moe == Moe(
        router=router, expert_width=24, shared=SharedExpert(width=24, gated=False)
    )
    assert config.family == family


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize(
    ("changes", "factor", "magnitude"),
    [
        ({}, 0.0707 * math.log(40) + 1, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 0.1 * math.log(40) + 1, 1.0),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            0.05 * math.log(40) + 1,
            (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
        ),
        ({"mscale": None, "mscale_all_dim": None}, 1.0, 0.1 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.0, 0.1 * math.log(40) + 1),
        ({"factor": 0.5}, 1.0, 1.0),
    ],
)
def test_yarn_multiplies_the_scores_or_cosine_and_sine(family, changes, factor, magnitude):
    attention = read(family, rope_scaling=YARN | changes).layers[0].attention
    assert attention.scale == pytest.approx(0.25 * factor**2, rel=1e-14)
    scaling = attention.rope.scaling
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-14)
    assert scaling == YarnScaling(
        factor=changes.get("factor", 40.0),
        original_length=8,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        magnitude=scaling.magnitude,
    )


def test_queries_come_straight_or_through_a_latent():
    hf = checkpoints.config_of("deepseek_v3")
    assert model_config(hf | {"q_lora_rank": None}).layers[0].attention.q_latent_size is None
    del hf["q_lora_rank"]
    assert model_config(hf).layers[0].attention.q_latent_size == 1536


def test_switches():
    attention = read("deepseek_v3", rope_interleave=False, attention_bias=False).layers[0].attention
    assert (attention.rope.pairing, attention.bias) == ("half", False)
    router = read("deepseek_v3", norm_topk_prob=False).moe.router
    assert not router.renormalize
    assert read("deepseek_v2", topk_method="greedy").moe.router.groups is None
    assert read("deepseek_v3", n_group=1).moe.router.groups is None
    assert read("deepseek_v3", topk_group=2).moe.router.groups is None
    assert read("deepseek_v3", n_shared_experts=3).moe.shared.width == 72
    assert read("deepseek_v3", first_k_dense_replace=0).layers[0].moe is not None


def test_the_head_size_that_transformers_writes_is_not_read():
    assert read("deepseek_v3", head_dim=4) == read("deepseek_v3")


COMMON = [
    ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
    ({"moe_layer_freq": 2}, r"moe_layer_freq 2 is not supported \(supported: None, 1\)"),
    ({"num_key_value_heads": 2}, r"num_key_value_heads 2 is not supported \(supported: None, 4\)"),
    ({"n_shared_experts": 0}, r"n_shared_experts is 0, needed an integer of at least 1"),
    ({"first_k_dense_replace": 3}, r"no layer has routed experts"),
    ({"kv_lora_rank": 0}, r"kv_lora_rank is 0, needed an integer of at least 1"),
    ({"q_lora_rank": -1}, r"q_lora_rank is -1, needed an integer of at least 1"),
    ({"attention_bias": 1}, r"attention_bias is 1, needed true or false"),
    ({"routed_scaling_factor": 0}, r"routed_scaling_factor is 0, needed a positive number"),
    ({"num_experts": 5}, r"n_routed_experts 4 and num_experts 5 disagree"),
    ({"qk_rope_head_dim": 5}, r"head size 5 is odd: rotary positions need pairs"),
    ({"rope_scaling": YARN | {"mscale_all_dim": "1"}}, r"mscale_all_dim is '1', needed a positive"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1}},
        r"mscale_all_dim is 1",
    ),
]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize(("changes", "message"), COMMON)
def test_refuses_by_name_and_value(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"scoring_func": "sigmoid"}, r"scoring_func 'sigmoid' is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, r"topk_method 'noaux_tc' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, r"norm_topk_prob True is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, r"mlp_bias True is not supported \(supported: False\)"),
        ("deepseek_v2", {"num_experts_per_tok": None}, r"num_experts_per_tok is None, needed an i"),
        ("deepseek_v2", {"n_group": None}, r"n_group is None, needed an integer of at least 1"),
        ("deepseek_v2", {"n_group": 3}, r"4 experts in 3 groups, of which 1 are kept"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, r"topk_method 'greedy' is not supported"),
        ("deepseek_v3", {"n_group": 4}, r"4 experts in 4 groups, of which 1 are kept"),
        ("deepseek_v3", {"topk_group": 3}, r"3 groups of experts are kept, of 2"),
        ("deepseek_v3", {"rope_interleave": 1}, r"rope_interleave is 1, needed true or false"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers is -1, need"),
        ("kimi_k2", {"num_mtp_layers": 2}, r"num_nextn_predict_layers 1 and num_mtp_layers 2 dis"),
    ],
)
def test_refuses_by_name_and_value_of_one_family(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(family, **changes)
