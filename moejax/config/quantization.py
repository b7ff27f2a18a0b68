"""How the weights of a checkpoint are stored as nested codes."""

import dataclasses
from typing import Any

from moejax.errors import ConfigError

DENSE_WIDTH = 16
"""The width of weights that are stored as they are."""
MIN_BITS, MAX_BITS = 2, 8
# Atoms have so many rows: the rows that share a table lie in one atom.
MAX_ROWS_PER_TABLE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Codes of `parent_bits` bits, of which the first b, from `seed_bits` on, are weights too."""

    seed_bits: int
    parent_bits: int
    gate_up_rows_per_table: int = 1
    """Neighbouring rows that share a table: a power of two, 64 at most."""
    down_rows_per_table: int = 1
    linears: tuple[tuple[str, int], ...] = ()
    """Stacked dense tensors that are stored as codes too, with their rows per table, sorted."""
    has_dense: bool = False
    """Whether all of these weights are stored at width 16 as well."""

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.seed_bits <= self.parent_bits <= MAX_BITS:
            raise ConfigError(
                f"widths from {self.seed_bits} to {self.parent_bits} bits: "
                f"needs {MIN_BITS} <= seed_bits <= parent_bits <= {MAX_BITS}"
            )
        rows = {"gate_up": self.gate_up_rows_per_table, "down": self.down_rows_per_table}
        for name, count in (*rows.items(), *self.linears):
            if count not in (1, 2, 4, 8, 16, 32, MAX_ROWS_PER_TABLE):
                raise ConfigError(
                    f"{name}: {count} rows per table, needs a power of two up to "
                    f"{MAX_ROWS_PER_TABLE}"
                )
        names = [name for name, _ in self.linears]
        if names != sorted(set(names)):
            raise ConfigError(f"linears must be sorted, and each stand once: {names}")

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that are stored, rising; 16 among them if `has_dense`."""
        bits = tuple(range(self.seed_bits, self.parent_bits + 1))
        return (*bits, DENSE_WIDTH) if self.has_dense else bits


def rows_per_table(columns: int, parent_bits: int) -> int:
    """As few rows as keep the tables of the parent width to half a bit per weight.

    A table has 2^parent_bits entries of 16 bits. Short rows would spend more on it than on codes.
    """
    rows = 1
    while rows < MAX_ROWS_PER_TABLE and 16 << parent_bits > rows * columns / 2:
        rows *= 2
    return rows


def quantization_to_json(quantization: Quantization | None) -> dict[str, Any] | None:
    """A value for `moejax.json`."""
    if quantization is None:
        return None
    return dataclasses.asdict(quantization) | {"linears": dict(quantization.linears)}


def quantization_from_json(data: Any) -> Quantization | None:
    """The inverse of `quantization_to_json`. Raises ConfigError, in one line."""
    if data is None:
        return None
    names = {field.name for field in dataclasses.fields(Quantization)}
    if not isinstance(data, dict) or set(data) != names:
        raise ConfigError(f"quantization: needs the keys {sorted(names)}")
    linears, has_dense = data["linears"], data["has_dense"]
    if not isinstance(linears, dict) or not isinstance(has_dense, bool):
        raise ConfigError("quantization: linears is a map, has_dense true or false")
    numbers = {n: v for n, v in data.items() if n not in ("linears", "has_dense")}
    for name, value in (*numbers.items(), *linears.items()):
        if type(value) is not int:
            raise ConfigError(f"quantization: {name} is {value!r}, needs a whole number")
    return Quantization(**numbers, has_dense=has_dense, linears=tuple(sorted(linears.items())))
