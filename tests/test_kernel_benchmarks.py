"""What the benchmarks of attention and of pages count, and that their programs compile."""

import itertools
import math
from types import ModuleType
from typing import Any

import bench_attention
import bench_pages
import device_times
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_attention import DECODE, PROMPTS, SHAPES, Case, Layer, make_tables, work_of

import aot
from moejax.config import AnyAttention
from moejax.errors import ConfigError
from moejax.pallas.attention_tiling import key_shape
from moejax.pallas.dispatch import choose_kernels
from pallas.paged_kv import gqa, mla

PARTS: dict[str, AnyAttention] = {
    "grouped": gqa(8, 2, 16),
    "window": gqa(4, 4, 8, window=10),
    "chunks": gqa(4, 1, 8, chunk=16),
    "latent": mla(3, 20, 6),
}
CASES = (Case(1, 1, 0, 40), Case(3, 1, 37, 40), Case(1, 9, 0, 64), Case(2, 21, 20, 64))
PAGES = 300


def seen_by(part: AnyAttention, position: int) -> range:
    if part.reach.window is not None:
        return range(max(0, position - part.reach.window + 1), position + 1)
    chunk = part.reach.chunk or 1 << 30
    return range(position // chunk * chunk, position + 1)


def layer_of(part: AnyAttention, block_size: int = 4) -> Layer:
    return Layer(part, part.cached_values // 2 * block_size, block_size)


@pytest.mark.parametrize("case", CASES, ids=Case.describe)
@pytest.mark.parametrize("name", PARTS)
def test_work_is_that_of_loops(name: str, case: Case) -> None:
    part, shape = PARTS[name], key_shape(PARTS[name])
    seen = [seen_by(part, position) for position in range(case.cached, case.context)]
    kept, pairs = set(itertools.chain(*seen)), sum(map(len, seen))
    read = case.rows * len(kept) * part.cached_values
    queries = case.rows * case.query * shape.heads
    moved = 2 * (read + queries * shape.size + queries * shape.value_size)
    operations = 2 * case.rows * shape.heads * pairs * (shape.size + shape.value_size)
    assert work_of(part, case) == (moved, operations)


def test_work_of_a_known_case() -> None:
    found = work_of(gqa(32, 8, 128), Case(1, 1, 4095, 4096))
    # 4 KiB of each token; 8 KiB of queries and of results.
    assert found == (16 * 2**20 + 2 * 8 * 2**10, 4 * 32 * 128 * 4096)


@pytest.mark.parametrize("case", CASES, ids=Case.describe)
@pytest.mark.parametrize("name", PARTS)
def test_what_queries_see_has_pages_of_its_own(name: str, case: Case) -> None:
    layer = layer_of(PARTS[name])
    block_pages, block_tables = make_tables(layer, case, PAGES)
    assert len(block_pages) > 1 and block_tables.shape == (case.rows, case.room // 4)
    seen = [seen_by(layer.part, position) for position in range(case.cached, case.context)]
    wanted = sorted({token // 4 for token in itertools.chain(*seen)})
    for row in block_tables:
        assert np.flatnonzero(row).tolist() == wanted
    pages = block_pages[:, block_tables[:, wanted].ravel()]
    assert len(np.unique(pages)) == pages.size and pages.min() > 0 and pages.max() < PAGES


def test_an_arena_without_room_is_refused() -> None:
    layer, case = layer_of(gqa(8, 2, 16)), Case(3, 1, 37, 40)
    assert len(make_tables(layer, case, 31)[0]) == 1
    with pytest.raises(ValueError, match="^30 blocks of tokens do not fit 29 pages$"):
        make_tables(layer, case, 30)


@pytest.mark.parametrize("case", CASES, ids=Case.describe)
def test_plans_have_each_query_once(case: Case) -> None:
    layer = layer_of(gqa(8, 2, 16))
    plan = bench_attention.plan_of(case, bench_attention.tilings_of(layer, case))
    launch = plan.decode if case.query == 1 else plan.ragged
    found = []
    for token, count, row, position in np.asarray(launch.items).tolist():
        found += [(token + i, row, position + i) for i in range(count)]
    assert sorted(found) == [
        (row * case.query + i, row, case.cached + i)
        for row in range(case.rows)
        for i in range(case.query)
    ]


def test_the_attentions_are_those_of_the_text() -> None:
    layers = [bench_attention.find_layer(shape, 0) for shape in SHAPES]
    assert [bench_attention.describe(layer.part) for layer in layers] == [
        "gqa 32/8/128",
        "gqa 16/16/128",
        "gqa 64/8/64 window 128",
        "mla 16/512+64",
        "mla 128/512+64",
    ]
    words = bench_attention.ARENA_BYTES // 4
    for layer, case in itertools.product(layers, DECODE + PROMPTS):
        assert words % layer.page_words == 0
        make_tables(layer, case, words // layer.page_words)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Mixtral-8x7B has layers 0 to 31, and no 32$"):
        bench_attention.find_layer("Mixtral-8x7B", 32)


def test_lines_of_attention() -> None:
    layer, case = layer_of(gqa(32, 8, 128), 16), DECODE[0]
    tiling = bench_attention.tilings_of(layer, case)[0]
    found = bench_attention.line_of(layer, case, 10.0, tiling, bandwidth=4e12)
    # 16.8 MB of 40 in that time.
    assert (found["percent_of_bandwidth"], found["tflops_per_s"]) == (42.0, 6.7)
    assert (found["case"], found["bytes"]) == ("decode 1 x 4096", 16793600)
    assert bench_attention.line_of(layer, PROMPTS[1], 1.0, tiling, 1.0)["case"] == (
        "prompt 2048 after 8192"
    )


@pytest.mark.parametrize(
    "name, case, launches", [("Mixtral-8x7B", DECODE[0], 2), ("gpt-oss-20b", PROMPTS[0], 1)]
)
def test_attention_compiles_to_its_launches_alone(name: str, case: Case, launches: int) -> None:
    mesh, layer = aot.h200_mesh(), bench_attention.find_layer(name, 0)
    arena = jax.ShapeDtypeStruct((1 << 26,), jnp.uint32)
    plan = bench_attention.plan_of(case, bench_attention.tilings_of(layer, case))
    q, block_pages, block_tables, sinks = bench_attention.make_arguments(layer, case, arena.size)
    arguments = (q, arena, block_pages, block_tables, jnp.int32(1), sinks, plan)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)

    def program(*arrays: Any) -> jax.Array:
        found: jax.Array = bench_attention.attend(*arrays, layer=layer)
        return found

    compiled = aot.compile_for(mesh, program, *shapes)
    assert aot.copies(compiled, 1) == []
    assert compiled.as_text().count(" custom-call(") == launches
    assert " fusion(" not in compiled.as_text()


@pytest.mark.gpu
def test_each_call_attends_in_the_next_layer() -> None:
    layer, case = layer_of(gqa(32, 8, 128), 16), Case(1, 1, 4095, 4096)
    arena = bench_attention.make_arena(3 * case.context * 4096)
    program = bench_attention.make_program(
        layer, case, arena, bench_attention.tilings_of(layer, case)
    )
    first, second, third = (np.asarray(program().astype(jnp.float32)) for _ in range(3))
    # Page 0 is nobody's: there is room for two layers.
    assert np.isfinite(first).all() and (first != second).any()
    np.testing.assert_array_equal(first, third)


@pytest.mark.parametrize("number", [0, 1], ids=["commit", "move"])
def test_bytes_of_copies(number: int) -> None:
    case = list(bench_pages.copy_cases(num_pages=9, copied=3))[number]
    words = 1 + np.arange(9 * bench_pages.PAGE_WORDS, dtype=np.uint32)
    pages = words.reshape(9, -1)
    found = np.asarray(jax.jit(case.program)(jnp.asarray(pages), *case.arguments))
    assert case.moved == 2 * 4 * np.count_nonzero(found != pages) > 0


@pytest.mark.parametrize("tokens", bench_pages.KV_TOKENS)
def test_bytes_of_written_kv(tokens: int) -> None:
    num_pages = 2 * bench_pages.ROWS * bench_pages.ROW_BLOCKS + 1
    case = bench_pages.kv_case(tokens, num_pages)
    pages = jnp.zeros((num_pages, bench_pages.PAGE_WORDS), jnp.uint32)
    found = jax.jit(case.program, donate_argnums=0)(pages, *case.arguments)
    assert case.moved == 2 * 4 * int(jnp.count_nonzero(found))


@pytest.mark.parametrize("sizes", bench_pages.GROUPED)
def test_bytes_of_groupings(sizes: tuple[int, int, int]) -> None:
    case = bench_pages.group_case(*sizes)
    results = jax.eval_shape(case.program, *case.arguments)
    arrays = jax.tree.leaves((case.arguments, results))
    assert case.moved == sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
    ids = np.asarray(case.arguments[0])
    assert all(len(set(row)) == sizes[1] for row in ids.tolist()) and ids.max() < sizes[2]


def test_pages_are_changed_again_and_again() -> None:
    program = bench_pages.changed_in_place(jnp.add, jnp.zeros((2, 3), jnp.int32))
    one = jnp.ones((2, 3), jnp.int32)
    program(one)
    np.testing.assert_array_equal(program(one), np.full((2, 3), 2))


@pytest.mark.parametrize("microseconds, keeps", [(100.0, True), (100.1, False)])
def test_lines_say_whether_a_copy_keeps_to_its_limit(microseconds: float, keeps: bool) -> None:
    case = bench_pages.Case("commit_pages", {"pages": 2}, jnp.add, (), 1 << 20, limit=100.0)
    found = bench_pages.line_of(case, microseconds, bandwidth=2**20 * 1e4)
    assert found["keeps_limit"] is keeps
    assert found["percent_of_bandwidth"] == (100.0 if keeps else 99.9)
    assert ("within 100 us" if keeps else "ABOVE 100 us") in bench_pages.row_of(found, case)
    free = bench_pages.line_of(case._replace(limit=None), microseconds, 1.0)
    assert "keeps_limit" not in free
    assert bench_pages.row_of(free, case._replace(limit=None)).endswith("%")


@pytest.mark.gpu
def test_times_of_pages_and_groupings() -> None:
    for case in (bench_pages.kv_case(1), bench_pages.group_case(1, 8, 128)):
        assert bench_pages.microseconds_of(case) > 0


@pytest.mark.parametrize("module", [bench_attention, bench_pages], ids=lambda m: m.__name__)
def test_without_a_gpu_they_end_with_one_line(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_kernels(dtype: str, wanted: str) -> Any:
        options: Any = {"platform": "cpu", "device_kind": "cpu", "capability": 0}
        return choose_kernels(**options, dtype=dtype, wanted=wanted)

    monkeypatch.setattr(module, "find_kernels", find_kernels)
    monkeypatch.setattr("sys.argv", [module.__name__])
    with pytest.raises(SystemExit, match="^kernel 'triton' cannot be used: it needs an NVIDIA GPU"):
        module.main()


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([], 0),
        ([(5, 2)], 2),
        ([(0, 3), (3, 1), (6, 2)], 6),  # one after the other, and a gap
        ([(0, 9), (1, 2), (4, 3)], 9),  # within another
        ([(0, 4), (2, 5), (6, 4), (20, 1)], 11),
    ],
)
def test_time_in_which_anything_runs(spans: list[tuple[int, int]], wanted: int) -> None:
    events = [device_times.Event(start, length, "kernel") for start, length in spans]
    assert device_times.busy_microseconds(events) == wanted
