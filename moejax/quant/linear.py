"""A linear as bit-planes and tables, and what each width costs in accuracy."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped, UInt8, UInt32

from moejax.arena.format import (
    ATOM_BYTES,
    ATOM_ROWS,
    ATOM_WORDS,
    WORD_BITS,
    pad_to,
    plane_words,
)
from moejax.arena.geometry import LinearShape
from moejax.arena.state import decode_codes, look_up
from moejax.quant.clusters import MAX_BORDERS, nested_clusters

# Groups of rows that are clustered at once: their tables of dynamic programming take memory.
_CPU_GROUPS = 64
_GPU_GROUPS = 1024
MAX_WEIGHT = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """The runs of a linear (FORMAT.md section 2), and how far each width is from the weights."""

    planes: UInt32[np.ndarray, "planes words"]
    tables: dict[int, UInt32[np.ndarray, " _"]]
    """By width."""
    errors: dict[int, float]
    """Width → sum of importance * (weight - stored weight)^2."""
    norm: float
    """Sum of importance * weight^2."""

    def runs(self) -> dict[str, UInt32[np.ndarray, " _"]]:
        """By the names that files give them."""
        planes = {f"plane.{p}": run for p, run in enumerate(self.planes)}
        return planes | {f"table.{bits}": run for bits, run in self.tables.items()}


class Quantizing(NamedTuple):
    """A linear that the device is at work on."""

    widths: range
    planes: UInt32[Array, "planes words"]
    tables: list[UInt32[Array, " _"]]
    sums: Float[Array, " sums"]
    """The errors of all widths, then the norm."""
    faults: Bool[Array, " 3"]

    def wait(self) -> QuantizedLinear:
        """The result, once it is there. Raises ValueError, as `quantize_linear`."""
        planes, tables, sums, faults = jax.device_get(self[1:])
        not_finite, too_large, bad_importance = faults.tolist()
        if not_finite:
            raise ValueError("a weight is not finite")
        if too_large:
            raise ValueError(f"a weight is beyond {MAX_WEIGHT:.0f}, the largest float16")
        if bad_importance:
            raise ValueError("an importance is negative or not finite")
        *errors, norm = sums.tolist()
        return QuantizedLinear(
            planes,
            dict(zip(self.widths, tables, strict=True)),
            dict(zip(self.widths, errors, strict=True)),
            norm,
        )


def quantize_linear(
    weights: Float[np.ndarray | Array, "parts rows columns"],
    importance: Float[np.ndarray | Array, "parts rows columns"],
    shape: LinearShape,
    *,
    seed_bits: int,
    parent_bits: int,
    max_borders: int = MAX_BORDERS,
) -> QuantizedLinear:
    """Clusters the rows of a linear, or groups of them, and packs the result.

    Rows of a group are neighbours of the same part. Where all importances of a group are 0, its
    weights count the same.

    Raises:
        ValueError: weights or importances that are not finite, negative importances, or weights
            beyond what a float16 table holds.
    """
    return start_quantizing(
        weights,
        importance,
        shape,
        seed_bits=seed_bits,
        parent_bits=parent_bits,
        max_borders=max_borders,
    ).wait()


def start_quantizing(
    weights: Float[np.ndarray | Array, "parts rows columns"],
    importance: Float[np.ndarray | Array, "parts rows columns"],
    shape: LinearShape,
    *,
    seed_bits: int,
    parent_bits: int,
    max_borders: int = MAX_BORDERS,
) -> Quantizing:
    """As `quantize_linear`, without waiting for the device."""
    wanted = (shape.parts, shape.rows, shape.columns)
    if weights.shape != wanted or importance.shape != wanted:
        raise ValueError(
            f"weights {weights.shape} and importances {importance.shape} of a linear {wanted}"
        )
    values = jnp.asarray(weights, jnp.float32), jnp.asarray(importance, jnp.float32)
    # Errors and sums of squares need float64; the rest of a program is none the wiser.
    with jax.enable_x64(True):
        found = _program(*values, shape, seed_bits, parent_bits, max_borders)
    return Quantizing(range(seed_bits, parent_bits + 1), *found)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _program(
    weights: Float[Array, "parts rows columns"],
    importance: Float[Array, "parts rows columns"],
    shape: LinearShape,
    seed_bits: int,
    parent_bits: int,
    max_borders: int,
) -> tuple[Array, list[Array], Array, Array]:
    size = shape.rows_per_table
    rows = pad_to(shape.rows, size)
    grouped = _grouped(weights, rows, size, "edge")
    # Rows that fill up the last group repeat the last one, and count nothing.
    counted = _grouped(importance, rows, size, "constant")

    def cluster(inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, ...]]:
        found = nested_clusters(
            inputs[0][None],
            inputs[1][None],
            seed_bits=seed_bits,
            parent_bits=parent_bits,
            max_borders=max_borders,
        )
        return found.codes[0], tuple(table[0] for table in found.tables)

    batch = _CPU_GROUPS if jax.default_backend() == "cpu" else _GPU_GROUPS
    codes, tables = lax.map(cluster, (grouped, counted), batch_size=min(batch, len(grouped)))
    tables = tuple(table.astype(jnp.float16) for table in tables)
    sums = []
    for bits, table in enumerate(tables, seed_bits):
        at = (codes >> (parent_bits - bits)).astype(jnp.int32)
        stored = jnp.take_along_axis(table, at, axis=1).astype(jnp.float64)
        missed = grouped.astype(jnp.float64) - stored
        sums.append(jnp.sum(counted.astype(jnp.float64) * missed * missed))
    sums.append(jnp.sum(importance.astype(jnp.float64) * weights.astype(jnp.float64) ** 2))
    codes = codes.reshape(shape.parts, rows, shape.columns)[:, : shape.rows]
    half = pad_to(shape.rows, ATOM_ROWS)
    codes = jnp.pad(codes, ((0, 0), (0, half - shape.rows), (0, 0)))
    planes = pack_planes(codes.reshape(-1, shape.columns), parent_bits)
    faults = [
        ~jnp.all(jnp.isfinite(weights)),
        jnp.any(jnp.abs(weights) > MAX_WEIGHT),
        ~jnp.all((importance >= 0) & jnp.isfinite(importance)),
    ]
    return planes, [_pack_table(t, shape) for t in tables], jnp.stack(sums), jnp.stack(faults)


def _grouped(values: Array, rows: int, size: int, mode: str) -> Array:
    """[groups, size * columns]: rows of each part in groups, the last one filled up."""
    padded = jnp.pad(values, ((0, 0), (0, rows - values.shape[1]), (0, 0)), mode=mode)
    return padded.reshape(-1, size * values.shape[2])


def pack_planes(
    codes: UInt8[Array, "stored_rows columns"], parent_bits: int
) -> UInt32[Array, "planes words"]:
    """Codes as bit-planes, the most significant first, each a run of atoms."""
    rows, columns = codes.shape
    row_words = plane_words(columns)
    padded = jnp.pad(codes, ((0, 0), (0, row_words * WORD_BITS - columns)))
    groups = padded.reshape(rows, row_words, WORD_BITS).astype(jnp.uint32)
    place = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    planes = []
    for plane in range(parent_bits):
        bits = (groups >> jnp.uint32(parent_bits - 1 - plane)) & jnp.uint32(1)
        words = jnp.sum(bits << place[None, None, :], axis=2, dtype=jnp.uint32)
        atoms = words.reshape(rows // ATOM_ROWS, ATOM_ROWS, row_words // ATOM_WORDS, ATOM_WORDS)
        planes.append(atoms.transpose(0, 2, 1, 3).reshape(-1))
    return jnp.stack(planes)


def _pack_table(
    table: Shaped[Array, "groups entries"], shape: LinearShape
) -> UInt32[Array, " words"]:
    """The tables of all stored rows as a run; those of rows that are padding are 0."""
    of_part = table.reshape(shape.parts, -1, table.shape[1])
    stored = shape.stored_rows // shape.parts // shape.rows_per_table
    padded = jnp.pad(of_part, ((0, 0), (0, stored - of_part.shape[1]), (0, 0))).reshape(-1)
    filled = jnp.pad(padded, (0, pad_to(padded.size * 2, ATOM_BYTES) // 2 - padded.size))
    words: UInt32[Array, " words"] = lax.bitcast_convert_type(filled.reshape(-1, 2), jnp.uint32)
    return words


def decode_linear(
    planes: UInt32[np.ndarray, "planes words"],
    table: UInt32[np.ndarray, " _"],
    shape: LinearShape,
    width: int,
) -> Float[Array, "parts rows columns"]:
    """The weights of a width in float32, from its planes (or more) and its table."""
    found: Float[Array, "parts rows columns"] = _decode(
        jnp.asarray(planes[:width]), jnp.asarray(table), shape, width
    )
    return found


@partial(jax.jit, static_argnums=(2, 3))
def _decode(planes: Array, table: Array, shape: LinearShape, width: int) -> Array:
    bits = jnp.asarray(width, jnp.int32)
    values = lax.bitcast_convert_type(table, jnp.float16).reshape(-1).astype(jnp.float32)
    codes = decode_codes(planes, shape, bits)
    weights: Float[Array, "parts rows columns"] = look_up(values, codes, shape, bits)
    return weights
