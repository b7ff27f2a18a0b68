"""Linears as planes and tables: against the codec of FORMAT.md, and read back from pages."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.arena import format
from moejax.arena.geometry import LinearShape, Runs
from moejax.arena.state import read_linear
from moejax.config import Quantization
from moejax.quant.clusters import nested_clusters
from moejax.quant.linear import QuantizedLinear, decode_linear, quantize_linear

QUICK = {"xla_backend_optimization_level": 0}
PAGE_BYTES = 2048
PAGE_WORDS = PAGE_BYTES // 4


class Case(NamedTuple):
    shape: LinearShape
    seed_bits: int
    parent_bits: int


CASES = {
    "a table per row": Case(LinearShape(parts=2, rows=24, columns=33), 3, 6),
    "of four rows": Case(LinearShape(parts=1, rows=70, columns=45, rows_per_table=4), 2, 4),
    "of an atom": Case(LinearShape(parts=2, rows=100, columns=7, rows_per_table=64), 3, 8),
}


def inputs(shape: LinearShape, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights and importances; a row has none, and some of the others have none either."""
    rng = np.random.default_rng(seed)
    size = (shape.parts, shape.rows, shape.columns)
    weights = rng.standard_normal(size).astype(np.float32)
    importance = rng.lognormal(0, 2, size).astype(np.float32)
    importance[rng.random(size) < 0.2] = 0
    importance[:, 3] = 0
    return weights, importance


@cache
def quantized(name: str) -> QuantizedLinear:
    shape, seed_bits, parent_bits = CASES[name]
    return quantize_linear(*inputs(shape), shape, seed_bits=seed_bits, parent_bits=parent_bits)


class Plain(NamedTuple):
    """The codes and tables of all stored rows."""

    codes: np.ndarray
    """uint8[stored rows, columns]"""
    tables: dict[int, np.ndarray]
    """float16[tables, 2^b]"""


@cache
def plain(name: str) -> Plain:
    """From the clusters of rows that are grouped here; what is padding is 0."""
    shape, seed_bits, parent_bits = CASES[name]
    size, half = shape.rows_per_table, format.pad_to(shape.rows, 64)
    filled = format.pad_to(shape.rows, size)
    weights, importance = inputs(shape)
    pad = [(0, 0), (0, filled - shape.rows), (0, 0)]
    grouped = [
        np.pad(weights, pad, mode="edge").reshape(-1, size * shape.columns),
        np.pad(importance, pad).reshape(-1, size * shape.columns),
    ]
    with jax.enable_x64(True):
        found = jax.device_get(
            jax.jit(
                partial(nested_clusters, seed_bits=seed_bits, parent_bits=parent_bits),
                compiler_options=QUICK,
            )(*grouped)
        )
    codes = found.codes.reshape(shape.parts, filled, shape.columns)[:, : shape.rows]
    codes = np.pad(codes, [(0, 0), (0, half - shape.rows), (0, 0)])
    tables = {}
    for bits, table in enumerate(found.tables, seed_bits):
        of_part = table.astype(np.float16).reshape(shape.parts, -1, 1 << bits)
        missing = half // size - of_part.shape[1]
        padded = np.pad(of_part, [(0, 0), (0, missing), (0, 0)])
        tables[bits] = padded.reshape(-1, 1 << bits)
    return Plain(codes.reshape(-1, shape.columns), tables)


def weights_at(name: str, width: int) -> np.ndarray:
    """float16[parts, rows, columns]: looked up one by one, from the runs."""
    shape, linear = CASES[name].shape, quantized(name)
    codes = format.decode_planes(linear.planes[:width], shape.stored_rows, shape.columns)
    count = shape.stored_rows // shape.rows_per_table
    table = format.decode_table(linear.tables[width], count, width)
    rows = np.arange(shape.stored_rows) // shape.rows_per_table
    found = table[rows[:, None], codes].reshape(shape.parts, -1, shape.columns)
    return found[:, : shape.rows]


