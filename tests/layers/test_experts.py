"""Tiles of tokens, and the products of tokens with their experts, against loops in float64."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena import format
from moejax.arena.experts import ExpertWeights, Paged
from moejax.arena.geometry import LinearShape, Runs
from moejax.layers.experts import Experts, Stacked, run_experts
from moejax.pallas.tiles import Tiles, make_tiles

# Tiles.

jit_tiles = jax.jit(make_tiles, static_argnames=("num_experts", "size"))


def tiles_of(topk_ids: np.ndarray, valid: np.ndarray, *, num_experts: int, size: int) -> Tiles:
    found = jit_tiles(jnp.asarray(topk_ids), jnp.asarray(valid), num_experts=num_experts, size=size)
    return jax.tree.map(np.asarray, found)


def slots_of(tiles: Tiles, size: int, num_valid: int) -> list[tuple[int, list[int]]]:
    """(expert, slots) of each used tile: up to where the next one starts."""
    starts = [*tiles.start[tiles.used].tolist(), num_valid]
    return [
        (int(expert), tiles.order[start : min(start + size, end)].tolist())
        for expert, start, end in zip(
            tiles.expert[tiles.used], starts[:-1], starts[1:], strict=True
        )
    ]


def test_tiles_by_hand() -> None:
    topk_ids = np.array([[2, 0], [2, 3], [1, 1], [2, 0]], np.int32)
    valid = np.array([True, True, False, True])
    tiles = tiles_of(topk_ids, valid, num_experts=4, size=2)
    # Slots 2 t and 2 t + 1 are of token t. Expert 0 has 1 and 7, 2 has 0, 2 and 6, 3 has 3.
    assert tiles.order.tolist() == [1, 7, 0, 2, 6, 3, 4, 5]
    assert slots_of(tiles, 2, 6) == [(0, [1, 7]), (2, [0, 2]), (2, [6]), (3, [3])]
    assert tiles.start[~tiles.used].tolist() == [8] * 4


class TileCase(NamedTuple):
    tokens: int
    k: int
    num_experts: int
    size: int


TILE_CASES = (
    TileCase(1, 1, 1, 1),
    TileCase(6, 3, 3, 6),
    TileCase(9, 2, 40, 4),
    TileCase(20, 2, 5, 4),
    TileCase(20, 1, 2, 20),
)


@given(case=st.sampled_from(TILE_CASES), data=st.data())
def test_every_valid_slot_is_in_one_tile_of_its_expert(case: TileCase, data: st.DataObject) -> None:
    expert = st.integers(0, case.num_experts - 1)
    chosen = data.draw(st.lists(expert, min_size=1, max_size=case.tokens * case.k))
    topk_ids = np.resize(np.array(chosen, np.int32), (case.tokens, case.k))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=case.tokens, max_size=case.tokens)))
    tiles = tiles_of(topk_ids, valid, num_experts=case.num_experts, size=case.size)
    wanted = {
        (int(topk_ids[token, i]), token * case.k + i)
        for token in np.flatnonzero(valid)
        for i in range(case.k)
    }
    found = slots_of(tiles, case.size, len(wanted))
    pairs = [(expert, slot) for expert, slots in found for slot in slots]
    assert sorted(pairs) == sorted(wanted)  # each once, and none of an invalid token
    assert all(slots for _, slots in found)  # no tile of an expert without tokens
    assert sorted(tiles.order.tolist()) == list(range(topk_ids.size))
    assert (tiles.start[~tiles.used] == topk_ids.size).all()
    assert (np.diff(tiles.used.astype(int)) <= 0).all()


# Products.

HIDDEN, WIDTH = 12, 9
SHAPES_OF_LINEARS = (
    LinearShape(parts=2, rows=WIDTH, columns=HIDDEN),
    LinearShape(parts=1, rows=HIDDEN, columns=WIDTH),
)
PAGE_WORDS = 256
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}

jit_experts = jax.jit(run_experts)


class Weights(NamedTuple):
    """[experts, width, hidden] twice, and [experts, hidden, width]."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


class Case(NamedTuple):
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    valid: np.ndarray
    weights: Weights


