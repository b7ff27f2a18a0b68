"""FORMAT.md section 4: the control array, by the numbers of the page and not by our names."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.arena.control import (
    MAX_KV_KINDS,
    Control,
    KvEdits,
    KvLayout,
    Layout,
    RowControl,
    pack,
    unpack,
)
from moejax.errors import ConfigError

# Two kinds of KV: of two layers, and of one.
KINDS = (KvLayout(layers=2, blocks=3, row_edits=4), KvLayout(layers=1, blocks=2, row_edits=1))
LAYOUT = Layout(tokens=4, rows=2, expert_edits=2, kinds=KINDS)
NO_KV = KvLayout(layers=1, blocks=0, row_edits=0)


def pack_row(**fields: Any) -> list[int]:
    """The 16 fields of the only row of a step."""
    row = {"row": 0, "tokens": [1], "cached": 0, "sample": False} | fields
    layout = Layout(tokens=len(row["tokens"]), rows=1, expert_edits=0, kinds=(NO_KV,))
    start = 16 + 2 * layout.tokens
    return pack(Control([RowControl(**row)]), layout)[start:].tolist()


def test_sections_follow_each_other_without_gaps() -> None:
    assert LAYOUT.offsets == {
        "header": 0,
        "tokens": 16,
        "targets": 20,
        "rows": 24,
        "block_edits.0": 56,  # after 2 rows of 16 fields
        "row_edits.0": 65,  # after 3 of 1 + 2 words
        "block_edits.1": 77,  # after 4 of 3 words
        "row_edits.1": 81,  # after 2 of 1 + 1 words
        "expert_edits": 84,  # after 1 of 3 words
    }
    assert LAYOUT.size == 92  # 2 of 4 words


def test_a_whole_array_by_hand() -> None:
    control = Control(
        rows=[
            RowControl(
                row=5,
                tokens=[11, 12],
                targets=[12, -1],
                cached=8,
                sample=True,
                forced=7,
                seed=(3 << 32) + 2,
                temperature=1.0,
                top_p=0.5,
                min_p=2.0,
                top_k=9,
                presence_penalty=0.5,
                frequency_penalty=2.0,
                repetition_penalty=0.5,
                changes_logits=True,
                bans_stops=True,
            ),
            RowControl(
                row=1, tokens=[-1], cached=30, sample=False, exact_routing=True, long_rope=True
            ),
        ],
        kv_edits=[
            KvEdits(blocks=[(6, 101, 102)], rows=[(5, 1, 6), (1, 0, 4)]),
            KvEdits(blocks=[(9, 103), (8, 104)], rows=[(5, 3, 8)]),
        ],
        expert_edits=[(1, 13, -1, 16)],
        routing_active=True,
        want_logprobs=True,
    )
    array = pack(control, LAYOUT)
    half, one, two = 0x3F000000, 0x3F800000, 0x40000000
    assert array.dtype == np.int32
    assert array[0:16].tolist() == [1, 2, 3, 1, 1, 1, 1, 2, 2, 1] + [0] * 6
    assert array[16:20].tolist() == [11, 12, -1, 0]
    assert array[20:24].tolist() == [12, -1, -1, -1]
    assert array[24:40].tolist() == [
        *(5, 0, 2, 8, 1 + 4 + 8, 7, 2, 3, one, half, two, 9, half, two, half, 0)
    ]
    assert array[40:56].tolist() == [*(1, 2, 1, 30, 2 + 16, -1, 0, 0, 0, one, 0, 0, 0, 0, one, 0)]
    assert array[56:65].tolist() == [6, 101, 102] + [0] * 6
    assert array[65:77].tolist() == [5, 1, 6, 1, 0, 4] + [0] * 6
    assert array[77:81].tolist() == [9, 103, 8, 104]
    assert array[81:84].tolist() == [5, 3, 8]
    assert array[84:92].tolist() == [1, 13, -1, 16] + [0] * 4


def test_an_empty_control_has_a_version_and_no_targets() -> None:
    array = pack(Control([]), LAYOUT)
    assert array[0] == 1
    assert array[20:24].tolist() == [-1] * 4
    assert np.count_nonzero(array) == 5


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, 0),
        ({"sample": True}, 1),
        ({"exact_routing": True}, 2),
        ({"changes_logits": True}, 4),
        ({"bans_stops": True}, 8),
        ({"long_rope": True}, 16),
        ({"sample": True, "exact_routing": True, "bans_stops": True}, 11),
    ],
)
def test_flags_are_bits(options: dict[str, bool], flags: int) -> None:
    assert pack_row(**options)[4] == flags


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [
        (0, 0, 0),
        (1, 1, 0),
        (2**31, -(2**31), 0),
        (2**32 - 1, -1, 0),
        (2**32, 0, 1),
        (2**63 - 1, -1, 2**31 - 1),
        (-1, -1, -1),
        (-(2**63), 0, -(2**31)),
    ],
)
def test_a_seed_is_two_words_low_first(seed: int, low: int, high: int) -> None:
    assert pack_row(seed=seed)[6:8] == [low, high]


@pytest.mark.parametrize(
    ("value", "bits"),
    [(0.0, 0), (1.0, 0x3F800000), (0.1, 0x3DCCCCCD), (-0.0, -(2**31)), (-1.0, -0x40800000)],
)
def test_floats_travel_as_their_bits(value: float, bits: int) -> None:
    assert pack_row(temperature=value, top_p=value, min_p=value)[8:11] == [bits] * 3
    penalties = {"presence_penalty": value, "frequency_penalty": value, "repetition_penalty": value}
    assert pack_row(**penalties)[12:15] == [bits] * 3


@given(st.floats(width=32, allow_nan=False))
def test_every_float_comes_back(value: float) -> None:
    found = pack_row(temperature=value)[8]
    assert np.array([found], np.int32).view(np.float32)[0] == value


def edits_of(kind: int, edits: KvEdits) -> Control:
    """A step that changes the tables of one kind."""
    return Control([], kv_edits=[edits if i == kind else KvEdits() for i in range(len(KINDS))])


TWO_ROWS = [RowControl(row=row, tokens=[1, 2], cached=0, sample=False) for row in range(2)]


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (Control(TWO_ROWS[:1] * 3), "3 rows do not fit a bucket of 2"),
        (
            Control([TWO_ROWS[0], RowControl(row=1, tokens=[1, 2, 3], cached=0, sample=False)]),
            "5 tokens do not fit a bucket of 4",
        ),
        (edits_of(0, KvEdits(blocks=[(1, 2, 3)] * 4)), r"4 block_edits\.0 do not fit 3"),
        (edits_of(0, KvEdits(rows=[(0, 0, 1)] * 5)), r"5 row_edits\.0 do not fit 4"),
        (edits_of(1, KvEdits(blocks=[(1, 2)] * 3)), r"3 block_edits\.1 do not fit 2"),
        (edits_of(1, KvEdits(rows=[(0, 0, 1)] * 2)), r"2 row_edits\.1 do not fit 1"),
        (Control([], expert_edits=[(0, 0, 0, 1)] * 3), "3 expert_edits do not fit 2"),
    ],
    ids=["rows", "tokens", "blocks 0", "rows 0", "blocks 1", "rows 1", "expert edits"],
)
def test_what_a_section_does_not_hold_is_refused(control: Control, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(control, LAYOUT)


@pytest.mark.parametrize("targets", [[5], [5, 6]], ids=["one", "two"])
def test_targets_that_are_not_as_many_as_tokens_are_refused(targets: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(targets)} targets for 3 tokens"):
        pack_row(tokens=[1, 2, 3], targets=targets)


def test_an_edit_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_edits\.0 have 3 values each, got 2"):
        pack(edits_of(0, KvEdits(blocks=[(5, 6)])), LAYOUT)
    with pytest.raises(ValueError, match=r"block_edits\.1 have 2 values each, got 3"):
        pack(edits_of(1, KvEdits(blocks=[(5, 6, 7)])), LAYOUT)


@pytest.mark.parametrize("kinds", [1, 3])
def test_edits_of_another_number_of_kinds_are_refused(kinds: int) -> None:
    with pytest.raises(ValueError, match=f"edits of {kinds} kinds of KV, of 2"):
        pack(Control([], kv_edits=[KvEdits()] * kinds), LAYOUT)


@pytest.mark.parametrize("kinds", [0, 6])
def test_a_layout_has_one_to_five_kinds(kinds: int) -> None:
    assert MAX_KV_KINDS == 5
    with pytest.raises(ConfigError, match=f"{kinds} kinds of KV, 1 to 5 are supported"):
        Layout(tokens=1, rows=1, expert_edits=0, kinds=(NO_KV,) * kinds)


def test_the_header_has_room_for_all_kinds() -> None:
    kind = KvLayout(layers=1, blocks=2, row_edits=2)
    layout = Layout(tokens=1, rows=1, expert_edits=0, kinds=(kind,) * 5)
    edits = KvEdits(blocks=[(1, 2)], rows=[(0, 0, 1), (0, 1, 1)])
    array = pack(Control([], kv_edits=[edits] * 5), layout)
    assert array[:16].tolist() == [1, 0, 0, 0, 0, 0] + [1, 2] * 5


def test_an_array_of_another_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a control array of 92 words is needed, got \(81,\)"):
        unpack(jnp.zeros(81, jnp.int32), LAYOUT)


@given(
    tokens=st.integers(1, 9),
    rows=st.integers(1, 5),
    expert_edits=st.integers(0, 4),
    kinds=st.lists(
        st.builds(
            KvLayout,
            layers=st.integers(1, 4),
            blocks=st.integers(0, 4),
            row_edits=st.integers(0, 4),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=10)  # each is some programs
def test_unpack_finds_every_word_once_and_where_the_layout_says(
    tokens: int, rows: int, expert_edits: int, kinds: list[KvLayout]
) -> None:
    layout = Layout(tokens=tokens, rows=rows, expert_edits=expert_edits, kinds=tuple(kinds))
    kv = sum(kind.blocks * (1 + kind.layers) + kind.row_edits * 3 for kind in kinds)
    assert layout.size == 16 + 2 * tokens + 16 * rows + kv + expert_edits * 4
    parts = unpack(jnp.arange(layout.size, dtype=jnp.int32), layout)
    np.testing.assert_array_equal(
        np.concatenate([part.reshape(-1) for part in parts.values()]), np.arange(layout.size)
    )
    shapes: dict[str, tuple[int, ...]] = {
        "header": (16,),
        "tokens": (tokens,),
        "targets": (tokens,),
        "rows": (rows, 16),
        "expert_edits": (expert_edits, 4),
    }
    for i, kind in enumerate(kinds):
        shapes[f"block_edits.{i}"] = (kind.blocks, 1 + kind.layers)
        shapes[f"row_edits.{i}"] = (kind.row_edits, 3)
    assert {name: part.shape for name, part in parts.items()} == shapes


def test_unpack_gives_back_what_pack_was_given() -> None:
    rows = [
        RowControl(row=3, tokens=[7, 8], cached=0, sample=False, targets=[8, 9]),
        RowControl(row=0, tokens=[-1], cached=17, sample=True, temperature=0.7),
    ]
    first = KvEdits(blocks=[(2, 30, 31)], rows=[(3, 0, 2)])
    second = KvEdits(blocks=[(1, 32), (4, 33)], rows=[(0, 2, 4)])
    control = Control(rows, kv_edits=[first, second])
    parts = unpack(jnp.asarray(pack(control, LAYOUT)), LAYOUT)
    assert parts["tokens"].tolist() == [7, 8, -1, 0]
    assert parts["targets"].tolist() == [8, 9, -1, -1]
    assert parts["rows"][:, :5].tolist() == [[3, 0, 2, 0, 0], [0, 2, 1, 17, 1]]
    assert parts["block_edits.0"][0].tolist() == [2, 30, 31]
    assert parts["row_edits.0"][0].tolist() == [3, 0, 2]
    assert parts["block_edits.1"].tolist() == [[1, 32], [4, 33]]
    assert parts["row_edits.1"].tolist() == [[0, 2, 4]]


def test_a_row_may_stay_empty() -> None:
    """Rows of one token have their places after those of prompts, however many these are."""
    rows = [
        RowControl(row=3, tokens=[7, 8], cached=0, sample=False),
        RowControl(row=0, tokens=[], cached=0, sample=False),
        RowControl(row=4, tokens=[9], cached=5, sample=True),
    ]
    layout = Layout(tokens=4, rows=3, expert_edits=0, kinds=(NO_KV,))
    parts = unpack(jnp.asarray(pack(Control(rows), layout)), layout)
    assert parts["tokens"].tolist() == [7, 8, 9, 0]
    assert parts["rows"][:, :3].tolist() == [[3, 0, 2], [0, 2, 0], [4, 2, 1]]