@pytest.mark.parametrize("name", CASES)
def test_planes_and_tables_are_those_of_the_format(name: str) -> None:
    shape, seed_bits, parent_bits = CASES[name]
    found, wanted = quantized(name), plain(name)
    np.testing.assert_array_equal(found.planes, format.encode_planes(wanted.codes, parent_bits))
    assert list(found.tables) == list(range(seed_bits, parent_bits + 1))
    for bits, table in wanted.tables.items():
        np.testing.assert_array_equal(found.tables[bits], format.encode_table(table))
        assert found.tables[bits].nbytes == shape.table_bytes(bits)
    assert all(plane.nbytes == shape.plane_bytes() for plane in found.planes)
    assert list(found.runs()) == [
        *(f"plane.{p}" for p in range(parent_bits)),
        *(f"table.{b}" for b in range(seed_bits, parent_bits + 1)),
    ]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_decoded_at_every_width(name: str) -> None:
    shape, seed_bits, parent_bits = CASES[name]
    linear = quantized(name)
    for width in range(seed_bits, parent_bits + 1):
        # Further planes are not looked at.
        found = decode_linear(linear.planes, linear.tables[width], shape, width)
        np.testing.assert_array_equal(found, weights_at(name, width).astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_the_stored_weights(name: str) -> None:
    weights, importance = (a.astype(np.float64) for a in inputs(CASES[name].shape))
    found = quantized(name)
    assert found.norm == pytest.approx(np.sum(importance * weights**2), rel=1e-12)
    for width, error in found.errors.items():
        missed = weights - weights_at(name, width).astype(np.float64)
        assert error == pytest.approx(np.sum(importance * missed**2), rel=1e-12)
    assert list(found.errors.values()) == sorted(found.errors.values(), reverse=True)
    assert found.errors[CASES[name].seed_bits] < found.norm


# Pages.


class Stored(NamedTuple):
    """Pages in any order, some of them on the host; everything else is poison."""

    arena: np.ndarray
    host: np.ndarray
    slots: dict[int, np.ndarray]
    """Width → page ids, those of its runs only."""


def dense_run(shape: LinearShape, dtype: str) -> np.ndarray:
    weights = inputs(shape)[0].astype(format.DTYPES[dtype])
    return format.encode_dense(format.stack_halves(*weights) if shape.parts == 2 else weights[0])


def runs_of(name: str, dtype: str, *, has_dense: bool) -> Runs:
    shape, seed_bits, parent_bits = CASES[name]
    bits = Quantization(seed_bits=seed_bits, parent_bits=parent_bits, has_dense=has_dense)
    return Runs(shape=shape, dtype=dtype, page_bytes=PAGE_BYTES, quantization=bits)


def store(name: str, runs: Runs) -> Stored:
    named = quantized(name).runs()
    if "dense" in runs.sizes:
        named = {"dense": dense_run(runs.shape, runs.dtype), **named}
    pages = {run: format.to_pages(words, PAGE_WORDS) for run, words in named.items()}
    assert {run: len(of_run) for run, of_run in pages.items()} == {
        run: runs.pages(run) for run in runs.sizes
    }
    total = sum(map(len, pages.values()))
    order = (1 + np.random.default_rng(1).permutation(total)).tolist()
    arena = np.full((total + 1, PAGE_WORDS), format.POISON_WORD, np.uint32)
    host = arena.copy()
    ids: dict[str, list[int]] = {}
    for run, of_run in pages.items():
        for page in of_run:
            at = order.pop()
            on_host = at % 3 == 0
            (host if on_host else arena)[at] = page
            ids.setdefault(run, []).append(~at if on_host else at)
    assert runs.quantization is not None
    slots = {}
    for width in runs.quantization.widths:
        slots[width] = np.zeros(runs.num_slots, np.int32)
        for run in runs.resident(width):
            first = runs.first_slot(run)
            assert (slots[width][first : first + len(ids[run])] == 0).all()
            slots[width][first : first + len(ids[run])] = ids[run]
    return Stored(arena, host, slots)


def reader(runs: Runs) -> Any:
    return jax.jit(
        lambda arena, host, slots, width: read_linear(arena, host, slots, width, runs),
        compiler_options=QUICK,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_pages_are_read_at_the_width_that_they_are_given(name: str, dtype: str) -> None:
    runs = runs_of(name, dtype, has_dense=name != "of four rows")
    stored, read = store(name, runs), reader(runs)
    arena, host = jnp.asarray(stored.arena), jnp.asarray(stored.host)
    for width, slots in stored.slots.items():
        found = np.asarray(read(arena, host, jnp.asarray(slots), jnp.int32(width)))
        wanted = inputs(runs.shape)[0] if width == 16 else weights_at(name, width)
        assert found.tobytes() == wanted.astype(format.DTYPES[dtype]).tobytes(), width
    # One program for all of them.
    assert read._cache_size() == 1


def test_at_width_0_there_is_nothing_whatever_the_slots_name() -> None:
    runs = runs_of("a table per row", "float32", has_dense=True)
    stored, read = store("a table per row", runs), reader(runs)
    arena, host = jnp.asarray(stored.arena), jnp.asarray(stored.host)
    for slots in (np.zeros(runs.num_slots, np.int32), stored.slots[4]):
        found = read(arena, host, jnp.asarray(slots), jnp.int32(0))
        assert np.isnan(found).all()


def test_what_is_not_resident_reads_as_poison() -> None:
    runs = runs_of("a table per row", "float32", has_dense=False)
    stored, read = store("a table per row", runs), reader(runs)
    arena, host = jnp.asarray(stored.arena), jnp.asarray(stored.host)
    # Table 5 is not there at width 4, nor table 3 at width 5; one below is.
    assert np.isnan(read(arena, host, jnp.asarray(stored.slots[4]), jnp.int32(5))).all()
    assert np.isnan(read(arena, host, jnp.asarray(stored.slots[5]), jnp.int32(3))).all()
    found = read(arena, host, jnp.asarray(stored.slots[5]), jnp.int32(4))
    np.testing.assert_array_equal(found, weights_at("a table per row", 4).astype(np.float32))


# Refusals.


@pytest.mark.parametrize(
    ("weight", "importance", "message"),
    [
        (np.nan, 1, "a weight is not finite"),
        (np.inf, 1, "a weight is not finite"),
        (65536, 1, "a weight is beyond 65504, the largest float16"),
        (-1e9, 0, "a weight is beyond 65504, the largest float16"),
        (1, -1e-30, "an importance is negative or not finite"),
        (1, np.nan, "an importance is negative or not finite"),
        (1, np.inf, "an importance is negative or not finite"),
    ],
)
def test_numbers_that_tables_cannot_hold_are_refused(
    weight: float, importance: float, message: str
) -> None:
    shape, seed_bits, parent_bits = CASES["a table per row"]
    weights, importances = inputs(shape)
    weights[1, 5, 7], importances[1, 5, 7] = weight, importance
    with pytest.raises(ValueError, match=f"^{message}$"):
        quantize_linear(weights, importances, shape, seed_bits=seed_bits, parent_bits=parent_bits)


def test_the_largest_float16_is_stored() -> None:
    shape, seed_bits, parent_bits = CASES["a table per row"]
    weights, importances = inputs(shape)
    weights[1, 5, 7], importances[1, 5, 7] = -65504, 1
    found = quantize_linear(
        weights, importances, shape, seed_bits=seed_bits, parent_bits=parent_bits
    )
    read = decode_linear(found.planes, found.tables[6], shape, 6)
    assert float(read[1, 5, 7]) == -65504
    assert np.isfinite(read).all()


def test_arrays_of_another_shape_are_refused() -> None:
    shape, seed_bits, parent_bits = CASES["a table per row"]
    weights, importances = (a[:, :, 1:] for a in inputs(shape))
    with pytest.raises(
        ValueError, match=r"^weights \(2, 24, 32\) and importances \(2, 24, 32\) of"
    ):
        quantize_linear(weights, importances, shape, seed_bits=seed_bits, parent_bits=parent_bits)