def make_case(
    tokens: int, k: int, num_experts: int, dtype: str, topk_ids: np.ndarray | None = None
) -> Case:
    """Random inputs; the last of three or more tokens is invalid."""
    rng = np.random.default_rng(tokens)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(format.DTYPES[dtype])

    if topk_ids is None:
        topk_ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :k].astype(np.int32)
    valid = np.ones(tokens, bool)
    valid[2::7] = False
    return Case(
        x=normal(tokens, HIDDEN),
        topk_ids=topk_ids,
        topk_weights=rng.random((tokens, k), np.float32),
        valid=valid,
        weights=Weights(
            normal(num_experts, WIDTH, HIDDEN),
            normal(num_experts, WIDTH, HIDDEN),
            normal(num_experts, HIDDEN, WIDTH),
        ),
    )


def by_loops(case: Case) -> np.ndarray:
    """The weighted sum, token by token, in float64."""
    x = case.x.astype(np.float64)
    gate, up, down = (w.astype(np.float64) for w in case.weights)
    y = np.zeros_like(x)
    for token in np.flatnonzero(case.valid):
        for e, weight in zip(case.topk_ids[token], case.topk_weights[token], strict=True):
            g = gate[e] @ x[token]
            y[token] += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[token])))
    return y


def stacked(weights: Weights) -> Stacked:
    gate_up = jnp.stack([jnp.asarray(weights.gate), jnp.asarray(weights.up)], axis=1)
    return Stacked(gate_up, jnp.asarray(weights.down))


class Pages(NamedTuple):
    """An arena, a host pool and two expert tables, as a program takes them."""

    arena: np.ndarray
    host: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def make_pages(weights: Weights, resident: np.ndarray) -> Pages:
    """Pages in random order, every third on the host; what is not resident has no pages."""
    runs = [
        [format.encode_dense(format.stack_halves(gate, up)), format.encode_dense(down)]
        for gate, up, down in zip(*weights, strict=True)
    ]
    values = [[format.to_pages(run, PAGE_WORDS) for run in pair] for pair in runs]
    total = sum(len(pages) for pair in values for pages in pair)
    order = np.random.default_rng(0).permutation(total) + 1
    arena = np.full((total + 1, PAGE_WORDS), format.POISON_WORD, np.uint32)
    host = arena.copy()
    tables = [np.zeros((len(runs), len(pages)), np.int32) for pages in values[0]]
    at = 0
    for expert in np.flatnonzero(resident):
        for table, pages in zip(tables, values[expert], strict=True):
            for slot, page in enumerate(pages):
                number = int(order[at])
                if at % 3 == 0:
                    host[number], table[expert, slot] = page, ~number
                else:
                    arena[number], table[expert, slot] = page, number
                at += 1
    return Pages(arena, host, *tables)


def paged(pages: Pages, dtype: str) -> Paged:
    return Paged(
        pages.arena,
        pages.host,
        pages.gate_up,
        pages.down,
        jnp.full((len(pages.down), 2), 16, jnp.int32),
        *(
            Runs(shape=shape, dtype=dtype, page_bytes=4 * PAGE_WORDS, quantization=None)
            for shape in SHAPES_OF_LINEARS
        ),
    )


@partial(jax.jit, static_argnames="dtype")
def run_paged(pages: Pages, *inputs: jax.Array, dtype: str) -> jax.Array:
    return run_experts(*inputs, paged(pages, dtype))


def run(case: Case, kind: str, resident: np.ndarray | None = None) -> np.ndarray:
    """The output for experts of a kind; those that are not resident are NaN or without pages."""
    num_experts = len(case.weights.down)
    if resident is None:
        resident = np.ones(num_experts, bool)
    inputs = [jnp.asarray(array) for array in case[:4]]
    if kind == "paged":
        pages = jax.tree.map(jnp.asarray, make_pages(case.weights, resident))
        return np.asarray(run_paged(pages, *inputs, dtype=case.x.dtype.name))
    weights = Weights(*(w.copy() for w in case.weights))
    for w in weights:
        w[~resident] = np.nan
    return np.asarray(jit_experts(*inputs, stacked(weights)))


def assert_close(found: np.ndarray, case: Case) -> None:
    wanted = by_loops(case)
    limit = TOLERANCE[case.x.dtype.name] * np.abs(wanted).max()
    assert found.dtype == case.x.dtype
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=0, atol=limit)


SHAPES = {
    "one token": (1, 2, 5),
    "a few tokens": (7, 2, 5),
    "every expert": (7, 3, 3),
    "several tiles": (200, 2, 3),
}


