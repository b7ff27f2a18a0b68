"""What a quantisation is asked for, and what that means for a model."""

import dataclasses
import re
from pathlib import Path

from moejax.arena.geometry import linear_shapes
from moejax.config import MAX_ROWS_PER_TABLE, ModelConfig, Quantization, rows_per_table
from moejax.errors import ConfigError
from moejax.models.decoder import abstract_params, flatten_params

LINEAR_GROUPS = {
    "attention": r"segments\.\d+\.\d+\.attention\..*weight",
    "shared": r"segments\.\d+\.\d+\.feed_forward\.(moe\.)?shared\.(gate|up|down)\.weight",
}
"""Dense tensors that can be stored as codes too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """What to store."""

    calibration: Path | None
    """A text, or token ids; None: every weight counts the same."""
    seed_bits: int = 3
    parent_bits: int = 6
    rows_per_table: int | None = None
    """Rows that share their tables; None: more than one where rows are short."""
    linears: tuple[str, ...] = ()
    """Of LINEAR_GROUPS."""
    keep_dense: bool = False
    """Store width 16 as well."""
    sequences: int = 128
    length: int = 512
    """Of the calibration, in tokens."""

    def __post_init__(self) -> None:
        if self.seed_bits not in (2, 3):
            raise ConfigError(f"seed_bits must be 2 or 3, got {self.seed_bits}")
        if not self.seed_bits <= self.parent_bits <= 8:
            raise ConfigError(
                f"parent_bits must be from seed_bits ({self.seed_bits}) to 8, "
                f"got {self.parent_bits}"
            )
        if self.sequences < 1 or self.length < 2:
            raise ConfigError(
                "a calibration needs 1 sequence of 2 tokens at least, "
                f"got {self.sequences} of {self.length}"
            )
        if self.rows_per_table not in (None, 1, 2, 4, 8, 16, 32, MAX_ROWS_PER_TABLE):
            raise ConfigError(
                f"rows_per_table must be a power of two up to {MAX_ROWS_PER_TABLE}, "
                f"got {self.rows_per_table}"
            )
        for group in self.linears:
            if group not in LINEAR_GROUPS:
                raise ConfigError(f"linears: {group!r} is none of {', '.join(LINEAR_GROUPS)}")


def make_quantization(config: ModelConfig, options: QuantizeOptions) -> Quantization:
    """What the options mean for a model. Raises ConfigError."""
    shapes = dense_shapes(config)

    def rows(columns: int) -> int:
        return options.rows_per_table or rows_per_table(columns, options.parent_bits)

    names = []
    for group in options.linears:
        found = [
            name
            for name, shape in shapes.items()
            if re.fullmatch(LINEAR_GROUPS[group], name) and len(shape) == 3
        ]
        if not found:
            raise ConfigError(f"quantize-linears: {config.family} here has no {group} projections")
        names += found
    gate_up, down = linear_shapes(config)
    return Quantization(
        seed_bits=options.seed_bits,
        parent_bits=options.parent_bits,
        gate_up_rows_per_table=rows(gate_up.columns),
        down_rows_per_table=rows(down.columns),
        linears=tuple((name, rows(shapes[name][2])) for name in sorted(names)),
        has_dense=options.keep_dense,
    )


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The stacked dense tensors of a model, by name."""
    params = flatten_params(abstract_params(config, config.dtype))
    return {name: tuple(leaf.shape) for name, leaf in params.items()}
