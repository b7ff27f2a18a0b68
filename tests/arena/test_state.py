"""The arena in JAX, against the NumPy codec and against loops over the edits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.arena import format, state
from moejax.arena.control import Control, KvEdits, KvLayout, Layout, pack, unpack
from moejax.arena.geometry import LinearShape
from moejax.arena.state import ArenaState

POISON = format.POISON_WORD
PAGE_WORDS = 256
PAGES, HOST_PAGES = 6, 4

gather = jax.jit(state.gather_pages)


def random_words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


def random_arena() -> tuple[np.ndarray, np.ndarray]:
    """Pages on the device, page 0 of them poison, and pages on the host."""
    pages = random_words(PAGES, PAGE_WORDS)
    pages[0] = POISON
    return pages, random_words(HOST_PAGES, PAGE_WORDS, seed=1)


# Reading and writing pages.


@given(ids=st.lists(st.integers(-HOST_PAGES, PAGES - 1), min_size=5, max_size=5))
def test_pages_of_both_pools_are_read_as_the_codec_reads_them(ids: list[int]) -> None:
    pages, host = random_arena()
    numbers = np.array(ids, np.int32)
    found = gather(jnp.asarray(pages), jnp.asarray(numbers), jnp.asarray(host))
    wanted = format.read_run(pages, host, numbers, 5 * PAGE_WORDS)
    np.testing.assert_array_equal(np.asarray(found).reshape(-1), wanted)


@pytest.mark.parametrize(
    "page", [PAGES, 2**31 - 1, -HOST_PAGES - 1, -(2**31)], ids=["after", "max", "host", "min"]
)
def test_an_id_outside_of_both_pools_reads_as_poison(page: int) -> None:
    pages, host = random_arena()
    found = gather(jnp.asarray(pages), jnp.array([page, 1], jnp.int32), jnp.asarray(host))
    assert (np.asarray(found[0]) == POISON).all()
    np.testing.assert_array_equal(found[1], pages[1])


@pytest.mark.parametrize("page", [-1, -PAGES, PAGES])
def test_a_negative_id_without_a_host_pool_reads_as_poison(page: int) -> None:
    pages, _ = random_arena()
    found = gather(jnp.asarray(pages), jnp.array([page], jnp.int32))
    assert (np.asarray(found) == POISON).all()


def test_ids_of_any_shape_are_read() -> None:
    pages, host = random_arena()
    ids = np.array([[1, -1, 2], [-2, 5, 0]], np.int32)
    found = gather(jnp.asarray(pages), jnp.asarray(ids), jnp.asarray(host))
    assert found.shape == (2, 3, PAGE_WORDS)
    np.testing.assert_array_equal(found[0, 1], host[0])
    np.testing.assert_array_equal(found[1, 0], host[1])
    np.testing.assert_array_equal(found[1, 1], pages[5])


def test_pages_are_written_and_ids_out_of_range_are_left_out() -> None:
    pages, _ = random_arena()
    values = random_words(5, PAGE_WORDS, seed=2)
    ids = jnp.array([4, PAGES, 1, -1, 2**31 - 1], jnp.int32)
    found = state.write_pages(jnp.asarray(pages), ids, jnp.asarray(values))
    wanted = pages.copy()
    wanted[4], wanted[1] = values[0], values[2]
    np.testing.assert_array_equal(found, wanted)


def test_page_0_is_not_written_as_a_page() -> None:
    pages, _ = random_arena()
    values = random_words(2, PAGE_WORDS, seed=2)
    found = state.write_pages(jnp.asarray(pages), jnp.array([0, 3], jnp.int32), jnp.asarray(values))
    assert (np.asarray(found[0]) == POISON).all()
    np.testing.assert_array_equal(found[3], values[1])


# Values in words.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_are_packed_low_end_first(dtype: str) -> None:
    values = random_words(3, 4).view(format.DTYPES[dtype])
    words = state.values_to_words(jnp.asarray(values))
    np.testing.assert_array_equal(words, values.view(np.uint32))
    back = state.words_to_values(words, dtype)
    assert np.asarray(back).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        LinearShape(parts=2, rows=24, columns=33),
        LinearShape(parts=2, rows=65, columns=8),
        LinearShape(parts=1, rows=130, columns=5),
    ],
    ids=["halves of one atom", "halves of two atoms", "down"],
)
def test_a_dense_run_is_decoded_as_the_codec_encoded_it(shape: LinearShape, dtype: str) -> None:
    rng = np.random.default_rng(3)
    parts = rng.standard_normal((shape.parts, shape.rows, shape.columns), np.float32)
    parts = parts.astype(format.DTYPES[dtype])
    matrix = format.stack_halves(*parts) if shape.parts == 2 else parts[0]
    run = format.encode_dense(matrix)
    assert run.nbytes == shape.dense_bytes(dtype)
    rest = np.full(100, POISON, np.uint32)  # the run's last page is longer than the run
    found = state.decode_dense(jnp.asarray(np.concatenate([run, rest])), shape, dtype)
    assert np.asarray(found).tobytes() == parts.tobytes()


# KV of tokens.

TOKEN_WORDS, BLOCK_SIZE = 10, 24  # 240 of 256 words


def test_tokens_are_written_to_their_places_and_nothing_else_changes() -> None:
    pages, _ = random_arena()
    values = random_words(4, TOKEN_WORDS, seed=4)
    found = state.write_tokens(
        jnp.asarray(pages),
        jnp.array([3, 3, 1, 5], jnp.int32),
        jnp.array([0, 23, 7, 2], jnp.int32),
        jnp.asarray(values),
        jnp.ones(4, bool),
    )
    wanted = pages.copy()
    wanted[3, 0:10] = values[0]
    wanted[3, 230:240] = values[1]
    wanted[1, 70:80] = values[2]
    wanted[5, 20:30] = values[3]
    np.testing.assert_array_equal(found, wanted)


def test_invalid_tokens_and_tokens_of_no_page_are_not_written() -> None:
    pages, _ = random_arena()
    values = random_words(5, TOKEN_WORDS, seed=4)
    found = state.write_tokens(
        jnp.asarray(pages),
        jnp.array([2, 3, PAGES, -1, 0], jnp.int32),  # -1 is a page of the host, 0 is poison
        jnp.array([1, 1, 1, 1, 1], jnp.int32),
        jnp.asarray(values),
        jnp.array([True, False, True, True, True]),
    )
    wanted = pages.copy()
    wanted[2, 10:20] = values[0]
    np.testing.assert_array_equal(found, wanted)


def test_tokens_are_read_in_the_order_of_their_blocks() -> None:
    pages, _ = random_arena()
    ids = jnp.array([[4, 2], [1, 0]], jnp.int32)
    found = state.read_tokens(jnp.asarray(pages), ids, BLOCK_SIZE, TOKEN_WORDS)
    assert found.shape == (2, 2 * BLOCK_SIZE, TOKEN_WORDS)
    np.testing.assert_array_equal(found[0, 0], pages[4, :10])
    np.testing.assert_array_equal(found[0, 23], pages[4, 230:240])
    np.testing.assert_array_equal(found[0, 24], pages[2, :10])
    assert (np.asarray(found[1, 24:]) == POISON).all()


# Edits.

MOE_LAYERS, EXPERTS = 2, 3
ROWS = 4
LINEARS = 4  # that are not experts
SLOTS = {"gate_up_pages": 4, "down_pages": 2, "linear_pages": 3}


class Kind(NamedTuple):
    """Sizes of the tables of a kind of KV."""

    layers: int
    blocks: int
    blocks_per_row: int


KINDS = (Kind(3, 5, 3), Kind(1, 6, 2), Kind(2, 3, 4))


def make_layout(num_kinds: int, expert_edits: int = 6) -> Layout:
    kinds = tuple(KvLayout(layers=kind.layers, blocks=3, row_edits=4) for kind in KINDS[:num_kinds])
    return Layout(tokens=1, rows=1, expert_edits=expert_edits, kinds=kinds)


LAYOUT = make_layout(3)


@partial(jax.jit, static_argnames="layout")
def apply(before: ArenaState, array: jax.Array, layout: Layout = LAYOUT) -> ArenaState:
    return state.apply_edits(before, unpack(array, layout))


def make_state(num_kinds: int = 3) -> ArenaState:
    """Tables of numbers that no edit holds, over pages of poison."""

    def table(*shape: int) -> jax.Array:
        return jnp.asarray(1000 + np.arange(np.prod(shape), dtype=np.int32).reshape(1, *shape))

    kinds = KINDS[:num_kinds]
    return ArenaState(
        pages=jnp.full((1, PAGES, PAGE_WORDS), POISON, jnp.uint32),
        gate_up_pages=table(MOE_LAYERS, EXPERTS, SLOTS["gate_up_pages"]),
        down_pages=table(MOE_LAYERS, EXPERTS, SLOTS["down_pages"]),
        widths=table(MOE_LAYERS, EXPERTS, 2),
        linear_pages=table(LINEARS, SLOTS["linear_pages"]),
        linear_widths=table(LINEARS),
        block_pages=tuple(table(kind.layers, kind.blocks) for kind in kinds),
        block_tables=tuple(table(ROWS, kind.blocks_per_row) for kind in kinds),
    )


def tables_of(state: ArenaState) -> dict[str, np.ndarray]:
    names = ("gate_up_pages", "down_pages", "widths", "linear_pages", "linear_widths")
    found = {name: np.array(getattr(state, name)) for name in names}
    for name in ("block_pages", "block_tables"):
        found |= {f"{name}.{i}": np.array(t) for i, t in enumerate(getattr(state, name))}
    return found


def edited_by_loops(tables: dict[str, np.ndarray], control: Control) -> dict[str, np.ndarray]:
    """What FORMAT.md section 4 says of the edits, one after the other."""
    tables = {name: table.copy() for name, table in tables.items()}
    for i, edits in enumerate(control.kv_edits):
        for block, *pages in edits.blocks:
            for layer, page in enumerate(pages):
                tables[f"block_pages.{i}"][0, layer, block] = page
        for row, index, block in edits.rows:
            tables[f"block_tables.{i}"][0, row, index] = block
    for kind, linear, slot, value in control.expert_edits:
        if kind == 2:
            at = (
                ("linear_widths", (0, linear))
                if slot == -1
                else ("linear_pages", (0, linear, slot))
            )
            tables[at[0]][at[1]] = value
            continue
        layer, expert = divmod(linear, EXPERTS)
        if slot == -1:
            tables["widths"][0, layer, expert, kind] = value
        else:
            name = "down_pages" if kind else "gate_up_pages"
            tables[name][0, layer, expert, slot] = value
    return tables


def assert_same_tables(found: ArenaState, wanted: dict[str, np.ndarray]) -> None:
    tables = tables_of(found)
    assert tables.keys() == wanted.keys()
    for name, table in tables.items():
        np.testing.assert_array_equal(table, wanted[name], err_msg=name)
    assert (np.asarray(found.pages) == POISON).all()


def test_edits_by_hand() -> None:
    control = Control(
        [],
        kv_edits=[
            KvEdits(blocks=[(4, 11, 12, 13)], rows=[(2, 1, 4)]),
            KvEdits(blocks=[(4, 14), (5, 15)]),
            KvEdits(rows=[(3, 3, 2), (0, 0, 1), (3, 2, 2)]),
        ],
        expert_edits=[
            (0, 5, 3, 21),
            (1, 0, 1, -7),
            (0, 4, -1, 16),
            (1, 4, -1, 2),
            (2, 3, 2, 22),
            (2, 1, -1, 6),
        ],
    )
    found = tables_of(apply(make_state(), jnp.asarray(pack(control, LAYOUT))))
    assert found["block_pages.0"][0, :, 4].tolist() == [11, 12, 13]
    assert found["block_tables.0"][0, 2, 1] == 4
    assert found["block_pages.1"][0, 0, 4:].tolist() == [14, 15]
    assert found["block_tables.2"][0, [3, 0, 3], [3, 0, 2]].tolist() == [2, 1, 2]
    assert found["gate_up_pages"][0, 1, 2, 3] == 21  # linear 5 is expert 2 of layer 1
    assert found["down_pages"][0, 0, 0, 1] == -7  # a page of the host
    assert found["widths"][0, 1, 1].tolist() == [16, 2]
    assert found["linear_pages"][0, 3, 2] == 22
    assert found["linear_widths"][0, 1] == 6
    before = tables_of(make_state())
    changed = {name: int((found[name] != before[name]).sum()) for name in found}
    assert {name: count for name, count in changed.items() if count} == {
        "block_pages.0": 3,
        "block_tables.0": 1,
        "block_pages.1": 2,
        "block_tables.2": 3,
        "gate_up_pages": 1,
        "down_pages": 1,
        "widths": 2,
        "linear_pages": 1,
        "linear_widths": 1,
    }


pages_of_edits = st.integers(-HOST_PAGES, PAGES - 1)
expert_edits = st.lists(
    st.integers(0, 2).flatmap(
        lambda kind: st.tuples(
            st.just(kind),
            st.integers(0, (LINEARS if kind == 2 else MOE_LAYERS * EXPERTS) - 1),
            st.integers(-1, list(SLOTS.values())[kind] - 1),
            pages_of_edits,
        )
    ),
    unique_by=lambda edit: edit[:3],
    max_size=LAYOUT.expert_edits,
)


def edits_of(kind: Kind, layout: KvLayout) -> st.SearchStrategy[KvEdits]:
    """Any edits of a kind's tables that one step may bring."""
    blocks = st.lists(
        st.tuples(st.integers(0, kind.blocks - 1), *[pages_of_edits] * kind.layers),
        unique_by=lambda edit: edit[0],
        max_size=layout.blocks,
    )
    rows = st.lists(
        st.tuples(
            st.integers(0, ROWS - 1),
            st.integers(0, kind.blocks_per_row - 1),
            st.integers(0, kind.blocks - 1),
        ),
        unique_by=lambda edit: edit[:2],
        max_size=layout.row_edits,
    )
    return st.builds(KvEdits, blocks=blocks, rows=rows)


