"""Grouping by expert, against loops; its kernels in the interpreter, and compiled for an H200."""

import pathlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aot
from moejax.pallas.grouping import BLOCK, ONE_BLOCK, Grouping, group, num_tiles
from moejax.pallas.tiles import make_tiles
from pallas.interpreted import Call, interpret

run = jax.jit(group, static_argnames=("size", "experts"))


class Case(NamedTuple):
    tokens: int
    k: int
    experts: int
    size: int
    routing: str = "random"
    """random, one (all slots choose one expert), skewed, or strange (some experts do not exist)."""
    valid: float = 0.9
    """Share of the tokens."""
    layers: int | None = None
    """Of the tables; the experts are of the last but one. None: there is no other."""

    @property
    def layer(self) -> int | None:
        """The number of the layer in the tables."""
        return None if self.layers is None else self.layers - 2

    def options(self) -> dict[str, int]:
        """Of `group`."""
        return {"size": self.size, "experts": self.experts}


CASES = {
    "one slot": Case(1, 1, 1, 8, valid=1.0),
    "one token": Case(1, 8, 128, 8, valid=1.0),
    "no valid token": Case(3, 2, 4, 8, valid=0.0),
    "all valid": Case(16, 4, 60, 16, valid=1.0),
    "odd": Case(13, 3, 7, 8),
    "fewer slots than a tile": Case(2, 3, 5, 128),
    "all on one expert": Case(37, 2, 9, 16, "one", 1.0),
    "skewed": Case(50, 6, 64, 32, "skewed"),
    "experts that do not exist": Case(21, 4, 8, 8, "strange"),
    "many experts": Case(16, 8, 512, 8),
    "64 x 8": Case(64, 8, 128, 16),
    "the third of four layers": Case(13, 3, 7, 8, layers=4),
    "the first of two layers, strange": Case(21, 4, 8, 8, "strange", layers=2),
}
SMALL = (
    *("one slot", "odd", "all on one expert", "skewed", "experts that do not exist"),
    *("the third of four layers", "the first of two layers, strange"),
)
LARGE = {
    "a full block": Case(ONE_BLOCK // 8, 8, 128, 64),
    "one slot more than a block": Case(ONE_BLOCK + 1, 1, 128, 64),
    "two blocks": Case(BLOCK // 4, 8, 60, 32),
    "three blocks, skewed": Case(500, 6, 64, 64, "skewed"),
    "all on one expert, large": Case(1024, 8, 33, 128, "one"),
    "experts that do not exist, large": Case(700, 4, 8, 16, "strange"),
    "no valid token, large": Case(600, 8, 256, 64, valid=0.0),
    "4096 x 8 of 512": Case(4096, 8, 512, 64),
    "the 23rd of 24 layers, large": Case(512, 8, 128, 64, "skewed", layers=24),
    "4096 x 8 of 128, tiles of 8": Case(4096, 8, 128, 8, "skewed"),
}


class Inputs(NamedTuple):
    topk_ids: np.ndarray
    valid: np.ndarray
    widths: np.ndarray
    layer: np.ndarray | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shape = (case.tokens, case.k)
    ids = rng.integers(0, case.experts, shape)
    if case.routing == "one":
        ids[:] = case.experts // 2
    elif case.routing == "skewed":
        ids = ids * rng.integers(0, case.experts, shape) // case.experts
    elif case.routing == "strange":
        some = rng.random(shape) < 0.3
        ids = np.where(some, rng.choice([-1, case.experts, 2**31 - 1, -(2**31)], shape), ids)
    valid = rng.random(case.tokens) < case.valid
    widths = rng.integers(0, 17, ((case.layers or 1) * case.experts, 2))
    layer = None if case.layer is None else np.array(case.layer, np.int32)
    return Inputs(ids.astype(np.int32), valid, widths.astype(np.int32), layer)


def expected(inputs: Inputs, size: int, experts: int) -> list[np.ndarray]:
    k, slots = inputs.topk_ids.shape[1], inputs.topk_ids.size
    tiles = np.zeros((num_tiles(slots, experts, size), 8), np.int32)
    token_of_place = np.zeros(slots, np.int32)
    place_of_slot = np.full(slots, slots, np.int32)
    place = number = 0
    chosen = np.where(inputs.valid[:, None], inputs.topk_ids, -1).reshape(-1)
    for expert in range(experts):
        own = np.flatnonzero(chosen == expert)
        for first in range(0, len(own), size):
            of_tile = own[first : first + size]
            row = expert + (0 if inputs.layer is None else int(inputs.layer) * experts)
            tiles[number, :6] = row, place, len(of_tile), *inputs.widths[row], expert
            token_of_place[place : place + len(of_tile)] = of_tile // k
            place_of_slot[of_tile] = np.arange(place, place + len(of_tile))
            place += len(of_tile)
            number += 1
    return [tiles, token_of_place, place_of_slot]


def on_device(inputs: Inputs) -> list[jax.Array | None]:
    return [None if part is None else jnp.asarray(part) for part in inputs]


def check(case: Case, seed: int = 0) -> None:
    inputs = make_inputs(case, seed)
    found = run(*on_device(inputs), **case.options())
    for part, wanted in zip(found, expected(inputs, **case.options()), strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_a_worked_example() -> None:
    """Three tokens of two experts each, the second token invalid, tiles of two places."""
    found = run(
        jnp.array([[2, 0], [2, 1], [2, 0], [2, 3]], jnp.int32),
        jnp.array([True, False, True, True]),
        jnp.array([[3, 4], [5, 6], [7, 8], [16, 2]], jnp.int32),
        size=2,
    )
    # Places: slots 1 and 5 of expert 0; 0, 4 and 6 of expert 2; 7 of expert 3.
    rows = [[0, 0, 2, 3, 4, 0], [2, 2, 2, 7, 8, 2], [2, 4, 1, 7, 8, 2], [3, 5, 1, 16, 2, 3]]
    np.testing.assert_array_equal(found.tiles[:4], [[*row, 0, 0] for row in rows])
    np.testing.assert_array_equal(found.tiles[4:], np.zeros((4, 8)))
    np.testing.assert_array_equal(found.token_of_place, [0, 2, 0, 2, 3, 3, 0, 0])
    np.testing.assert_array_equal(found.place_of_slot, [2, 0, 8, 8, 3, 1, 4, 5])


def test_a_worked_example_in_tables_of_three_layers() -> None:
    """Two tokens; rows 2 and 3 of the tables are experts 0 and 1 of the second layer."""
    found = run(
        jnp.array([[1], [0]], jnp.int32),
        jnp.array([True, True]),
        jnp.array([[3, 3], [3, 3], [4, 5], [6, 16], [3, 3], [3, 3]], jnp.int32),
        jnp.int32(1),
        size=8,
        experts=2,
    )
    np.testing.assert_array_equal(
        found.tiles, [[2, 0, 1, 4, 5, 0, 0, 0], [3, 1, 1, 6, 16, 1, 0, 0]]
    )
    np.testing.assert_array_equal(found.token_of_place, [1, 0])


def test_an_expert_of_the_next_layer_does_not_exist() -> None:
    ids, widths = jnp.array([[2]], jnp.int32), jnp.full((4, 2), 3, jnp.int32)
    found = run(ids, jnp.array([True]), widths, jnp.int32(0), size=8, experts=2)
    assert not found.tiles.any()
    np.testing.assert_array_equal(found.place_of_slot, [1])


@settings(max_examples=60)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 2**32 - 1))
def test_the_reference_equals_loops(name: str, seed: int) -> None:
    check(CASES[name], seed)


@pytest.mark.parametrize("name", ["64 x 8", "odd"])
def test_tiles_are_those_of_make_tiles(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    found = run(*on_device(inputs), size=case.size)
    tiles = jax.jit(make_tiles, static_argnums=(2, 3))(*inputs[:2], case.experts, case.size)
    used = np.asarray(tiles.used)
    assert len(found.tiles) == len(used)
    np.testing.assert_array_equal(found.tiles[used, 0], tiles.expert[used])
    np.testing.assert_array_equal(found.tiles[used, 1], tiles.start[used])
    count = np.minimum(tiles.end - tiles.start, case.size)
    np.testing.assert_array_equal(found.tiles[:, 2], np.where(used, count, 0))
    last = int(inputs.valid.sum()) * case.k
    np.testing.assert_array_equal(found.token_of_place[:last], tiles.order[:last] // case.k)
    np.testing.assert_array_equal(
        found.place_of_slot[tiles.order[:last]], np.arange(last, dtype=np.int32)
    )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_slots_have_no_tiles(shape: tuple[int, int]) -> None:
    ids = jnp.zeros(shape, jnp.int32)
    found = group(ids, jnp.ones(shape[0], bool), jnp.zeros((3, 2), jnp.int32), size=8)
    assert [part.shape for part in found] == [(0, 8), (0,), (0,)]


def interpreted_call(case: Case, blocks: dict[str, int]) -> Call:
    """A call whose outputs hold something before."""
    inputs = make_inputs(case)
    slots = inputs.topk_ids.size
    outputs = [np.full_like(part, -7) for part in expected(inputs, **case.options())]
    layer = np.zeros(1, np.int32) if inputs.layer is None else inputs.layer.reshape(1)
    kernel = "group_kernel" if "BINS" in blocks else "group_block_kernel"
    return Call(
        kernel=f"moejax.pallas.grouping_kernel:{kernel}",
        grid=-(-slots // blocks["BLOCK"]),
        arrays=[*inputs[:3], layer, *outputs],
        constants={
            "SLOTS": slots,
            "K": case.k,
            "EXPERTS": case.experts,
            "TILES": len(outputs[0]),
            "SIZE": case.size,
            **blocks,
        },
    )


def test_kernels_in_the_interpreter(tmp_path: pathlib.Path) -> None:
    one = {"BLOCK": 64}
    many = {"BLOCK": 32, "BINS": 64, "COUNT_BLOCK": 64}
    several = [
        CASES["all valid"],
        CASES["odd"],
        CASES["experts that do not exist"],
        CASES["all on one expert"],
        CASES["no valid token"],
        Case(30, 5, 64, 8, "skewed"),
        Case(30, 2, 3, 8),
        CASES["the third of four layers"],
        CASES["the first of two layers, strange"],
    ]
    runs = [(case, one) for case in several if case.tokens * case.k <= 64]
    assert len(runs) >= 3
    runs += [(case, many) for case in several]
    found = interpret(tmp_path, [interpreted_call(*run) for run in runs])
    for (case, _), arrays in zip(runs, found, strict=True):
        wanted_parts = expected(make_inputs(case), **case.options())
        for part, wanted in zip(arrays[4:], wanted_parts, strict=True):
            np.testing.assert_array_equal(part, wanted)


def compile_for_an_h200(case: Case) -> str:
    shapes = [
        jax.ShapeDtypeStruct(part.shape, part.dtype)
        for part in make_inputs(case)
        if part is not None
    ]
    compiled = aot.compile_for(aot.h200_mesh(), partial(group, **case.options()), *shapes)
    return compiled.as_text()


@pytest.mark.parametrize(
    "case",
    [
        CASES["64 x 8"],
        CASES["the third of four layers"],
        LARGE["4096 x 8 of 512"],
        LARGE["the 23rd of 24 layers, large"],
    ],
)
def test_kernels_compile_for_an_h200_as_one_launch(case: Case) -> None:
    text = compile_for_an_h200(case)
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert " fusion(" not in text


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="up to 512 experts"):
        compile_for_an_h200(Case(16, 8, 513, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_kernels_equal_loops_on_a_gpu(name: str) -> None:
    case = (CASES | LARGE)[name]
    for seed in range(3):
        check(case, seed)


@pytest.mark.gpu
def test_a_grouping_is_a_value_of_the_same_form_on_a_gpu() -> None:
    inputs = make_inputs(CASES["odd"])
    found = group(*on_device(inputs), size=8)
    assert isinstance(found, Grouping)
    assert {part.dtype for part in found} == {jnp.dtype(jnp.int32)}
