"""Rotary positions and the ways to stretch them."""

import dataclasses
from typing import Annotated, Literal

import pydantic

from moejax.config.values import STRICT, Positive, PositiveFloat
from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    __pydantic_config__ = STRICT
    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

    __pydantic_config__ = STRICT
    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_length: Positive
    """Positions of the pretraining; a frequency is low or high by its turns over these."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies divided by `factor` where they turn few times (Peng et al. 2023, YaRN)."""

    __pydantic_config__ = STRICT
    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_length: Positive
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    """Turns over the original length: at `beta_fast` and more kept, at `beta_slow` divided."""
    truncate: bool
    """The ends of the ramp between them are rounded to whole dimensions."""
    magnitude: PositiveFloat
    """Factor on cosine and sine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own (Ding et al. 2024, LongRoPE).

    A sequence that may grow beyond `original_length` tokens takes the long factors from its start.
    """

    __pydantic_config__ = STRICT
    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[PositiveFloat, ...]
    long_factors: tuple[PositiveFloat, ...]
    short_magnitude: PositiveFloat
    long_magnitude: PositiveFloat
    """Factors on cosine and sine."""
    original_length: Positive


RopeScaling = Annotated[
    LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling,
    pydantic.Field(discriminator="kind"),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: each pair of dimensions turns with a frequency of its own."""

    __pydantic_config__ = STRICT
    theta: PositiveFloat
    pairing: Literal["half", "neighbors"] = "half"
    """Dimension i turns with i + size / 2, or dimension 2 i with 2 i + 1."""
    active_pairs: Positive | None = None
    """Pairs that turn, the fastest; the others stand still. None: all."""
    scaling: RopeScaling | None = None


def check_rope(rope: Rope | None, size: int) -> None:
    """Refuses rotary positions that do not fit a head of `size` dimensions."""
    if size % 2:
        raise ConfigError(f"head size {size} is odd: rotary positions need pairs")
    if rope is None:
        return
    if rope.active_pairs is not None and rope.active_pairs > size // 2:
        raise ConfigError(f"{rope.active_pairs} pairs turn, of {size // 2} of a head")
    if isinstance(rope.scaling, LongRopeScaling):
        for factors in (rope.scaling.short_factors, rope.scaling.long_factors):
            if len(factors) != size // 2:
                raise ConfigError(
                    f"longrope has {len(factors)} factors, a head has {size // 2} pairs"
                )
