"""Stretched rotary positions: pair by pair in float64, and what transformers computes."""

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from moejax.layers.rope import frequencies, rotate

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZE, HEADS = 16, 2
THETA, LENGTH = 1000.0, 128

jit_rotate = jax.jit(rotate, static_argnames="rope")


def make_llama3(**options: float) -> Llama3Scaling:
    values: dict[str, Any] = {"factor": 8.0, "low_frequency_factor": 1.0}
    values |= {"high_frequency_factor": 4.0, "original_length": LENGTH}
    return Llama3Scaling(**values | options)


def make_yarn(**options: Any) -> YarnScaling:
    values: dict[str, Any] = {"factor": 4.0, "original_length": LENGTH, "beta_fast": 8.0}
    values |= {"beta_slow": 1.0, "truncate": True, "magnitude": 1.0}
    return YarnScaling(**values | options)


LONGROPE = LongRopeScaling(
    short_factors=tuple(1 + i / 8 for i in range(8)),
    long_factors=tuple(2.0 + i * i for i in range(8)),
    short_magnitude=1.1,
    long_magnitude=1.25,
    original_length=LENGTH,
)


# One pair at a time.


def plain(pair: int) -> float:
    return THETA ** (-2 * pair / SIZE)


def by_llama3(pair: int, scaling: Llama3Scaling) -> float:
    """By wavelengths, as it was published."""
    frequency = plain(pair)
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_length / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_length / scaling.low_frequency_factor:
        return frequency / scaling.factor
    band = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_length / wavelength - scaling.low_frequency_factor) / band
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def by_yarn(pair: int, scaling: YarnScaling) -> float:
    def at(turns: float) -> float:
        """The place, in pairs, where theta^(-2 place / size) * length = 2 pi turns."""
        ratio = scaling.original_length / (2 * math.pi * turns)
        return SIZE / 2 * math.log(ratio, THETA)

    first, last = at(scaling.beta_fast), at(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, SIZE - 1)
    if pair <= first:
        divided = 0.0
    elif pair >= last:
        divided = 1.0
    else:
        divided = (pair - first) / (last - first)
    return plain(pair) * (1 - divided) + plain(pair) / scaling.factor * divided


