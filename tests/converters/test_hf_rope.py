"""Rotary positions of a config.json: every type, where each setting stands, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters import checkpoints
from moejax.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from moejax.errors import ConfigError
from moejax_converters.families import model_config

FACTORS = {"short_factor": [1, 1.5] * 4, "long_factor": [2.0, 4.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", **FACTORS}


def read(parameters, key="rope_parameters", **changes):
    """The positions of a model whose heads have 16 dimensions, and 64 positions at most."""
    hf = checkpoints.config_of("mixtral", **{key: parameters}, **changes)
    return model_config(hf).layers[0].attention.rope


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        (
            LLAMA3 | {"original_max_position_embeddings": 32},
            Llama3Scaling(
                factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32
            ),
        ),
        (
            YARN | {"original_max_position_embeddings": 16},
            YarnScaling(
                factor=4.0,
                original_length=16,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=True,
                magnitude=0.1 * math.log(4) + 1,
            ),
        ),
        (
            LONGROPE | {"original_max_position_embeddings": 16},
            LongRopeScaling(
                short_factors=(1.0, 1.5) * 4,
                long_factors=(2.0, 4.0) * 4,
                # 64 positions are 4 times 16.
                short_magnitude=math.sqrt(1.5),
                long_magnitude=math.sqrt(1.5),
                original_length=16,
            ),
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_every_type_is_read_in_both_spellings(key, parameters, scaling):
    rope = read(parameters, key)
    assert (rope.theta, rope.pairing, rope.active_pairs) == (1e4, "half", None)
    assert rope.scaling == scaling


def test_theta_of_the_settings_counts_before_that_of_the_top_level():
    assert read({"rope_type": "default", "rope_theta": 7}) == Rope(theta=7.0)
    assert read({"rope_type": "default"}) == Rope(theta=1e4)
    assert read({"rope_type": "default"}, rope_theta=None) == Rope(theta=1e6)  # of the class


@pytest.mark.parametrize("parameters", [YARN, LLAMA3, LONGROPE])
@pytest.mark.parametrize(
    ("inner", "top", "length"), [(None, None, 64), (16, None, 16), (None, 8, 8), (16, 16, 16)]
)
def test_the_length_of_pretraining_stands_in_either_place_or_is_that_of_now(
    inner, top, length, parameters
):
    key = "original_max_position_embeddings"
    inner = {} if inner is None else {key: inner}
    assert read(parameters | inner, **{key: top}).scaling.original_length == length


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
        ({"attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.25),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        # Only both together count.
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
    ],
)
def test_the_magnitude_of_yarn(changes, magnitude):
    assert read(YARN | changes).scaling.magnitude == pytest.approx(magnitude, rel=1e-15)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"beta_fast": 16, "beta_slow": 2}, ("beta_fast", "beta_slow"), (16.0, 2.0)),
        ({"beta_fast": None, "beta_slow": None}, ("beta_fast", "beta_slow"), (32.0, 1.0)),
        ({"truncate": False}, ("truncate",), (False,)),
        ({"factor": None, "original_max_position_embeddings": 16}, ("factor",), (4.0,)),
    ],
)
def test_further_settings_of_yarn(changes, field, value):
    scaling = read(YARN | changes).scaling
    assert tuple(getattr(scaling, name) for name in field) == value


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({"original_max_position_embeddings": 16}, math.sqrt(1 + math.log(4) / math.log(16))),
        ({"original_max_position_embeddings": 64}, 1.0),
        (
            {"original_max_position_embeddings": 16, "factor": 2.0},
            math.sqrt(1 + math.log(2) / math.log(16)),
        ),
        ({"original_max_position_embeddings": 16, "attention_factor": 1.5}, 1.5),
    ],
)
def test_the_magnitude_of_longrope(changes, magnitude):
    scaling = read(LONGROPE | changes).scaling
    assert scaling.short_magnitude == scaling.long_magnitude
    assert scaling.long_magnitude == pytest.approx(magnitude, rel=1e-15)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope type 'dynamic' is not supported"),
        ({"rope_type": "mrope"}, r"rope type 'mrope' is not supported \(supported: default, lin"),
        ({"rope_type": "linear"}, r"rope_parameters\.factor is None, needed a positive number"),
        ({"rope_type": "linear", "factor": 0}, r"rope_parameters\.factor is 0, needed a positive"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, r"rope_parameters\.beta_fast is 1"),
        (LLAMA3 | {"low_freq_factor": None}, r"rope_parameters\.low_freq_factor is None, needed"),
        (LLAMA3 | {"truncate": True}, r"truncate is True, but rope type 'llama3' does not have it"),
        (YARN | {"factor": "4"}, r"rope_parameters\.factor is '4', needed a positive number"),
        (YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}, r"rope_parameters\.mscale is -1\.0, need"),
        (YARN | {"truncate": None}, r"rope_parameters\.truncate is None, needed true or false"),
        (YARN | {"truncate": 0}, r"rope_parameters\.truncate is 0, needed true or false"),
        (YARN | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        (YARN | {"beta_fast": 0}, r"rope_parameters\.beta_fast is 0, needed a positive number"),
        (LONGROPE | {"short_factor": None}, r"rope_parameters\.short_factor is None, needed a li"),
        (LONGROPE | {"long_factor": [1] * 7}, r"longrope has 7 factors, a head has 8 pairs"),
        (
            LONGROPE | {"long_factor": [1] * 7 + [0]},
            r"rope_parameters\.long_factor\[7\] is 0, need",
        ),
        (LONGROPE | {"short_mscale": 1.2}, r"rope_parameters\.short_mscale is 1\.2, but rope type"),
        (
            LONGROPE | {"original_max_position_embeddings": 1},
            r"rope_parameters\.original_max_position_embeddings is 1, needed an integer of at leas",
        ),
    ],
)
def test_refuses_by_name_and_value(parameters, message):
    with pytest.raises(ConfigError, match=message):
        read(parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 1.0},
        {"beta_fast": 1e-320, "truncate": True},
        {"factor": 1e-320},
        {"rope_theta": 1e-320},
    ],
)
def test_frequencies_that_are_no_numbers_are_refused(parameters):
    hf = checkpoints.config_of("deepseek_v3")
    hf |= {"rope_parameters": YARN | {"rope_theta": 1e4} | parameters}
    with pytest.raises(ConfigError, match=r"^config\.json: rope_theta and rope_parameters"):
        model_config(hf)


def test_refuses_two_lengths_of_pretraining():
    with pytest.raises(
        ConfigError,
        match=r"original_max_position_embeddings 8 and "
        r"rope_parameters\.original_max_position_embeddings 16 disagree",
    ):
        read(YARN | {"original_max_position_embeddings": 16}, original_max_position_embeddings=8)


@given(
    parameters=st.sampled_from([YARN, LLAMA3, LONGROPE]),
    key=st.sampled_from([*YARN, *LLAMA3, *LONGROPE, "mscale", "mscale_all_dim", "beta_slow"])
    | st.just("original_max_position_embeddings"),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([1]),
)
def test_no_value_of_a_key_breaks_the_reader(parameters, key, value):
    try:
        read(parameters | {key: value})
    except ConfigError as error:
        assert "\n" not in str(error)
