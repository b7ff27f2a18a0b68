"""Which widths an engine gives its linears."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moejax.arena.geometry import Geometry
from moejax.arena.widths import Widths, check_width, uniform, widths_from_json
from moejax.checkpoint import Checkpoint, strict_json
from moejax.errors import CapacityError, CheckpointError, ConfigError
from moejax_serving.config import EngineConfig
from moejax_serving.static_plan import static_widths

logger = logging.getLogger(__name__)

AUTO_TOKENS = 8192
"""expert_bits auto gives up bits before a sequence of so many tokens no longer fits."""


def choose_widths[Memory](
    checkpoint: Checkpoint,
    geometry: Geometry,
    config: EngineConfig,
    plan: Callable[[Widths], tuple[Memory, int]],
) -> tuple[Widths, tuple[Memory, int]]:
    """The widths that the settings ask for, and the memory plan and max_model_len with them.

    `plan` raises CapacityError where they do not fit. With expert_bits auto the widest uniform
    width is taken with which a sequence fits: of max_model_len tokens where that is set, else of as
    many as the model allows, but no more than AUTO_TOKENS.
    """

    def planned(widths: Widths) -> tuple[Widths, tuple[Memory, int]]:
        try:
            return widths, plan(widths)
        except CapacityError as error:
            if checkpoint.quantization is None:
                raise
            raise CapacityError(f"{error} (widths: {widths.summary()})") from error

    others = _linear_width(geometry, config)
    if config.planner == "static":
        if checkpoint.quantization is None or config.expert_memory is None:
            raise ConfigError(
                "planner static needs a quantised model: moejax-convert --quantize any-precision"
            )
        return planned(
            static_widths(checkpoint.sensitivity(), geometry, config.expert_memory, others)
        )
    if isinstance(config.expert_bits, int):
        check_width(geometry, config.expert_bits, "expert_bits")
        return planned(uniform(geometry, config.expert_bits, others))
    if config.expert_bits != "auto":
        widths = _from_file(Path(config.expert_bits), geometry)
        if config.linear_bits != "auto" and np.any(widths.linears != others):
            raise ConfigError(
                f"linear_bits {others} and {config.expert_bits} say different things: leave it out"
            )
        return planned(widths)
    wanted = min(checkpoint.config.max_position_embeddings, AUTO_TOKENS)
    for width in reversed(geometry.widths[1:]):
        try:
            widths, found = planned(uniform(geometry, width, others))
        except CapacityError:
            continue
        if config.max_model_len is not None or found[1] >= wanted:
            _log_fall(geometry, width)
            return widths, found
    least = planned(uniform(geometry, geometry.widths[0], others))
    _log_fall(geometry, geometry.widths[0])
    return least


def _log_fall(geometry: Geometry, width: int) -> None:
    """Says what expert_bits auto chose, if it is not the widest."""
    if width != geometry.widths[-1]:
        wider = ", ".join(str(w) for w in geometry.widths if w > width)
        logger.info("expert_bits auto: %d bits, since %s do not fit", width, wider)


def _linear_width(geometry: Geometry, config: EngineConfig) -> int:
    if config.linear_bits == "auto":
        return geometry.widths[-1]
    if not geometry.linears:
        raise ConfigError(
            f"linear_bits {config.linear_bits}: only the experts of this model are quantised "
            "(moejax-convert --quantize-linears)"
        )
    check_width(geometry, int(config.linear_bits), "linear_bits")
    return int(config.linear_bits)


def _from_file(path: Path, geometry: Geometry) -> Widths:
    if geometry.quantization is None:
        raise ConfigError(f"expert_bits {path}: the model is not quantised and has width 16 only")
    try:
        data = strict_json.read(path)
    except CheckpointError as error:
        raise ConfigError(
            f"expert_bits is neither auto, a width, nor a file of widths: {error}"
        ) from error
    return widths_from_json(data, geometry, str(path))
