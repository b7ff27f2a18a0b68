"""Paged experts as nested codes: widths are data, and each reads what it stands for."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arena.coded import Coded, Placed, Pool, pages_of, place, random_coded
from moejax.arena import format
from moejax.arena.experts import Paged
from moejax.arena.geometry import LinearShape, Runs
from moejax.config import Quantization
from moejax.layers.experts import Stacked, run_experts

HIDDEN, WIDTH, EXPERTS, TOKENS = 40, 20, 6, 11
BITS = Quantization(
    seed_bits=2,
    parent_bits=5,
    gate_up_rows_per_table=1,
    down_rows_per_table=16,
    has_dense=True,
)
SHAPES = (
    LinearShape(parts=2, rows=WIDTH, columns=HIDDEN, rows_per_table=1),
    LinearShape(parts=1, rows=HIDDEN, columns=WIDTH, rows_per_table=16),
)
QUICK = {"xla_backend_optimization_level": 0}


class Setup(NamedTuple):
    """Experts, where their runs lie, and the pages."""

    coded: list[tuple[Coded, Coded]]
    placed: list[tuple[Placed, Placed]]
    pool: Pool
    runs: tuple[Runs, Runs]


def make_setup(dtype: str, bits: Quantization = BITS) -> Setup:
    runs = tuple(
        Runs(shape=shape, dtype=dtype, page_bytes=2048, quantization=bits) for shape in SHAPES
    )
    pool = Pool(1 + EXPERTS * sum(map(pages_of, runs)), 512)
    coded = [
        tuple(random_coded(shape, bits, 2 * e + n) for n, shape in enumerate(SHAPES))
        for e in range(EXPERTS)
    ]
    placed = [
        tuple(place(one, of, pool) for one, of in zip(pair, runs, strict=True)) for pair in coded
    ]
    return Setup(coded, placed, pool, runs)


@partial(jax.jit, static_argnames="runs", compiler_options=QUICK)
def run(tables, runs, arena, host, *inputs):
    """`tables`: gate_up pages, down pages, widths."""
    return run_experts(*inputs, Paged(arena, host, *tables, *runs))


def inputs(dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(format.DTYPES[dtype])
    topk_ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :2].astype(np.int32)
    valid = np.arange(TOKENS) != 4
    weights = rng.random((TOKENS, 2), np.float32)
    return [jnp.asarray(a) for a in (x, topk_ids, weights, valid)]


def tables_at(setup: Setup, widths: np.ndarray, of: np.ndarray | None = None) -> list[jax.Array]:
    resident = widths if of is None else of
    gate_up, down = (
        np.stack(
            [
                setup.placed[e][n].slots(int(widths[e, n]), of=int(resident[e, n]))
                for e in range(EXPERTS)
            ]
        )
        for n in (0, 1)
    )
    return [jnp.asarray(a) for a in (gate_up, down, widths.astype(np.int32))]


def stacked_at(setup: Setup, widths: np.ndarray, dtype: str) -> Stacked:
    gate_up, down = (
        np.stack([setup.coded[e][n].weights(int(widths[e, n]), dtype) for e in range(EXPERTS)])
        for n in (0, 1)
    )
    return Stacked(jnp.asarray(gate_up), jnp.asarray(down[:, 0]))


MIXED = np.array([[2, 5], [3, 3], [16, 4], [5, 16], [4, 2], [16, 16]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_mixture_of_widths_is_one_program(dtype: str) -> None:
    setup, given = make_setup(dtype), inputs(dtype)
    arena, host = jnp.asarray(setup.pool.arena), jnp.asarray(setup.pool.host)
    stacked = jax.jit(run_experts, compiler_options=QUICK)
    before = run._cache_size()
    outputs = []
    for widths in (MIXED, MIXED[::-1], np.full((EXPERTS, 2), 3), np.full((EXPERTS, 2), 16)):
        found = run(tables_at(setup, widths), setup.runs, arena, host, *given)
        wanted = stacked(*given, stacked_at(setup, widths, dtype))
        assert found.dtype == dtype
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
        outputs.append(np.asarray(found).tobytes())
    assert run._cache_size() == before + 1
    assert len(set(outputs)) == len(outputs), "every width has its own weights"


def test_a_lower_width_needs_no_other_pages() -> None:
    """Tables q and q - 1 are resident: lowering the width by one changes nothing else."""
    setup, given = make_setup("float32"), inputs("float32")
    arena, host = jnp.asarray(setup.pool.arena), jnp.asarray(setup.pool.host)
    resident = np.where(MIXED == 16, 5, np.maximum(MIXED, 3))
    found = run(tables_at(setup, resident - 1, resident), setup.runs, arena, host, *given)
    wanted = jax.jit(run_experts)(*given, stacked_at(setup, resident - 1, "float32"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_an_expert_of_width_0_gives_nan_to_its_tokens_only() -> None:
    setup, given = make_setup("float32"), inputs("float32")
    arena, host = jnp.asarray(setup.pool.arena), jnp.asarray(setup.pool.host)
    topk_ids, valid = np.asarray(given[1]), np.asarray(given[3])
    for linear in (0, 1):
        widths = MIXED.copy()
        widths[1, linear] = 0
        found = np.asarray(run(tables_at(setup, widths), setup.runs, arena, host, *given))
        lost = (topk_ids == 1).any(axis=1) & valid
        assert 0 < lost.sum() < valid.sum()
        np.testing.assert_array_equal(np.isnan(found).any(axis=1), lost)
        assert np.isnan(found[lost]).all()
        wanted = jax.jit(run_experts)(*given, stacked_at(setup, MIXED, "float32"))
        np.testing.assert_allclose(found[~lost], np.asarray(wanted)[~lost], rtol=0, atol=1e-5)
