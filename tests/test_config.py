"""Model configurations: segments, places, and the JSON of moejax.json."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import (
    Attention,
    LayerKind,
    LayerPlace,
    Mlp,
    ModelConfig,
    Moe,
    Rope,
    Router,
    Segment,
    SharedExpert,
    config_from_json,
    config_to_json,
    segments_of,
)
from moejax.errors import ConfigError

ATTENTION = Attention(
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    scale=0.5,
    rope=Rope(theta=10000.0),
    qkv_bias=True,
    qk_norm="head",
    qkv_clip=8.0,
    window=16,
)
ROUTER = Router(num_experts=4, experts_per_token=2, renormalize=True, float32_weights=False)
DENSE = LayerKind(attention=ATTENTION, feed_forward=Mlp(width=24))
MOE = LayerKind(
    attention=ATTENTION,
    feed_forward=Moe(router=ROUTER, expert_width=12, shared=SharedExpert(width=20, gated=True)),
)
KINDS = {
    "a": DENSE,
    "b": MOE,
    "c": LayerKind(attention=ATTENTION, feed_forward=Mlp(width=25)),
}


def make_config(segments: tuple[Segment, ...]) -> ModelConfig:
    return ModelConfig(
        family="family",
        vocab_size=50,
        hidden_size=16,
        max_position_embeddings=64,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="bfloat16",
        segments=segments,
    )


def spelled(segments: tuple[Segment, ...]) -> str:
    """Segments in letters: 'a*2 ab*3'."""
    letters = {kind: letter for letter, kind in KINDS.items()}
    return " ".join(
        "".join(letters[kind] for kind in segment.period) + f"*{segment.repeats}"
        for segment in segments
    )


# Segments.


@pytest.mark.parametrize(
    ("layers", "segments"),
    [
        ("", ""),
        ("a", "a*1"),
        ("bbbb", "b*4"),
        ("aabbb", "a*2 b*3"),
        ("abab", "ab*2"),
        ("abbbbb", "a*1 b*5"),
        ("aabaabaab", "aab*3"),
        ("abababa", "ab*3 a*1"),
        ("abc", "a*1 b*1 c*1"),
        ("aaab", "a*3 b*1"),
    ],
)
def test_layers_are_cut_into_repetitions(layers: str, segments: str) -> None:
    assert spelled(segments_of([KINDS[letter] for letter in layers])) == segments


@given(st.text("abc", max_size=12).map(lambda text: [KINDS[letter] for letter in text]))
def test_segments_concatenated_are_the_layers(layers: list[LayerKind]) -> None:
    segments = segments_of(layers)
    assert [k for segment in segments for k in segment.period * segment.repeats] == layers
    assert sum(segment.num_layers for segment in segments) == len(layers)


@given(
    period=st.text("abc", min_size=1, max_size=4),
    repeats=st.integers(2, 6),
)
def test_a_repetition_is_one_segment(period: str, repeats: int) -> None:
    (segment,) = segments_of([KINDS[letter] for letter in period * repeats])
    assert segment.num_layers == len(period) * repeats
    assert len(segment.period) <= len(period)


def test_a_segment_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="a segment needs at least one kind of layer"):
        Segment(period=(), repeats=2)


# Layers and places.


def test_layers_and_places_are_in_order() -> None:
    config = make_config(
        (Segment(period=(DENSE,), repeats=1), Segment(period=(MOE, DENSE), repeats=2))
    )
    assert config.layers == (DENSE, MOE, DENSE, MOE, DENSE)
    assert config.places == (
        LayerPlace(segment=0, index=0, repeat=0),
        LayerPlace(segment=1, index=0, repeat=0),
        LayerPlace(segment=1, index=1, repeat=0),
        LayerPlace(segment=1, index=0, repeat=1),
        LayerPlace(segment=1, index=1, repeat=1),
    )
    assert list(config.moe_layers) == [1, 3]
    assert config.moe is MOE.feed_forward


@given(st.text("abc", max_size=12).filter(lambda text: "b" in text))
def test_every_layer_is_where_its_place_says(text: str) -> None:
    config = make_config(segments_of([KINDS[letter] for letter in text]))
    assert len(set(config.places)) == len(config.layers)
    for kind, place in zip(config.layers, config.places, strict=True):
        assert config.segments[place.segment].period[place.index] == kind
        assert place.repeat < config.segments[place.segment].repeats


def test_a_model_without_routed_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="family: no layer has routed experts"):
        make_config((Segment(period=(DENSE,), repeats=2),))


def test_layers_with_different_experts_are_refused() -> None:
    other = LayerKind(attention=ATTENTION, feed_forward=Moe(router=ROUTER, expert_width=13))
    message = r"family: layers with different experts, \[\(4, 12\), \(4, 13\)\]"
    with pytest.raises(ConfigError, match=message):
        make_config((Segment(period=(MOE, other), repeats=1),))


# Parts that do not go together.


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ConfigError, match="5 query heads are not a multiple of 2 KV heads"):
        Attention(num_heads=5, num_kv_heads=2, head_size=8, scale=1.0, rope=Rope(theta=1.0))


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="head size 7 is odd: rotary positions need pairs"):
        Attention(num_heads=4, num_kv_heads=2, head_size=7, scale=1.0, rope=Rope(theta=1.0))


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 experts per token of 4 experts"):
        Router(num_experts=4, experts_per_token=5, renormalize=True, float32_weights=True)


# JSON.

CONFIG = make_config((Segment(period=(DENSE,), repeats=1), Segment(period=(MOE,), repeats=2)))


def test_a_configuration_survives_json() -> None:
    text = json.dumps(config_to_json(CONFIG))
    assert config_from_json(json.loads(text)) == CONFIG


def test_a_default_may_be_left_out() -> None:
    data = config_to_json(CONFIG)
    del data["segments"][0]["period"][0]["attention"]["output_bias"]
    assert config_from_json(data) == CONFIG


def changed(path: str, value: Any) -> Any:
    """The JSON of CONFIG with one value set."""
    data = copy.deepcopy(config_to_json(CONFIG))
    at: Any = data
    *folders, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in folders:
        at = at[key]
    at[last] = value
    return data


FEED_FORWARD = "segments.1.period.0.feed_forward"


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("vocab_size", 0, "vocab_size: "),
        ("vocab_size", "many", "vocab_size: "),
        ("vocab_size", None, "vocab_size: "),
        ("norm_epsilon", float("nan"), "norm_epsilon: "),
        ("norm_epsilon", -1e-6, "norm_epsilon: "),
        ("norm_epsilon", 2e38, "norm_epsilon: .*less than or equal to 10{38}"),
        ("hidden_size", 2**31, "hidden_size: .*less than or equal to 2147483647"),
        ("segments.0.period.0.attention.scale", 1e300, "attention.gqa.scale: .*less than"),
        ("segments.0.period.0.attention.rope.theta", 1e300, "rope.theta: .*less than or equal to"),
        ("segments.0.period.0.attention.window", 2**31, "attention.gqa.window: .*less than"),
        ("dtype", "float16", "dtype: Input should be 'bfloat16' or 'float32'"),
        ("segments.0.repeats", -1, "segments.0.repeats: "),
        ("segments.0.period.0.attention.window", 0, "segments.0.period.0.attention.gqa.window: "),
        ("segments.0.period.0.attention.qk_norm", "heads", "attention.gqa.qk_norm: Input should"),
        ("segments.0.period.0.attention.rope.theta", float("inf"), "attention.gqa.rope.theta: "),
        (f"{FEED_FORWARD}.expert_width", 1.5, r"feed_forward.moe.expert_width: "),
        (f"{FEED_FORWARD}.activation", "gelu", "feed_forward.moe.activation.*'silu'"),
        (f"{FEED_FORWARD}.kind", "experts", "feed_forward: .*'mlp', 'moe', 'mlp_and_moe'"),
        ("segments.0.period.0.attention.kind", "mqa", "attention: .*'gqa', 'mla'"),
        (f"{FEED_FORWARD}.router.num_experts", [], "feed_forward.moe.router.num_experts: "),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: str, value: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=f"^model configuration: .*{where}"):
        config_from_json(changed(path, value))


def test_layers_are_counted_before_they_are_listed() -> None:
    with pytest.raises(ConfigError, match="family: 1000000002 layers, at most 4096 are read"):
        config_from_json(changed("segments.0.repeats", 10**9))


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("speed", "speed"),
        ("segments.0.name", "segments.0.name"),
        (
            "segments.0.period.0.attention.rope.factor",
            "segments.0.period.0.attention.gqa.rope.factor",
        ),
        (f"{FEED_FORWARD}.bias", "segments.1.period.0.feed_forward.moe.bias"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place(path: str, where: str) -> None:
    with pytest.raises(ConfigError, match=f"^model configuration: {where}: Unexpected keyword"):
        config_from_json(changed(path, 1))


def test_a_missing_key_is_refused_with_its_place() -> None:
    data = config_to_json(CONFIG)
    del data["segments"][1]["period"][0]["attention"]["num_heads"]
    message = "model configuration: segments.1.period.0.attention.gqa.num_heads: Field required"
    with pytest.raises(ConfigError, match=message):
        config_from_json(data)


@pytest.mark.parametrize("data", [None, [], "config", 7])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="^model configuration"):
        config_from_json(data)


def test_parts_that_clash_are_refused_from_json_too() -> None:
    data = changed("segments.0.period.0.attention.num_kv_heads", 3)
    with pytest.raises(ConfigError, match="4 query heads are not a multiple of 3 KV heads"):
        config_from_json(data)
