"""Parts of a configuration: how far tokens see, what does not go together, all options in JSON."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import (
    Attention,
    AttentionTemperature,
    ClampedSwiglu,
    ExpertGroups,
    LayerKind,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mla,
    Mlp,
    MlpAndMoe,
    ModelConfig,
    Moe,
    Reach,
    Rope,
    Router,
    SharedExpert,
    YarnScaling,
    config_from_json,
    config_to_json,
    segments_of,
)
from moejax.errors import ConfigError

ROPE = Rope(theta=1e4)


def make_attention(**options: Any) -> Attention:
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.5}
    return Attention(**shape | {"rope": ROPE} | options)


def make_mla(**options: Any) -> Mla:
    sizes = {"latent_size": 12, "nope_size": 8, "rope_size": 4, "value_size": 6}
    shape: dict[str, Any] = {"num_heads": 4, "q_latent_size": None, "scale": 0.5, "rope": ROPE}
    return Mla(**shape | sizes | {"latent_norm_epsilon": 1e-6} | options)


def make_router(**options: Any) -> Router:
    shape: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "renormalize": False}
    return Router(**shape | {"float32_weights": True} | options)


def longrope(*, pairs: int = 4, original_length: int = 64) -> Rope:
    scaling = LongRopeScaling(
        short_factors=(1.0,) * pairs,
        long_factors=(4.0,) * pairs,
        short_magnitude=1.0,
        long_magnitude=1.2,
        original_length=original_length,
    )
    return Rope(theta=1e4, scaling=scaling)


MOE = Moe(router=make_router(), expert_width=12)


def make_config(*layers: LayerKind, **options: Any) -> ModelConfig:
    shape: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "max_position_embeddings": 256}
    shape |= {"norm_epsilon": 1e-6, "tie_embeddings": False, "dtype": "bfloat16"}
    return ModelConfig(**shape | {"family": "family", "segments": segments_of(layers)} | options)


# How far a token sees.


@pytest.mark.parametrize(
    ("reach", "oldest"),
    [
        (Reach(), [0, 0, 0, 0, 0]),
        (Reach(window=1), [0, 3, 4, 7, 8]),
        (Reach(window=4), [-3, 0, 1, 4, 5]),
        (Reach(chunk=4), [0, 0, 4, 4, 8]),
        (Reach(chunk=1), [0, 3, 4, 7, 8]),
    ],
    ids=str,
)
def test_the_oldest_position_that_is_seen(reach: Reach, oldest: list[int]) -> None:
    positions = [0, 3, 4, 7, 8]
    assert [reach.oldest(position) for position in positions] == oldest
    assert reach.oldest(np.array(positions)).tolist() == oldest


@given(
    reach=st.one_of(
        st.builds(Reach, window=st.integers(1, 20)), st.builds(Reach, chunk=st.integers(1, 20))
    ),
    position=st.integers(0, 100),
)
def test_the_oldest_position_never_goes_back(reach: Reach, position: int) -> None:
    assert reach.oldest(position) <= position
    assert reach.oldest(position) <= reach.oldest(position + 1)


def test_reaches_are_those_of_the_attention() -> None:
    assert make_attention().reach == make_mla().reach == Reach()
    assert make_attention(window=3).reach == Reach(window=3)
    assert make_attention(chunk=3).reach == Reach(chunk=3)


def test_values_that_a_token_caches() -> None:
    assert make_attention().cached_values == 2 * 2 * 8
    assert make_attention(keys_are_values=True).cached_values == 2 * 2 * 8
    assert make_mla().cached_values == 12 + 4


# Layers.


def test_the_experts_of_a_layer_are_found_beside_a_dense_mlp_too() -> None:
    mlp = Mlp(width=20)
    dense, moe, both = (
        LayerKind(attention=make_attention(), feed_forward=part)
        for part in (mlp, MOE, MlpAndMoe(mlp=mlp, moe=MOE))
    )
    assert [kind.moe for kind in (dense, moe, both)] == [None, MOE, MOE]
    assert make_config(dense, both, moe, dense).moe_layers == {1: MOE, 2: MOE}


@pytest.mark.parametrize("lengths", [[], [64], [64, 64]], ids=str)
def test_the_length_after_which_longrope_takes_its_long_factors(lengths: list[int]) -> None:
    ropes = [ROPE, None, *(longrope(original_length=length) for length in lengths)]
    layers = [LayerKind(attention=make_attention(rope=rope), feed_forward=MOE) for rope in ropes]
    assert make_config(*layers).long_rope_after == (lengths[0] if lengths else None)


# What does not go together.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_attention(window=4, chunk=4),
            "attention has a window or chunks, not both",
        ),
        (
            lambda: make_attention(rope=Rope(theta=1e4, active_pairs=5)),
            "5 pairs turn, of 4 of a head",
        ),
        (
            lambda: make_attention(rope=longrope(pairs=3)),
            "longrope has 3 factors, a head has 4 pairs",
        ),
        (lambda: make_mla(latent_size=11), "a latent of 11 values is odd"),
        (lambda: make_mla(rope_size=5), "head size 5 is odd: rotary positions need pairs"),
        (
            lambda: make_mla(rope=Rope(theta=1e4, active_pairs=3)),
            "3 pairs turn, of 2 of a head",
        ),
        (
            lambda: ExpertGroups(count=2, kept=3, best=1),
            "3 groups of experts are kept, of 2",
        ),
        (
            lambda: make_router(groups=ExpertGroups(count=3, kept=2, best=1)),
            "8 experts in 3 groups, of which 2 are kept, give no 2 for a token",
        ),
        (
            lambda: make_router(experts_per_token=5, groups=ExpertGroups(count=4, kept=2, best=1)),
            "8 experts in 4 groups, of which 2 are kept, give no 5 for a token",
        ),
        (
            lambda: make_router(groups=ExpertGroups(count=8, kept=4, best=2)),
            "8 experts in 8 groups, of which 4 are kept, give no 2 for a token",
        ),
        (
            lambda: make_router(score="sparsemixer", experts_per_token=3),
            "sparsemixer chooses 2 experts, not 3",
        ),
        (lambda: make_router(jitter=0.1), "jitter is of sparsemixer"),
        *(
            (
                lambda options=options: make_router(score="sparsemixer", **options),
                "sparsemixer has no choice bias, no groups and no renormalization",
            )
            for options in (
                {"choice_bias": True},
                {"renormalize": True},
                {"groups": ExpertGroups(count=2, kept=1, best=1)},
            )
        ),
        (
            lambda: make_config(
                LayerKind(attention=make_attention(rope=longrope()), feed_forward=MOE),
                LayerKind(
                    attention=make_attention(rope=longrope(original_length=32)), feed_forward=MOE
                ),
            ),
            "family: longrope with several original lengths",
        ),
        (
            lambda: make_config(
                LayerKind(attention=make_attention(), feed_forward=MOE),
                tie_embeddings=True,
                head_bias=True,
            ),
            "family: tied embeddings have no head of their own, and so no bias",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make()


# JSON.

EVERYTHING = make_config(
    LayerKind(
        attention=make_attention(
            rope=Rope(theta=1e4, pairing="neighbors", scaling=LinearScaling(factor=2.0)),
            qkv_bias=True,
            output_bias=True,
            qk_norm="rotated",
            v_norm=True,
            keys_are_values=True,
            chunk=16,
            temperature=AttentionTemperature(scale=0.1, floor=8.0),
            sinks=True,
        ),
        feed_forward=Mlp(width=20, activation="gelu_tanh"),
    ),
    LayerKind(
        attention=make_mla(
            q_latent_size=10,
            bias=True,
            rope=Rope(
                theta=1e4,
                active_pairs=1,
                scaling=YarnScaling(
                    factor=4.0,
                    original_length=64,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    truncate=False,
                    magnitude=1.1,
                ),
            ),
        ),
        feed_forward=Moe(
            router=make_router(
                renormalize=True,
                score="sigmoid",
                float32_logits=True,
                bias=True,
                choice_bias=True,
                groups=ExpertGroups(count=4, kept=2, best=2),
                scale=2.5,
                input_norm=True,
                expert_scale=True,
            ),
            expert_width=12,
            activation=ClampedSwiglu(limit=7.0, alpha=1.702),
            expert_bias=True,
            weights_input=True,
            shared=SharedExpert(width=9, gated=False, activation="gelu_tanh"),
        ),
        post_norms=True,
        output_scale=True,
    ),
    LayerKind(
        attention=make_attention(rope=longrope(), qk_norm="projection", window=5, qkv_clip=3.0),
        feed_forward=MlpAndMoe(
            mlp=Mlp(width=20),
            moe=Moe(router=make_router(score="sparsemixer", jitter=0.01), expert_width=12),
        ),
    ),
    LayerKind(
        attention=make_attention(
            rope=Rope(
                theta=1e4,
                scaling=Llama3Scaling(
                    factor=8.0,
                    low_frequency_factor=1.0,
                    high_frequency_factor=4.0,
                    original_length=64,
                ),
            )
        ),
        feed_forward=Mlp(width=20, activation=ClampedSwiglu(limit=7.0, alpha=1.702)),
    ),
    norm="layer",
    embedding_scale=4.0,
    head_bias=True,
    logit_softcap=30.0,
)


def test_every_option_survives_json() -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(EVERYTHING)))) == EVERYTHING


def with_defaults_left_out(value: Any) -> Any:
    """A configuration as JSON without the values that fields have by themselves."""
    if isinstance(value, tuple):
        return [with_defaults_left_out(part) for part in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        field.name: with_defaults_left_out(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default or field.name == "kind"
    }


def test_every_option_may_be_left_out() -> None:
    data = with_defaults_left_out(EVERYTHING)
    assert config_from_json(data) == EVERYTHING
    assert "output_scale" in data["segments"][1]["period"][0]
    assert "output_scale" not in data["segments"][0]["period"][0]


def test_attention_that_does_not_say_its_kind_is_grouped_query_attention() -> None:
    layer = LayerKind(attention=make_attention(window=7), feed_forward=MOE)
    config = make_config(layer)
    data = config_to_json(config)
    del data["segments"][0]["period"][0]["attention"]["kind"]
    assert config_from_json(data) == config


@pytest.mark.parametrize(
    ("layer", "change", "where"),
    [
        (0, {"rope": {"theta": 1e4, "scaling": {"kind": "ntk"}}}, "rope.scaling: .*'longrope'"),
        (0, {"rope": {"theta": 1e4, "pairing": "odd"}}, "rope.pairing: Input should be 'half'"),
        (0, {"temperature": {"scale": 0.1, "floor": 0.0}}, "temperature.floor: .*greater than 0"),
        (0, {"kind": "mla"}, "attention.mla.q_latent_size: Field required"),
        (1, {"q_latent_size": 0}, "attention.mla.q_latent_size: .*greater than 0"),
        (1, {"window": 4}, "attention.mla.window: Unexpected keyword"),
    ],
)
def test_a_wrong_part_is_refused_with_its_place(
    layer: int, change: dict[str, Any], where: str
) -> None:
    data = config_to_json(EVERYTHING)
    data["segments"][layer]["period"][0]["attention"] |= change
    with pytest.raises(ConfigError, match=f"^model configuration: segments.{layer}.*{where}"):
        config_from_json(data)


@pytest.mark.parametrize("jitter", [-0.01, 1e300, float("nan")])
def test_jitter_is_a_number_of_at_least_zero(jitter: float) -> None:
    data = config_to_json(EVERYTHING)
    data["segments"][2]["period"][0]["feed_forward"]["moe"]["router"]["jitter"] = jitter
    where = "segments.2.period.0.feed_forward.mlp_and_moe.moe.router.jitter: "
    with pytest.raises(ConfigError, match=f"^model configuration: {where}"):
        config_from_json(data)