def wanted_frequencies(rope: Rope, *, uses_long: bool = False) -> tuple[np.ndarray, float]:
    """The frequencies of all pairs, and the factor on cosine and sine."""
    scaling, found, magnitude = rope.scaling, [], 1.0
    for pair in range(SIZE // 2):
        if isinstance(scaling, LinearScaling):
            frequency = plain(pair) / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            frequency = by_llama3(pair, scaling)
        elif isinstance(scaling, YarnScaling):
            frequency, magnitude = by_yarn(pair, scaling), scaling.magnitude
        elif isinstance(scaling, LongRopeScaling):
            factors = scaling.long_factors if uses_long else scaling.short_factors
            magnitude = scaling.long_magnitude if uses_long else scaling.short_magnitude
            frequency = plain(pair) / factors[pair]
        else:
            frequency = plain(pair)
        stands_still = rope.active_pairs is not None and pair >= rope.active_pairs
        found.append(0.0 if stands_still else frequency)
    return np.array(found), magnitude


def by_complex_numbers(
    x: np.ndarray, positions: list[int], rope: Rope, *, uses_long: bool = False
) -> np.ndarray:
    """Each pair as one complex number, turned."""
    frequency, magnitude = wanted_frequencies(rope, uses_long=uses_long)
    turn = magnitude * np.exp(1j * np.array(positions)[:, None, None] * frequency)
    x = x.astype(np.float64)
    if rope.pairing == "half":
        z = (x[..., : SIZE // 2] + 1j * x[..., SIZE // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def make_x(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((tokens, HEADS, SIZE), np.float32)


ROPES = {
    "none": Rope(theta=THETA),
    "linear": Rope(theta=THETA, scaling=LinearScaling(factor=4.0)),
    "llama3": Rope(theta=THETA, scaling=make_llama3()),
    "llama3 without a band": Rope(theta=THETA, scaling=make_llama3(high_frequency_factor=1.0)),
    "yarn": Rope(theta=THETA, scaling=make_yarn(magnitude=1.14)),
    "yarn, not truncated": Rope(theta=THETA, scaling=make_yarn(truncate=False)),
    "yarn, one border": Rope(theta=THETA, scaling=make_yarn(beta_fast=1.0)),
    "yarn, all pairs": Rope(theta=THETA, scaling=make_yarn(beta_fast=200.0, beta_slow=1e-5)),
    "longrope": Rope(theta=THETA, scaling=LONGROPE),
    "some pairs": Rope(theta=THETA, active_pairs=3),
    "some pairs, linear": Rope(theta=THETA, active_pairs=2, scaling=LinearScaling(factor=4.0)),
}
POSITIONS = [0, 1, 17, LENGTH - 1, LENGTH, 3 * LENGTH, 20 * LENGTH]


@pytest.mark.parametrize("pairing", ["half", "neighbors"])
@pytest.mark.parametrize("name", ROPES)
def test_pairs_turn_as_in_float64_up_to_the_original_length_and_far_beyond(
    name: str, pairing: Any
) -> None:
    rope = Rope(
        theta=THETA,
        pairing=pairing,
        active_pairs=ROPES[name].active_pairs,
        scaling=ROPES[name].scaling,
    )
    x = make_x(len(POSITIONS))
    found = jit_rotate(jnp.asarray(x), jnp.array(POSITIONS, jnp.int32), rope=rope)
    # float32 knows an angle of 2560 to 3e-4.
    np.testing.assert_allclose(found, by_complex_numbers(x, POSITIONS, rope), atol=1e-3)


def test_the_ways_to_stretch_differ() -> None:
    """What the tests above compare is not the same for all of them."""
    x = make_x(1)
    turned = {name: by_complex_numbers(x, [20 * LENGTH], rope) for name, rope in ROPES.items()}
    for name, one in turned.items():
        for other_name, other in turned.items():
            assert name == other_name or np.abs(one - other).max() > 0.05


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_rounded_once(name: str) -> None:
    found, magnitude = frequencies(ROPES[name], SIZE)
    wanted, wanted_magnitude = wanted_frequencies(ROPES[name])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    assert magnitude == wanted_magnitude


def test_tokens_take_short_or_long_factors_each_for_itself() -> None:
    x = make_x(len(POSITIONS))
    uses_long = np.arange(len(POSITIONS)) % 2 == 1
    found = jit_rotate(
        jnp.asarray(x),
        jnp.array(POSITIONS, jnp.int32),
        rope=ROPES["longrope"],
        uses_long=jnp.asarray(uses_long),
    )
    short, long = (
        by_complex_numbers(x, POSITIONS, ROPES["longrope"], uses_long=flag)
        for flag in (False, True)
    )
    np.testing.assert_allclose(found, np.where(uses_long[:, None, None], long, short), atol=1e-3)
    # Position 0 does not turn, but its length tells which factors were taken.
    np.testing.assert_allclose(found[0], 1.1 * x[0], rtol=1e-6)


def test_only_longrope_asks_how_long_sequences_become() -> None:
    x, positions = jnp.asarray(make_x(2)), jnp.array([5, 700], jnp.int32)
    for name, rope in ROPES.items():
        one, other = (
            np.asarray(jit_rotate(x, positions, rope=rope, uses_long=jnp.full(2, flag)))
            for flag in (False, True)
        )
        assert (one == other).all() == (name != "longrope")


def test_pairs_that_do_not_turn_keep_their_bits() -> None:
    x = make_x(3)
    positions = jnp.array([0, 9, 70000], jnp.int32)
    found = np.asarray(jit_rotate(jnp.asarray(x), positions, rope=ROPES["some pairs"]))
    for start in (0, SIZE // 2):
        still = slice(start + 3, start + SIZE // 2)
        np.testing.assert_array_equal(found[..., still], x[..., still])
        assert (found[1:, :, start : start + 3] != x[1:, :, start : start + 3]).all()


def test_neighbours_in_bfloat16_are_rounded_once() -> None:
    rope = Rope(theta=THETA, pairing="neighbors", scaling=make_yarn(magnitude=1.14))
    positions = list(range(40))
    x = make_x(40).astype(BFLOAT16)
    found = np.asarray(jit_rotate(jnp.asarray(x), jnp.array(positions, jnp.int32), rope=rope))
    wanted = by_complex_numbers(x, positions, rope).astype(BFLOAT16)
    assert found.dtype == BFLOAT16
    # Float32 and float64 may round to different sides, though rarely.
    assert (found != wanted).sum() <= 5


# By hand.


def test_llama3_by_hand() -> None:
    # 1, 0.1 and 0.01 radians per position are 20.05, 2.005 and 0.2005 turns over 126 positions.
    scaling = make_llama3(factor=10.0, original_length=126)
    found, _ = frequencies(Rope(theta=1000.0, scaling=scaling), 6)
    kept = (126 * 0.1 / (2 * math.pi) - 1) / 3  # between 1 and 4 turns
    np.testing.assert_allclose(found, [1, 0.1 * kept + 0.01 * (1 - kept), 0.001], rtol=1e-6)


@pytest.mark.parametrize(
    ("truncate", "kept"), [(False, [1, 1, 1 / 3, 0]), (True, [1, 1, 1 / 2, 0])]
)
def test_yarn_by_hand(truncate: bool, kept: list[float]) -> None:
    # Pair i turns 10^-i radians per position: pair 1 eight times over 160 pi positions, and
    # "pair 2.5" 0.253 times. So the ramp goes from 1 to 2.5, or to 3 where that is rounded up.
    scaling = make_yarn(
        factor=2.0,
        original_length=round(160 * math.pi),
        beta_fast=8.0,
        beta_slow=8 * 10**-1.5,
        truncate=truncate,
    )
    found, _ = frequencies(Rope(theta=1e4, scaling=scaling), 8)
    wanted = [10.0**-i * (share + (1 - share) / 2) for i, share in enumerate(kept)]
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


@given(
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 4.0),
    band=st.sampled_from([0.0, 0.5, 3.0]),
    length=st.integers(16, 100_000),
)
def test_llama3_lies_between_the_frequency_and_its_part(
    factor: float, low: float, band: float, length: int
) -> None:
    scaling = make_llama3(
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=low + band,
        original_length=length,
    )
    found, _ = frequencies(Rope(theta=THETA, scaling=scaling), SIZE)
    wanted = np.array([plain(pair) for pair in range(SIZE // 2)])
    assert (found <= wanted * (1 + 1e-6)).all()
    assert (found >= wanted / factor * (1 - 1e-6)).all()
    turns = length * wanted / (2 * math.pi)
    np.testing.assert_allclose(found[turns > low + band], wanted[turns > low + band], rtol=1e-6)
    np.testing.assert_allclose(found[turns < low], wanted[turns < low] / factor, rtol=1e-6)


# What transformers computes, see record_rope_frequencies.py.

RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "rope_frequencies.json").read_text()
)
RECORDED_LONGROPE = Rope(
    theta=1e4,
    scaling=LongRopeScaling(
        short_factors=tuple(1 + i / 32 for i in range(48)),
        long_factors=tuple(1 + i * i / 32 for i in range(48)),
        short_magnitude=math.sqrt(1 + 5 / 12),  # ln 32 / ln 4096
        long_magnitude=math.sqrt(1 + 5 / 12),
        original_length=4096,
    ),
)
PUBLISHED = {
    "gpt-oss": Rope(
        theta=150000.0,
        scaling=YarnScaling(
            factor=32.0,
            original_length=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            magnitude=0.1 * math.log(32) + 1,
        ),
    ),
    "DeepSeek-V3": Rope(
        theta=10000.0,
        pairing="neighbors",
        scaling=YarnScaling(
            factor=40.0,
            original_length=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=True,
            magnitude=1.0,
        ),
    ),
    "Qwen3 stretched four times": Rope(
        theta=1e6,
        scaling=YarnScaling(
            factor=4.0,
            original_length=32768,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=True,
            magnitude=0.1 * math.log(4) + 1,
        ),
    ),
    "Llama-4-Scout": Rope(
        theta=5e5,
        pairing="neighbors",
        scaling=Llama3Scaling(
            factor=16.0,
            low_frequency_factor=1.0,
            high_frequency_factor=1.0,
            original_length=8192,
        ),
    ),
    "Llama-3.1": Rope(
        theta=5e5,
        scaling=Llama3Scaling(
            factor=8.0,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
            original_length=8192,
        ),
    ),
    "longrope, short": RECORDED_LONGROPE,
    "longrope, long": RECORDED_LONGROPE,
    "Gemma-4, full attention": Rope(theta=1e6, active_pairs=64),
}


def test_every_record_is_compared() -> None:
    assert RECORDED.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    wanted = np.array(RECORDED[name]["inv_freq"])
    found, magnitude = frequencies(
        PUBLISHED[name], 2 * len(wanted), uses_long=name == "longrope, long"
    )
    # Transformers computes in float32.
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    assert magnitude == pytest.approx(RECORDED[name]["attention_factor"], rel=1e-12)
