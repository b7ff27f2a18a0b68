"""The width of every linear: what an engine is given, and what a file of widths holds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from moejax.arena.geometry import Geometry
from moejax.config import DENSE_WIDTH
from moejax.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Widths:
    """A width for every linear of a model."""

    experts: Int32[np.ndarray, "moe_layers experts 2"]
    """Of gate_up and down."""
    linears: Int32[np.ndarray, " linears"]
    """Of dense tensors that are stored as codes, as `Geometry.linears` numbers them."""

    def pages(self, geometry: Geometry) -> int:
        """Pages of the arena that the linears take."""
        return sum(count * runs.pages_at(width) for count, runs, width in _counted(self, geometry))

    def summary(self) -> str:
        """How many linears have which width: `4 bits: 120, 3 bits: 8`."""
        values, counts = np.unique(
            np.concatenate([self.experts.reshape(-1), self.linears]), return_counts=True
        )
        found = zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True)
        return ", ".join(f"{width} bits: {count}" for width, count in found)


def _counted(widths: Widths, geometry: Geometry) -> Any:
    for which, runs in enumerate(geometry.expert_runs):
        values, counts = np.unique(widths.experts[..., which], return_counts=True)
        for width, count in zip(values.tolist(), counts.tolist(), strict=True):
            yield count, runs, width
    for linear in geometry.linears:
        for width in widths.linears[linear.first : linear.first + linear.repeats].tolist():
            yield 1, geometry.runs_of(linear.shape), width


def uniform(geometry: Geometry, width: int, linear_width: int | None = None) -> Widths:
    """The same width for all experts, and one for all other linears (None: the same)."""
    shape = (geometry.num_moe_layers, geometry.num_experts, 2)
    others = width if linear_width is None else linear_width
    return Widths(np.full(shape, width, np.int32), np.full(geometry.num_linears, others, np.int32))


def check_width(geometry: Geometry, width: int, what: str) -> None:
    """Raises ConfigError if linears are not stored at a width."""
    if width in geometry.widths:
        return
    quantization = geometry.quantization
    if quantization is None:
        raise ConfigError(
            f"{what} {width}: the model is not quantised and has width 16 only: "
            "moejax-convert --quantize any-precision stores it at others"
        )
    if width > quantization.parent_bits:
        also = ", and 16" if quantization.has_dense else ""
        if width == DENSE_WIDTH:
            also = ": moejax-convert --keep-dense stores width 16 too"
        raise ConfigError(
            f"{what} {width}: the model is stored with {quantization.parent_bits} bits at most"
            + also
        )
    raise ConfigError(
        f"{what} {width}: the model is stored with {quantization.seed_bits} bits at least"
    )


def widths_from_json(data: Any, geometry: Geometry, source: str) -> Widths:
    """Widths of `{"experts": [layer][expert][gate_up, down], "linears": {name: [repeat]}}`.

    `linears` may be left out where there are none.

    Raises ConfigError, in one line that begins with `source`.
    """
    if not isinstance(data, dict) or not {"experts"} <= set(data) <= {"experts", "linears"}:
        raise ConfigError(f"{source}: needs the key experts, and linears where there are any")
    shape = (geometry.num_moe_layers, geometry.num_experts, 2)
    experts = _array(data["experts"], shape, f"{source}: experts")
    named = data.get("linears", {})
    wanted = [linear.name for linear in geometry.linears]
    if not isinstance(named, dict) or sorted(named) != sorted(wanted):
        raise ConfigError(f"{source}: linears must be {wanted}")
    linears = np.zeros(geometry.num_linears, np.int32)
    for linear in geometry.linears:
        of_name = _array(named[linear.name], (linear.repeats,), f"{source}: {linear.name}")
        linears[linear.first : linear.first + linear.repeats] = of_name
    for width in np.unique(np.concatenate([experts.reshape(-1), linears])).tolist():
        check_width(geometry, width, f"{source}: width")
    return Widths(experts, linears)


def _array(value: Any, shape: Sequence[int], what: str) -> Int32[np.ndarray, "..."]:
    """Nested lists of whole numbers of this shape."""
    level = [value]
    for size in shape:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise ConfigError(f"{what} must be lists of {' x '.join(map(str, shape))} widths")
        level = [child for part in level for child in part]
    if not all(type(width) is int and 0 <= width <= 16 for width in level):
        raise ConfigError(f"{what} must hold whole numbers from 2 to 16")
    return np.array(value, np.int32).reshape(tuple(shape))
