"""Attention over pages by kernels, against float64."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.layers.attention import attend, split_kv, visible
from moejax.pallas.attention import MAX_GRID, Plan, attend_paged, make_plan
from moejax.pallas.attention_tiling import (
    H200_SHARED_BYTES,
    Tiling,
    choose_tilings,
    cut_columns,
    key_shape,
)
from pallas.paged_kv import Case, Step, expected, gqa, make_step, mla, relative_error

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
LONG = ((1, 4095), (1, 17), (1, 2000))
CASES = {
    "grouped": Case(gqa(8, 2, 128)),
    "one KV head": Case(gqa(8, 1, 64), prefill=()),
    "latent": Case(mla(16)),
    "latent, many heads": Case(mla(128), prefill=((9, 70),), decode=((1, 90), (1, 0))),
    "latent, an odd number of heads": Case(mla(20), prefill=(), decode=((1, 90),)),
    "window": Case(gqa(8, 2, 64, window=50)),
    "chunks": Case(gqa(10, 2, 128, chunk=64)),
    "chunks smaller than the padding": Case(gqa(10, 2, 128, chunk=8), pad_tokens=40),
    "sinks": Case(gqa(16, 2, 64, sinks=True, window=128)),
    "80 columns": Case(gqa(6, 2, 80)),
    "512 columns": Case(gqa(4, 1, 512), prefill=((20, 11),), decode=((1, 200),)),
    "an odd size": Case(gqa(4, 2, 6), decode=()),
    "a KV head per head": Case(gqa(4, 4, 128), decode=(), pad_tokens=70),
    "long rows": Case(gqa(8, 2, 128), prefill=((300, 2500),), decode=LONG, longest=4096),
    "float32": Case(gqa(8, 2, 128), dtype="float32"),
    "float32, latent": Case(mla(16), prefill=(), decode=((1, 90), (1, 3)), dtype="float32"),
}
DECODES = {
    "decode, one split": (Case(gqa(8, 2, 128), prefill=()), {"splits": 1}),
    "decode, splits of one tile": (
        Case(gqa(8, 2, 96, sinks=True), prefill=(), decode=LONG, longest=4096),
        {"splits": 64, "least_share": 16},
    ),
    "decode, five splits, latent": (
        Case(mla(16), prefill=(), decode=LONG, longest=4096),
        {"splits": 5, "least_share": 64},
    ),
}
# As few programs and keys as show all parts: the interpreter is slow.
SMALL: dict[str, Any] = {
    "prefill": ((5, 30), (0, 9), (1, 20)),
    "decode": ((1, 0), (1, 40), (0, 5), (1, 15)),
    "dtype": "float32",
    "pad_tokens": 2,
    "page_bytes": 1024,
    "longest": 64,
}
FINE: dict[str, Any] = {"splits": 2, "keys": 16, "least_share": 16}
INTERPRETED = {
    "mixed": (Case(gqa(4, 2, 16, sinks=True), **SMALL), FINE),
    "window": (Case(gqa(2, 1, 16, window=20), **SMALL), FINE),
    "chunks and sinks": (Case(gqa(3, 1, 24, chunk=16, sinks=True), **SMALL), FINE),
    # Tokens of the padding have positions below 0: no key may be looked up for them.
    "chunks smaller than the padding": (
        Case(gqa(2, 1, 16, chunk=1), **(SMALL | {"decode": (), "pad_tokens": 20})),
        FINE,
    ),
    "latent": (Case(mla(3, 20, 6), **SMALL), FINE),
    "80 columns, decode": (
        Case(gqa(2, 1, 80), **(SMALL | {"prefill": (), "page_bytes": 8192})),
        {"splits": 1, "keys": 16},
    ),
}


def attention_of(step: Step, tilings: tuple[Tiling, Tiling], *arrays: Any) -> jax.Array:
    """`arrays`: those of the step, then its rows."""
    rows = dict(zip(step.rows, arrays[6:], strict=True))
    return attend_paged(
        *arrays[:6],
        plan=step.plan(tilings, rows),
        part=step.case.part,
        block_size=step.block_size,
    )


def run(step: Step, tilings: tuple[Tiling, Tiling], *, jits: bool = True) -> np.ndarray:
    arrays = [
        None if array is None else jnp.asarray(array)
        for array in (*step.arrays, *step.rows.values())
    ]

    def program(*arrays: Any) -> jax.Array:
        return attention_of(step, tilings, *arrays)

    return np.asarray((jax.jit(program) if jits else program)(*arrays))


def check(step: Step, found: np.ndarray) -> None:
    assert relative_error(found, expected(step)) < TOLERANCE[step.case.dtype]
    assert not found[step.rows["lengths"].sum() :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_on_a_gpu(name: str) -> None:
    step = make_step(CASES[name])
    check(step, run(step, step.tilings()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODES)
def test_decode_on_a_gpu(name: str) -> None:
    case, changes = DECODES[name]
    step = make_step(case)
    check(step, run(step, step.tilings(**changes)))


@pytest.mark.parametrize("name", ["window", "chunks", "sinks", "latent"])
def test_what_kernels_are_compared_with(name: str) -> None:
    """The plain computation of one row."""
    step = make_step(CASES[name]._replace(dtype="float32"))
    part, row = step.case.part, 3
    start, length, cached = (int(step.rows[n][row]) for n in ("starts", "lengths", "cached"))
    assert length > 1 and cached > 0
    k, v = split_kv(jnp.asarray(step.kv[row], jnp.float32), part)
    at = jnp.arange(cached + length, dtype=jnp.int32)
    mask = visible(at[cached:], at, part.reach)
    sinks = None if step.sinks is None else jnp.asarray(step.sinks)
    q = jnp.asarray(step.q[start : start + length])
    found = jax.jit(attend, static_argnums=4)(q, k, v, mask, part.scale, sinks)
    np.testing.assert_allclose(found, expected(step)[start : start + length], atol=1e-5)


def test_kernels_in_the_interpreter() -> None:
    """What they compute, in float32; in a process of its own, where triton only interprets."""
    pytest.importorskip("triton")
    path = os.pathsep.join(str(folder) for folder in sys.path if folder)
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(INTERPRETED)


def interpret_all() -> None:
    """Prints the names of the cases whose results are right."""
    import np_tensor
    from moejax.pallas import attention

    attention.triton_call = np_tensor.interpret
    for name, (case, changes) in INTERPRETED.items():
        step = make_step(case)
        check(step, run(step, step.tilings(**changes), jits=False))
        print(name)


# The plan.


def plan_of(
    rows: list[tuple[int, int]], *, prefill_rows: int, tokens: int, queries: int = 4
) -> Plan:
    """Rows of (tokens, cached), which have the rows 10, 11, ... of the tables."""
    lengths, cached = (jnp.array(n, jnp.int32) for n in zip(*rows, strict=True))
    return make_plan(
        table_rows=jnp.arange(10, 10 + len(rows), dtype=jnp.int32),
        starts=jnp.cumsum(lengths) - lengths,
        lengths=lengths,
        cached=cached,
        tokens=tokens,
        prefill_rows=prefill_rows,
        tilings=(
            Tiling(heads=1, queries=1, keys=16, warps=4),
            Tiling(heads=1, queries=queries, keys=16, warps=4),
        ),
    )


def test_a_plan_of_decodes_alone() -> None:
    plan = plan_of([(1, 7), (0, 0), (1, 20), (0, 0)], prefill_rows=0, tokens=4)
    assert plan.ragged is None and plan.decode is not None
    items = np.asarray(plan.decode.items)
    np.testing.assert_array_equal(items[:2], [[0, 1, 10, 7], [1, 1, 12, 20]])
    # The other tokens see nothing.
    np.testing.assert_array_equal(items[2:][:, [0, 1, 3]], [[2, 1, -1], [3, 1, -1]])


def test_a_plan_of_prompts_and_decodes() -> None:
    rows = [(6, 0), (0, 3), (4, 9), (1, 30), (0, 1)]
    plan = plan_of(rows, prefill_rows=3, tokens=16)
    assert plan.ragged is not None and plan.decode is not None
    items = np.asarray(plan.ragged.items)
    assert len(items) == 4 + 16 // 4
    np.testing.assert_array_equal(
        items[:5],
        [[0, 4, 10, 0], [4, 2, 10, 4], [6, 4, 12, 9], [11, 4, 0, -4], [15, 1, 0, -1]],
    )
    assert not items[5:, 1].any()
    # The row that is not used has its result dropped.
    np.testing.assert_array_equal(plan.decode.items, [[10, 1, 13, 30], [16, 0, 14, 1]])


@pytest.mark.parametrize("queries", [1, 7, 64])
def test_every_token_is_in_one_tile(queries: int) -> None:
    rng = np.random.default_rng(0)
    tokens, prefill_rows = 70, 3

    @jax.jit
    def items_of(**rows: jax.Array) -> list[jax.Array]:
        tiling = Tiling(heads=1, queries=queries, keys=16, warps=4)
        plan = make_plan(**rows, tokens=tokens, prefill_rows=prefill_rows, tilings=(tiling, tiling))
        assert plan.ragged is not None and plan.decode is not None
        return [plan.ragged.items, plan.decode.items]

    for _ in range(20):
        lengths = np.append(rng.integers(0, 22, prefill_rows), rng.integers(0, 2, 3))
        cached = rng.integers(0, 99, len(lengths))
        starts = np.cumsum(lengths) - lengths
        table_rows = rng.permutation(len(lengths))
        found = items_of(
            table_rows=jnp.asarray(table_rows, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            lengths=jnp.asarray(lengths, jnp.int32),
            cached=jnp.asarray(cached, jnp.int32),
        )
        at = np.full((tokens, 2), -9)
        for first, count, row, position in np.concatenate(found):
            places = at[first : first + count]
            assert (places == -9).all()
            places[:, 0] = np.maximum(position + np.arange(count), -1)
            places[:, 1] = np.where(places[:, 0] < 0, -1, row)
        wanted = [
            (c + i, row)
            for n, c, row in zip(lengths, cached, table_rows, strict=True)
            for i in range(n)
        ]
        np.testing.assert_array_equal(at, wanted + [(-1, -1)] * (tokens - len(wanted)))


# Tilings.


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (128, (128, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (576, (512, 64)),
        (112, (112, 0)),
        (6, (6, 0)),
    ],
)
def test_columns_in_two_parts(size: int, parts: tuple[int, int]) -> None:
    assert cut_columns(size) == parts


def tilings_of(name: str, **options: Any) -> tuple[Tiling, Tiling]:
    case = CASES[name]
    given = {"rows": 32, "longest": 32768, "max_query": 2048} | options
    return choose_tilings(case.part, case.dtype, **given)


@pytest.mark.parametrize("shared_bytes", [101376, 166912, H200_SHARED_BYTES])
@pytest.mark.parametrize("name", CASES)
def test_tilings_fit_shared_memory(name: str, shared_bytes: int) -> None:
    itemsize = 4 if CASES[name].dtype == "float32" else 2
    if shared_bytes == 101376 and name == "float32, latent":
        with pytest.raises(NotImplementedError, match="do not fit 101376 bytes"):
            tilings_of(name, shared_bytes=shared_bytes)
        return
    for tiling in tilings_of(name, shared_bytes=shared_bytes):
        shape = key_shape(CASES[name].part)
        assert tiling.shared_bytes(shape, itemsize) <= shared_bytes
        assert tiling.heads * tiling.queries <= tiling.rows
        assert tiling.keys & (tiling.keys - 1) == 0


def test_keys_are_shared_out_where_rows_are_few() -> None:
    assert tilings_of("grouped", rows=1, longest=64)[0].splits == 1
    assert tilings_of("grouped", rows=1, longest=200)[0].splits == 4
    assert tilings_of("grouped", rows=1)[0].splits == 64
    assert 1 < tilings_of("grouped", rows=16)[0].splits < 64
    # Many rows: only what is very long is shared out.
    many = tilings_of("grouped", rows=512)[0]
    assert (many.splits, many.least_share) == (2, 4096)
    window = CASES["window"].part.window
    assert tilings_of("window", rows=1)[0].splits == -(-window // 64)


# What is refused.


def shapes_of(step: Step) -> list[jax.ShapeDtypeStruct | None]:
    return [
        None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in (*step.arrays, *step.rows.values())
    ]


@pytest.mark.parametrize("name", ["latent", "sinks"])
def test_kernels_compile_for_an_h200(name: str) -> None:
    step = make_step(CASES[name])
    tilings = step.tilings(splits=4)

    def program(*arrays: Any) -> jax.Array:
        return attention_of(step, tilings, *arrays)

    compiled = aot.compile_for(aot.h200_mesh(), program, *shapes_of(step))
    # Of single queries, their sums, and of the others.
    assert compiled.as_text().count("triton_kernel_call_ffi") == 3


def test_what_kernels_cannot_do() -> None:
    with pytest.raises(NotImplementedError, match="no keys of 640 values"):
        key_shape(gqa(2, 2, 640))
    with pytest.raises(NotImplementedError, match="bfloat16 or float32, not float16"):
        choose_tilings(gqa(2, 2, 64), "float16", rows=1, longest=9, max_query=1)
    step = make_step(CASES["a KV head per head"])
    decode, ragged = step.tilings()
    shares = Tiling(heads=4, queries=4, keys=16, warps=4, splits=2)

    def call(tiling: Tiling, step: Step = step, **changes: Any) -> None:
        options = {"part": step.case.part, "block_size": step.block_size} | changes
        plan = step.plan((decode, tiling))
        arrays = shapes_of(step)[:5]
        jax.eval_shape(lambda *arrays: attend_paged(*arrays, plan=plan, **options), *arrays)

    with pytest.raises(NotImplementedError, match="only the keys of single queries"):
        call(shares)
    with pytest.raises(ValueError, match="do not fit a page"):
        call(ragged, block_size=step.block_size + 8)
    with pytest.raises(ValueError, match="are not 178 tokens"):
        call(ragged, part=gqa(8, 2, 64))
    many = make_step(Case(gqa(1, 1, 16), decode=(), pad_tokens=MAX_GRID))
    with pytest.raises(NotImplementedError, match=f"take {MAX_GRID} tiles, not"):
        call(Tiling(heads=1, queries=1, keys=16, warps=4), many)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    interpret_all()
