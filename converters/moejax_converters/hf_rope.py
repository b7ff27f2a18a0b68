"""Rotary positions of a Hugging Face `config.json`.

Their settings stand in `rope_parameters`, which was `rope_scaling` before transformers 5, and
partly at the top level. They mean what transformers' `modeling_rope_utils` makes of them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from moejax.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from moejax.errors import ConfigError
from moejax_converters.hf_config import Fields

_ORIGINAL = "original_max_position_embeddings"
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
# What every type has; the first two are spellings of the type.
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope(
    fields: Fields,
    *,
    pairing: Literal["half", "neighbors"] = "half",
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """Rotary positions that are the same in all layers. `default`: where the file has none."""
    parameters = rope_parameters(fields, default)
    kind = rope_type(parameters, *_SCALINGS)
    refuse_partial(fields, parameters)
    keys, read = _SCALINGS[kind]
    refuse_other_keys(parameters, kind, keys)
    return Rope(theta=theta(fields, parameters), pairing=pairing, scaling=read(fields, parameters))


def rope_parameters(fields: Fields, default: Mapping[str, Any] | None = None) -> Fields:
    """The settings, where they are the same in all layers."""
    parameters = fields.value("rope_scaling", "rope_parameters")
    parameters = (default or {}) if parameters is None else parameters
    name = "rope_parameters" if fields.hf.get("rope_scaling") is None else "rope_scaling"
    at = fields.at + name
    if not isinstance(parameters, dict):
        raise ConfigError(f"config.json: {at} is {parameters!r}, needed an object")
    nested = [name for name in parameters if name.endswith("_attention")]
    if nested:
        raise ConfigError(
            f"config.json: {at} that differ by layer ({', '.join(nested)}) are not supported"
        )
    return Fields(parameters, _DEFAULTS, at=f"{at}.")


def rope_type(parameters: Fields, *supported: str) -> str:
    """The type of scaling, which must be one of these."""
    kind = parameters.hf.get("rope_type", parameters.hf.get("type", "default"))
    if kind not in supported:
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported (supported: {', '.join(supported)})"
        )
    return str(kind)


def refuse_partial(fields: Fields, parameters: Fields) -> None:
    """Refuses positions that rotate a part of a head only."""
    for place in (parameters, fields):
        place.only("partial_rotary_factor", None, 1.0)


def refuse_other_keys(parameters: Fields, kind: str, keys: tuple[str, ...]) -> None:
    """Refuses settings that this type does not have."""
    for name, value in parameters.hf.items():
        if name not in (*_COMMON_KEYS, *keys) and value is not None:
            raise ConfigError(
                f"config.json: {parameters.at}{name} is {value!r}, "
                f"but rope type '{kind}' does not have it"
            )


def theta(fields: Fields, parameters: Fields) -> float:
    """`rope_theta`, of the settings or of the top level."""
    inner = parameters.value("rope_theta")
    return fields.number("rope_theta") if inner is None else parameters.number("rope_theta")


def original_length(fields: Fields, parameters: Fields) -> int:
    """Positions of the pretraining: in the settings, or at the top level, or as many as now."""
    inner = parameters.at + _ORIGINAL
    both = Fields(
        {_ORIGINAL: fields.value(_ORIGINAL), inner: parameters.value(_ORIGINAL)},
        {_ORIGINAL: fields.integer("max_position_embeddings")},
    )
    # Logarithms of it are divided by.
    return both.integer(_ORIGINAL, inner, least=2)


def stretch(fields: Fields, parameters: Fields) -> float:
    """`factor` of yarn and longrope: how many times longer sequences may be."""
    if parameters.value("factor") is not None:
        return parameters.number("factor")
    return fields.integer("max_position_embeddings") / original_length(fields, parameters)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies with where sequences are `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def longrope(
    fields: Fields, parameters: Fields, short_magnitude: float, long_magnitude: float
) -> LongRopeScaling:
    """longrope with these magnitudes."""
    return LongRopeScaling(
        short_factors=parameters.numbers("short_factor"),
        long_factors=parameters.numbers("long_factor"),
        short_magnitude=short_magnitude,
        long_magnitude=long_magnitude,
        original_length=original_length(fields, parameters),
    )


def _plain(fields: Fields, parameters: Fields) -> None:
    return None


def _linear(fields: Fields, parameters: Fields) -> LinearScaling:
    return LinearScaling(factor=parameters.number("factor"))


def _llama3(fields: Fields, parameters: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_frequency_factor=parameters.number("low_freq_factor"),
        high_frequency_factor=parameters.number("high_freq_factor"),
        original_length=original_length(fields, parameters),
    )


def _yarn(fields: Fields, parameters: Fields) -> YarnScaling:
    factor = stretch(fields, parameters)
    magnitude = yarn_magnitude(factor)
    if parameters.value("attention_factor") is not None:
        magnitude = parameters.number("attention_factor")
    elif parameters.value("mscale") and parameters.value("mscale_all_dim"):
        above, below = parameters.number("mscale"), parameters.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return YarnScaling(
        factor=factor,
        original_length=original_length(fields, parameters),
        beta_fast=parameters.number("beta_fast"),
        beta_slow=parameters.number("beta_slow"),
        # For transformers null is false here, and absent is true: null is refused.
        truncate="truncate" not in parameters.hf or parameters.flag("truncate"),
        magnitude=magnitude,
    )


def _longrope(fields: Fields, parameters: Fields) -> LongRopeScaling:
    factor = stretch(fields, parameters)
    magnitude = 1.0
    if parameters.value("attention_factor") is not None:
        magnitude = parameters.number("attention_factor")
    elif factor > 1:
        length = original_length(fields, parameters)
        magnitude = math.sqrt(1 + math.log(factor) / math.log(length))
    return longrope(fields, parameters, magnitude, magnitude)


_SCALINGS: dict[str, tuple[tuple[str, ...], Callable[[Fields, Fields], RopeScaling | None]]] = {
    "default": ((), _plain),
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), _llama3),
    "longrope": (
        ("factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL),
        _longrope,
    ),
    "yarn": (
        (
            *("factor", "beta_fast", "beta_slow", "truncate", _ORIGINAL),
            *("attention_factor", "mscale", "mscale_all_dim"),
        ),
        _yarn,
    ),
}
"""Type → its settings, and how they are read."""
