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
from moejax_serving.dynamic import offered_widths
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

    `plan` raises CapacityError where they do not fit. With planner dynamic they are the least that
    linears may sink to. With expert_bits auto the widest uniform
    width is taken with which a sequence fits: of max_model_len tokens where that is set, else of as
    many as the model allows, but no more than AUTO_TOKENS. If there is none, that
    which leaves most room.
    """

    def planned(widths: Widths) -> tuple[Widths, tuple[Memory, int]]:
        try:
            return widths, plan(widths)
        except CapacityError as error:
            if checkpoint.quantization is None:
                raise
            raise CapacityError(f"{error} (widths: {widths.summary()})") from error

    others = linear_width(geometry, config)
    if config.planner == "static":
        if checkpoint.quantization is None or config.expert_memory is None:
            raise ConfigError(
                "planner static needs a quantised model: moejax-convert --quantize any-precision"
            )
        return planned(
            static_widths(checkpoint.sensitivity(), geometry, config.expert_memory, others)
        )
    if config.planner == "dynamic":
        return planned(uniform(geometry, offered_widths(geometry, config)[0], others))
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
    most = min(checkpoint.config.max_position_embeddings, AUTO_TOKENS)
    wanted = config.max_model_len or most
    shorter, refused = [], []
    for width in reversed(geometry.widths):
        widths = uniform(geometry, width, others)
        try:
            found = planned(widths)
        except CapacityError as error:
            refused.append((widths.pages(geometry), error))
            continue
        if found[1][1] >= wanted:
            if width != geometry.widths[-1]:
                reason = f"the wider ones leave no room for a sequence of {wanted} tokens"
                logger.info("expert_bits auto: %d bits, since %s", width, reason)
            return found
        shorter.append((width, found))
    if not shorter:
        raise min(refused, key=lambda pair: pair[0])[1]
    # The first of the best: of widths that leave as much room, the widest.
    width, found = max(shorter, key=lambda pair: pair[1][1][1])
    if len(geometry.widths) > 1:
        reason = f"no width leaves room for a sequence of {wanted} tokens, and this leaves most"
        logger.info("expert_bits auto: %d bits, since %s", width, reason)
    return found


def linear_width(geometry: Geometry, config: EngineConfig) -> int:
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
            "expert_bits is neither auto, a width, nor a file of widths: "
            + str(error).replace("\n", "\\n")
        ) from error
    return widths_from_json(data, geometry, str(path))