@pytest.mark.parametrize("num_kinds", [2, 3])
@given(data=st.data(), expert_edits=expert_edits)
def test_edits_do_what_loops_over_them_do(
    num_kinds: int, data: st.DataObject, expert_edits: list[tuple[int, int, int, int]]
) -> None:
    layout = make_layout(num_kinds)
    kv_edits = [
        data.draw(edits_of(kind, sizes))
        for kind, sizes in zip(KINDS[:num_kinds], layout.kinds, strict=True)
    ]
    control = Control([], kv_edits=kv_edits, expert_edits=expert_edits)
    before = make_state(num_kinds)
    wanted = edited_by_loops(tables_of(before), control)
    assert_same_tables(apply(before, jnp.asarray(pack(control, layout)), layout), wanted)


def test_edits_beyond_the_counts_do_nothing() -> None:
    edits = [
        KvEdits(blocks=[(1, 5, 5, 5), (2, 5, 5, 5)], rows=[(0, 0, 1), (1, 1, 2)]),
        KvEdits(blocks=[(1, 5), (2, 5)], rows=[(0, 0, 1), (1, 1, 2)]),
        KvEdits(blocks=[(1, 5, 5), (2, 5, 5)], rows=[(0, 0, 1), (1, 1, 2)]),
    ]
    changes = [(0, 0, 0, 5), (1, 1, 1, 5), (0, 2, -1, 5), (1, 3, -1, 5)]
    array = pack(Control([], kv_edits=edits, expert_edits=changes), LAYOUT)
    # The counts of FORMAT.md section 4.
    array[3] = 2
    array[6:12] = [1, 2, 0, 1, 2, 0]
    first, second, third = edits
    kept = [first._replace(blocks=first.blocks[:1]), KvEdits((), second.rows[:1]), third]
    kept[2] = KvEdits(third.blocks, ())
    before = make_state()
    wanted = edited_by_loops(tables_of(before), Control([], kept, changes[:2]))
    assert_same_tables(apply(before, jnp.asarray(array)), wanted)


def test_an_array_without_edits_changes_nothing() -> None:
    array = pack(Control([]), LAYOUT)
    sections = [name for name in LAYOUT.sections if "edits" in name]
    assert len(sections) == 7
    for name in sections:  # counted as nothing, whatever stands there
        start = LAYOUT.offsets[name]
        array[start : start + int(np.prod(LAYOUT.sections[name]))] = 1
    before = make_state()
    assert_same_tables(apply(before, jnp.asarray(array)), tables_of(before))


def test_a_bucket_may_have_no_room_for_expert_edits() -> None:
    layout = make_layout(1, expert_edits=0)
    control = Control([], kv_edits=[KvEdits(blocks=[(3, 7, 8, 9)], rows=[(3, 2, 3)])])
    before = make_state(1)
    found = apply(before, jnp.asarray(pack(control, layout)), layout)
    assert_same_tables(found, edited_by_loops(tables_of(before), control))
