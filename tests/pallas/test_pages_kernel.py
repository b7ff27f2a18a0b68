"""Pages of the arena written in place, against loops; the kernels in the interpreter, and compiled
for an H200."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import aot
from moejax.arena import state
from moejax.pallas.pages import COPY_BLOCK, commit_pages, move_pages, write_kv
from pallas.interpreted import Call, interpret
from pallas.pages_cases import (
    CASES,
    LARGE,
    Case,
    expected_commit,
    expected_kv,
    expected_move,
    make_copy,
    make_inputs,
    random_words,
)

write = jax.jit(write_kv, static_argnames="block_size", donate_argnums=0)
commit = jax.jit(commit_pages, donate_argnums=0)
move = jax.jit(move_pages, donate_argnums=0)

# KV of a step.


def check_kv(case: Case, seed: int = 0) -> None:
    inputs = make_inputs(case, seed)
    found = write(*jax.tree.map(jnp.asarray, inputs), block_size=case.block_size)
    np.testing.assert_array_equal(found, expected_kv(inputs, case.block_size))


@settings(max_examples=40)
@given(
    name=st.sampled_from(["one token", "odd number of tokens", "latent", "odd values", "float32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kv_is_written_as_by_loops(name: str, seed: int) -> None:
    check_kv(CASES[name], seed)


@pytest.mark.parametrize("name", ["odd number of tokens", "latent"])
def test_kv_is_written_as_by_write_tokens(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    rows, blocks = inputs.block_tables.shape
    inside = (inputs.rows >= 0) & (inputs.rows < rows)
    inside &= inputs.positions < blocks * case.block_size
    block = np.where(inside, inputs.positions // case.block_size, 0)
    number = np.where(inside, inputs.block_tables[np.where(inside, inputs.rows, 0), block], -1)
    block_pages = inputs.block_pages[inputs.layer]
    inside &= (number >= 0) & (number < len(block_pages))
    parts = [part for part in (inputs.k, inputs.v) if part is not None]
    words = np.concatenate([part.reshape(case.tokens, -1) for part in parts], axis=1)
    wanted = state.write_tokens(
        jnp.asarray(inputs.pages),
        jnp.asarray(block_pages[np.where(inside, number, 0)]),
        jnp.asarray(inputs.positions % case.block_size),
        state.values_to_words(jnp.asarray(words)),
        jnp.asarray(inputs.valid & inside),
    )
    found = write(*jax.tree.map(jnp.asarray, inputs), block_size=case.block_size)
    np.testing.assert_array_equal(found, wanted)


def test_no_tokens_write_nothing() -> None:
    case = Case(0, 2, 64, 64, 8)
    inputs = make_inputs(case)
    found = write(*jax.tree.map(jnp.asarray, inputs), block_size=8)
    np.testing.assert_array_equal(found, inputs.pages)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (Case(4, 1, 3, 0, 8), ValueError, "the 3 values of a token do not fill whole words"),
        (Case(4, 2, 64, 64, 9), ValueError, "9 tokens of 256 values do not fit a page"),
        (Case(4, 2, 64, 64, 8, np.dtype(np.float16)), TypeError, "bfloat16 or float32"),
    ],
)
def test_kv_that_no_page_can_hold_is_refused(
    case: Case, error: type[Exception], message: str
) -> None:
    inputs = jax.tree.map(jnp.asarray, make_inputs(case))
    with pytest.raises(error, match=message):
        write_kv(*inputs, block_size=case.block_size)


def and_one_more(array: np.ndarray) -> np.ndarray:
    """What is read beyond the end of an array of the interpreter is in it."""
    return np.concatenate([array, array[-1:]])


def kv_call(case: Case) -> tuple[Call, np.ndarray]:
    inputs = make_inputs(case)
    pages, k, v = inputs[:3]
    k_values = k[0].size
    v_values = 0 if v is None else v[0].size
    tables = map(and_one_more, (inputs.block_pages, inputs.block_tables))
    call = Call(
        kernel="moejax.pallas.pages_kernel:write_kv_kernel",
        grid=case.tokens,
        arrays=[
            and_one_more(pages),
            k,
            k if v is None else v,
            *tables,
            inputs.layer[None],
            *inputs[6:],
        ],
        constants={
            "PAGES": len(pages),
            "PAGE_VALUES": case.words * 4 // case.dtype.itemsize,
            "KV_BLOCKS": inputs.block_pages.shape[1],
            "ROWS": inputs.block_tables.shape[0],
            "BLOCKS": inputs.block_tables.shape[1],
            "BLOCK_SIZE": case.block_size,
            "K_VALUES": k_values,
            "V_VALUES": v_values,
            "K_BLOCK": 256,
            "V_BLOCK": 256,
        },
    )
    wanted = expected_kv(inputs, case.block_size)
    return call, np.concatenate([wanted, pages[-1:]])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_kv_is_written_as_by_loops_on_a_gpu(name: str) -> None:
    for seed in range(3):
        check_kv((CASES | LARGE)[name], seed)


# Copies of pages.


def place(array: np.ndarray, on_host: bool) -> jax.Array:
    kind = "pinned_host" if on_host else "device"
    device = jax.devices()[0]
    return jax.device_put(array, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def check_copies(words: int, on_host: bool, seed: int = 0) -> None:
    copy = make_copy(words, seed)
    pages, sources, targets = map(jnp.asarray, copy[:3])
    staged, host = place(copy.staged, on_host), place(copy.host, on_host)
    found = commit(jnp.copy(pages), targets, staged)
    np.testing.assert_array_equal(found, expected_commit(copy))
    found = move(jnp.copy(pages), sources, targets, host)
    np.testing.assert_array_equal(found, expected_move(copy, True))
    found = move(jnp.copy(pages), sources, targets)
    np.testing.assert_array_equal(found, expected_move(copy, False))


@settings(max_examples=40)
@given(words=st.sampled_from([256, 260]), on_host=st.booleans(), seed=st.integers(0, 2**31 - 1))
def test_pages_are_copied_as_by_loops(words: int, on_host: bool, seed: int) -> None:
    check_copies(words, on_host, seed)


def test_commits_are_those_of_write_pages() -> None:
    copy = make_copy(256)
    pages, targets, staged = map(jnp.asarray, (copy.pages, copy.targets, copy.staged))
    wanted = state.write_pages(pages, targets, staged)
    np.testing.assert_array_equal(commit(pages, targets, staged), wanted)


def test_nothing_is_copied_where_there_is_nothing() -> None:
    pages, none = jnp.asarray(random_words(4, 256)), jnp.zeros(0, jnp.int32)
    wanted = np.asarray(pages)
    np.testing.assert_array_equal(
        commit_pages(pages, none, jnp.zeros((0, 256), jnp.uint32)), wanted
    )
    np.testing.assert_array_equal(move_pages(pages, none, none), wanted)


def copy_calls(words: int, block: int) -> list[tuple[Call, np.ndarray]]:
    copy = make_copy(words)
    sizes = {"PAGES": len(copy.pages), "WORDS": words, "BLOCK": block}
    runs = [
        (copy.staged, {"OTHER_PAGES": len(copy.staged), "STAGED": True}, expected_commit(copy)),
        (copy.host, {"OTHER_PAGES": len(copy.host), "STAGED": False}, expected_move(copy, True)),
        (copy.host, {"OTHER_PAGES": 0, "STAGED": False}, expected_move(copy, False)),
    ]
    return [
        (
            Call(
                kernel="moejax.pallas.pages_kernel:copy_pages_kernel",
                grid=len(copy.targets) * -(-words // block),
                arrays=[and_one_more(copy.pages), and_one_more(other), copy.sources, copy.targets],
                constants={**sizes, **constants},
            ),
            np.concatenate([wanted, copy.pages[-1:]]),
        )
        for other, constants, wanted in runs
    ]


def test_kernels_in_the_interpreter(tmp_path: pathlib.Path) -> None:
    runs = [kv_call(case) for case in CASES.values()]
    runs += [*copy_calls(256, 256), *copy_calls(256, 64), *copy_calls(100, 64)]
    found = interpret(tmp_path, [call for call, _ in runs])
    for arrays, (_, wanted) in zip(found, runs, strict=True):
        np.testing.assert_array_equal(arrays[0], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("words", [100, 256, COPY_BLOCK + 256, 16384])
def test_pages_are_copied_as_by_loops_on_a_gpu(words: int, on_host: bool) -> None:
    check_copies(words, on_host)


@pytest.mark.gpu
def test_places_beyond_2_31_words_on_a_gpu() -> None:
    """The last page starts at word 2^31: as an int32 that is before the arena."""
    words, last = 16384, 2**17
    pages = jax.jit(lambda: jnp.zeros((last + 1, words), jnp.uint32))()
    staged = random_words(2, words)
    pages = commit(pages, jnp.array([last, 1], jnp.int32), jnp.asarray(staged))
    np.testing.assert_array_equal(pages[last], staged[0])
    pages = move(pages, jnp.array([last], jnp.int32), jnp.array([last - 1], jnp.int32))
    np.testing.assert_array_equal(pages[last - 1], staged[0])
    np.testing.assert_array_equal(pages[1], staged[1])
    k = random_words(1, 2, 64).view(np.float32)
    numbers = (jnp.array(n, jnp.int32) for n in ([[0, last]], [[0, 1]], 0, [0], [9]))
    pages = write(pages, jnp.asarray(k), None, *numbers, jnp.array([True]), block_size=8)
    staged[0, 128:256] = k.view(np.uint32).reshape(-1)
    np.testing.assert_array_equal(pages[last], staged[0])
    assert int(jnp.sum(jnp.any(pages != 0, axis=1))) == 3


# In place.

ARENA = jax.ShapeDtypeStruct((4096, 16384), jnp.uint32)
IDS = jax.ShapeDtypeStruct((64,), jnp.int32)


def assert_in_place(compiled: object, calls: int) -> None:
    text = compiled.as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == calls
    assert aot.copies(compiled) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == ARENA.size * 4
    # cuBLASLt has 32 MiB to work in.
    assert memory.temp_size_in_bytes < 40 << 20


@pytest.mark.parametrize("case", [LARGE["8 heads of 128"], LARGE["latent of 576"]])
def test_a_scan_over_layers_copies_no_arena(case: Case) -> None:
    """Each layer computes keys, writes them, and reads the arena."""
    layers, hidden = 6, 256
    values, has_v = case.kv_heads * case.size, case.value_size > 0

    def program(pages, x, weights, block_pages, block_tables, *tokens):
        def layer(carry, xs):
            pages, x = carry
            weights, number = xs
            made = (x @ weights).reshape(len(x), -1, case.kv_heads, case.size)
            kv = (made[:, 0], made[:, 1] if has_v else None)
            tables = (block_pages, block_tables, number)
            pages = write_kv(pages, *kv, *tables, *tokens, block_size=case.block_size)
            read = pages[block_pages[number, :hidden], :hidden].astype(jnp.bfloat16)
            return (pages, x + jnp.sum(read, axis=0)[None]), None

        return lax.scan(layer, (pages, x), (weights, jnp.arange(layers, dtype=jnp.int32)))[0]

    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((case.tokens, hidden), jnp.bfloat16),
        shape((layers, hidden, values * (1 + has_v)), jnp.bfloat16),
        shape((layers, 1000), jnp.int32),
        shape((32, 100), jnp.int32),
        shape((case.tokens,), jnp.int32),
        shape((case.tokens,), jnp.int32),
        shape((case.tokens,), jnp.bool_),
    )
    mesh = aot.h200_mesh()
    compiled = aot.compile_for(mesh, program, ARENA, *arguments, donate_argnums=0)
    assert_in_place(compiled, calls=1)
    copied = aot.compile_for(mesh, program, ARENA, *arguments)
    assert len(aot.copies(copied)) == 1, "the check cannot fail"


def test_copies_of_pages_copy_no_arena() -> None:
    mesh = aot.h200_mesh()
    staged = jax.ShapeDtypeStruct((64, 16384), jnp.uint32)
    compiled = aot.compile_for(mesh, commit_pages, ARENA, IDS, staged, donate_argnums=0)
    assert_in_place(compiled, calls=1)
    compiled = aot.compile_for(mesh, move_pages, ARENA, IDS, IDS, donate_argnums=0)
    assert_in_place(compiled, calls=1)