@pytest.mark.parametrize("kind", ["stacked", "paged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_a_loop_over_tokens(shape: str, kind: str) -> None:
    case = make_case(*SHAPES[shape], "float32")
    assert_close(run(case, kind), case)


@pytest.mark.parametrize("kind", ["stacked", "paged"])
def test_outputs_in_bfloat16_are_close_to_those_of_the_loop(kind: str) -> None:
    case = make_case(*SHAPES["several tiles"], "bfloat16")
    assert_close(run(case, kind), case)


@pytest.mark.parametrize("kind", ["stacked", "paged"])
def test_all_tokens_may_choose_the_same_expert(kind: str) -> None:
    topk_ids = np.tile(np.array([1, 2], np.int32), (200, 1))
    case = make_case(200, 2, 3, "float32", topk_ids)
    assert_close(run(case, kind), case)


@pytest.mark.parametrize("kind", ["stacked", "paged"])
def test_an_expert_without_tokens_is_never_read(kind: str) -> None:
    topk_ids = np.array([[1, 3]] * 7, np.int32)
    case = make_case(7, 2, 5, "float32", topk_ids)
    case.topk_ids[2] = [0, 4]  # an invalid token
    resident = np.array([False, True, False, True, False])
    assert_close(run(case, kind, resident), case)


class Watched(NamedTuple):
    """Experts that tell which of them are read."""

    experts: Stacked
    tell: Callable[[jax.Array], None]

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    def weights(self, expert: jax.Array) -> ExpertWeights:
        jax.debug.callback(self.tell, expert)
        return self.experts.weights(expert)


def test_an_expert_is_read_once_for_each_of_its_tiles() -> None:
    topk_ids = np.tile(np.array([1, 2], np.int32), (200, 1))
    topk_ids[150:] = [1, 4]
    case = make_case(200, 2, 5, "float32", topk_ids)
    read: list[int] = []
    watched = Watched(stacked(case.weights), lambda expert: read.append(int(expert)))
    run_experts(*(jnp.asarray(array) for array in case[:4]), watched)
    jax.effects_barrier()
    counts = np.bincount(topk_ids[case.valid].reshape(-1))
    assert counts.tolist() == [0, 171, 128, 0, 43]
    assert sorted(read) == [1, 1, 1, 2, 2, 4]  # tiles of 64


def test_an_expert_that_is_not_resident_gives_nan_to_its_tokens_only() -> None:
    topk_ids = np.array([[1, 3], [3, 1], [1, 3], [0, 1], [1, 3], [3, 1], [1, 3]], np.int32)
    case = make_case(7, 2, 5, "float32", topk_ids)
    y = run(case, "paged", np.array([False, True, True, True, True]))
    assert np.isnan(y).any(axis=1).tolist() == [False, False, False, True, False, False, False]


def test_stacked_and_paged_give_the_same_bits() -> None:
    case = make_case(*SHAPES["several tiles"], "bfloat16")
    assert run(case, "stacked").tobytes() == run(case, "paged").tobytes()


def test_invalid_tokens_give_zero_and_change_no_other() -> None:
    case = make_case(7, 2, 5, "float32")
    y = run(case, "stacked")
    assert np.flatnonzero((y == 0).all(axis=1)).tolist() == [2]
    x = case.x.copy()
    x[2] = np.nan
    again = run(case._replace(x=x), "stacked")
    np.testing.assert_array_equal(again[case.valid], y[case.valid])
    assert (again[2] == 0).all()


def test_weights_in_float32_are_not_rounded_to_the_dtype_of_the_tokens() -> None:
    case = make_case(200, 2, 3, "bfloat16")
    # In bfloat16 both weights would be 1: the outputs would cancel, were the experts the same.
    case.topk_ids[:] = [1, 1]
    case.topk_weights[:] = [1.0 + 2**-9, -1.0]
    one = case._replace(topk_weights=np.tile(np.float32([1.0, 0.0]), (200, 1)))
    wanted = run(one, "stacked").astype(np.float32) * 2**-9
    np.testing.assert_array_equal(run(case, "stacked").astype(np.float32), wanted)


def test_both_kinds_know_their_number_of_experts() -> None:
    case = make_case(1, 2, 5, "float32")
    kinds: list[Experts] = [
        stacked(case.weights),
        paged(jax.tree.map(jnp.asarray, make_pages(case.weights, np.ones(5, bool))), "float32"),
    ]
    assert [experts.num_experts for experts in kinds] == [5, 5]
