"""The ways in which the rows of a step choose their tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.arena.control import Control, KvLayout, Layout, RowControl, pack, unpack
from moejax.models.choice import (
    RowLogits,
    StepOutput,
    Way,
    choose_any_way,
    choose_one_way,
    way_of,
)

VOCAB, ROWS, TABLE_ROWS = 40, 4, 6
LAYOUT = Layout(
    tokens=ROWS, rows=ROWS, expert_edits=0, kinds=(KvLayout(layers=1, blocks=0, row_edits=0),)
)
one_way = jax.jit(choose_one_way, static_argnames="way")
any_way = jax.jit(choose_any_way)


def row(number: int, **fields: Any) -> RowControl:
    return RowControl(**{"row": number, "tokens": [3], "cached": 5, "sample": True} | fields)


def logits_of(rows: list[RowControl], *, want_logprobs: bool = False) -> RowLogits:
    control = Control(rows, want_logprobs=want_logprobs)
    fields = unpack(jnp.asarray(pack(control, LAYOUT)), LAYOUT)["rows"]
    lengths = [len(row.tokens) for row in rows] + [0] * (ROWS - len(rows))
    logits = 3 * np.random.default_rng(0).standard_normal((ROWS, VOCAB), np.float32)
    return RowLogits(
        jnp.asarray(logits), fields, jnp.asarray(lengths, jnp.int32), jnp.asarray(want_logprobs)
    )


def run_any(given: RowLogits) -> tuple[jax.Array, jax.Array, StepOutput]:
    last_tokens = jnp.arange(100, 100 + TABLE_ROWS, dtype=jnp.int32)
    marks = jnp.zeros((TABLE_ROWS, VOCAB), jnp.int32)
    biases = jnp.full((TABLE_ROWS, 1), VOCAB, jnp.int32), jnp.zeros((TABLE_ROWS, 1))
    return any_way(last_tokens, marks, *biases, given)


@pytest.mark.parametrize(
    ("rows", "want_logprobs", "way"),
    [
        ([], False, Way.GREEDY),
        ([], True, Way.ANY),
        ([row(0), row(1)], False, Way.GREEDY),
        ([row(0), row(1, temperature=0.5)], False, Way.RANDOM),
        ([row(0, top_k=3, top_p=0.5, min_p=0.5)], False, Way.GREEDY),
        ([row(0, temperature=1.0, top_k=3)], False, Way.FILTERED),
        ([row(0, temperature=1.0, top_p=0.9), row(1)], False, Way.FILTERED),
        ([row(0, temperature=1.0, min_p=0.1)], False, Way.FILTERED),
        ([row(0, temperature=1.0), row(1, top_k=1)], False, Way.RANDOM),
        ([row(0, changes_logits=True)], False, Way.ANY),
        ([row(0, temperature=1.0)], True, Way.ANY),
    ],
)
def test_the_least_that_does_what_rows_want(
    rows: list[RowControl], want_logprobs: bool, way: Way
) -> None:
    assert way_of(rows, want_logprobs=want_logprobs) is way


some_row = st.builds(
    row,
    st.integers(0, TABLE_ROWS - 1),
    tokens=st.sampled_from([[], [7]]),
    sample=st.booleans(),
    forced=st.sampled_from([-1, -1, 11]),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.2]),
    top_k=st.sampled_from([0, 1, 5]),
)


@settings(max_examples=60)
@given(rows=st.lists(some_row, max_size=ROWS, unique_by=lambda row: row.row))
def test_each_way_gives_what_any_way_gives(rows: list[RowControl]) -> None:
    way = way_of(rows, want_logprobs=False)
    given = logits_of(rows)
    wanted_last, marks, wanted = run_any(given)
    last, found = one_way(jnp.arange(100, 100 + TABLE_ROWS, dtype=jnp.int32), given, way=way)
    sampled = [i for i, row in enumerate(rows) if row.sample and row.tokens]
    assert [int(found.tokens[i]) for i in sampled] == [int(wanted.tokens[i]) for i in sampled]
    np.testing.assert_array_equal(last, wanted_last)
    np.testing.assert_array_equal(found.finite, wanted.finite)
    assert found.logprobs is None and not np.any(marks)
    # Rows that choose nothing remember what they had.
    chosen = {rows[i].row: int(found.tokens[i]) for i in sampled}
    assert last.tolist() == [chosen.get(n, 100 + n) for n in range(TABLE_ROWS)]


def test_only_broken_rows_are_not_finite() -> None:
    given = logits_of([row(0), row(1, temperature=1.0)])
    given = given._replace(logits=given.logits.at[1, 3].set(jnp.nan))
    for way in (Way.GREEDY, Way.RANDOM, Way.FILTERED):
        _, found = one_way(jnp.zeros(TABLE_ROWS, jnp.int32), given, way=way)
        assert found.finite.tolist() == [True, False, True, True]


def test_any_way_is_no_one_way() -> None:
    with pytest.raises(ValueError, match="choose_any_way"):
        choose_one_way(jnp.zeros(TABLE_ROWS, jnp.int32), logits_of([]), way=Way.ANY)
