"""Which widths an engine gives its linears."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from moejax.arena.geometry import Geometry
from moejax.arena.widths import Widths, check_width, uniform, widths_from_json
from moejax.checkpoint import Checkpoint, strict_json
from moejax.errors import CapacityError, CheckpointError, ConfigError
from moejax_serving.config import EngineConfig
from moejax_serving.static_plan import static_widths


def choose_widths[Plan](
    checkpoint: Checkpoint,
    geometry: Geometry,
    config: EngineConfig,
    plan: Callable[[Widths], Plan],
) -> tuple[Widths, Plan]:
    """The widths that the settings ask for, and the memory plan with them.

    `plan` raises CapacityError where they do not fit. With expert_bits auto the widest uniform
    width that fits is taken.
    """
    others = _linear_width(geometry, config)
    if config.planner == "static":
        if checkpoint.quantization is None or config.expert_memory is None:
            raise ConfigError(
                "planner static needs a quantised model: moejax-convert --quantize any-precision"
            )
        widths = static_widths(checkpoint.sensitivity(), geometry, config.expert_memory, others)
        return widths, plan(widths)
    if isinstance(config.expert_bits, int):
        check_width(geometry, config.expert_bits, "expert_bits")
        widths = uniform(geometry, config.expert_bits, others)
        return widths, plan(widths)
    if config.expert_bits != "auto":
        widths = _from_file(Path(config.expert_bits), geometry)
        if config.linear_bits != "auto" and np.any(widths.linears != others):
            raise ConfigError(
                f"linear_bits {others} and {config.expert_bits} say different things: leave it out"
            )
        return widths, plan(widths)
    *narrow, widest = (uniform(geometry, width, others) for width in geometry.widths)
    for widths in (widest, *reversed(narrow[1:])):
        try:
            return widths, plan(widths)
        except CapacityError:
            continue
    least = narrow[0] if narrow else widest
    return least, plan(least)


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
