"""Choosing tokens, against an independent NumPy implementation in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.adjust import (
    IN_PROMPT,
    IS_STOP,
    MARK_CHUNK,
    ONE_OUTPUT,
    Adjustment,
    adjust_logits,
    row_parts,
    start_row,
)
from moejax.sampling import (
    MAX_LOGPROBS,
    Logprobs,
    SamplingRows,
    choose,
    filter_logits,
    logprobs_of,
    no_logprobs,
    sample,
    wants_filters,
)

VOCAB = 12

jit_sample = jax.jit(sample)
jit_filter = jax.jit(filter_logits)
jit_choose = jax.jit(choose)
jit_logprobs = jax.jit(logprobs_of)


def make_rows(rows: int, **fields: Any) -> SamplingRows:
    """Rows of the same settings, or of one each; a seed is (low, high)."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "positions": 0}
    dtypes = {"top_k": np.int32, "positions": np.int32}
    values = {
        name: jnp.asarray(np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), rows))
        for name, value in (defaults | {k: v for k, v in fields.items() if k != "seeds"}).items()
    }
    seeds = np.broadcast_to(np.asarray(fields.get("seeds", (0, 0)), np.int32), (rows, 2))
    return SamplingRows(**values, seeds=jnp.asarray(seeds))


def draw(logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
    """Samples in batches of 64, so that one program serves."""
    count = len(logits)
    padding = -count % 64
    logits = np.pad(logits, ((0, padding), (0, 0)))
    padded = jax.tree.map(
        lambda x: np.pad(np.asarray(x), ((0, padding), *[(0, 0)] * (x.ndim - 1))), rows
    )
    found = [
        jit_sample(
            jnp.asarray(logits[at : at + 64]),
            jax.tree.map(lambda x, at=at: jnp.asarray(x[at : at + 64]), padded),
        )
        for at in range(0, len(logits), 64)
    ]
    return np.concatenate(found)[:count]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal((rows, vocab), np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def make_adjustment(rows: int, **fields: Any) -> Adjustment:
    """Nothing is adjusted, unless said otherwise."""
    values: dict[str, Any] = {
        "active": False,
        "bans_stops": False,
        "table_rows": np.arange(rows, dtype=np.int32),
        "presence": np.float32(0),
        "frequency": np.float32(0),
        "repetition": np.float32(1),
    }
    tables = {
        "marks": np.zeros((rows, VOCAB), np.int32),
        "bias_tokens": np.full((rows, 1), VOCAB, np.int32),
        "bias_values": np.zeros((rows, 1), np.float32),
    }
    if "bias_tokens" in fields:
        fields["active"] = True
    for name in values.keys() & fields.keys():
        values[name] = np.asarray(fields[name], np.asarray(values[name]).dtype)
    for name in tables.keys() & fields.keys():
        tables[name] = np.asarray(fields[name], tables[name].dtype)
        tables[name] = np.broadcast_to(tables[name], (rows, tables[name].shape[-1]))
    arrays = {name: jnp.asarray(np.broadcast_to(value, rows)) for name, value in values.items()}
    return Adjustment(**arrays, **{name: jnp.asarray(table) for name, table in tables.items()})


# Greedy.


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 7] = 1
    logits[1, [3, 9]] = 1
    rows = make_rows(3, temperature=0, top_k=1, top_p=0.1, min_p=1)
    assert draw(logits, rows).tolist() == [7, 3, 0]


def test_greedy_rows_stay_greedy_beside_random_ones() -> None:
    logits = random_logits(64)
    temperature = np.where(np.arange(64) % 2, 5.0, 0.0)
    found = draw(logits, make_rows(64, temperature=temperature, positions=np.arange(64)))
    likeliest = logits.argmax(axis=1)
    assert (found == likeliest)[::2].all()
    assert not (found == likeliest)[1::2].all()


@pytest.mark.parametrize("top_p", [1.0, 0.9], ids=["all", "filtered"])
@pytest.mark.parametrize("temperature", [1e-5, 1e-37, 2e-38, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = 10 * random_logits(64)  # divided by the temperature, many are infinite
    rows = make_rows(64, temperature=temperature, positions=np.arange(64), top_p=top_p)
    np.testing.assert_array_equal(draw(logits, rows), logits.argmax(axis=1))


# Filters.


def allowed(logits: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that stay, one row in float64: top-k, then top-p of it, then min-p."""
    values = logits.astype(np.float64)
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if top_k:
        order = order[:top_k]
    weights = np.exp(values[order] - values[order[0]])
    shares = weights / weights.sum()
    kept, mass = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if mass >= top_p:
            break
        kept.append(token)
        mass += share
    border = values[kept[-1]]
    likeliest = values[order[0]]
    return {
        token
        for token in range(len(values))
        if values[token] >= border and np.exp(values[token] - likeliest) >= min_p
    }


def kept_tokens(logits: np.ndarray, **filters: float) -> set[int]:
    found = jit_filter(jnp.asarray(logits[None]), make_rows(1, **filters))[0]
    kept = np.flatnonzero(np.asarray(found) > -np.inf)
    np.testing.assert_array_equal(found[kept], logits[kept])
    return set(kept.tolist())


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.71}, {1, 2, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.49}, {1, 2, 4}),
        ({"min_p": 0.51}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        # Of the first two, 4/7 is more than half.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1, 2}),
        ({"top_p": 0.85, "min_p": 0.7}, {1, 2}),
    ],
    ids=str,
)
def test_filters_by_hand(filters: dict[str, float], kept: set[int]) -> None:
    logits = np.log(np.array([0.04, 0.4, 0.3, 0.06, 0.2], np.float32))
    assert kept_tokens(logits, **filters) == kept


def test_equal_logits_stand_or_fall_together() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert kept_tokens(logits, top_k=1) == {1, 2, 3}
    assert kept_tokens(logits, top_k=2) == {1, 2, 3}
    assert kept_tokens(logits, top_p=0.01) == {1, 2, 3}
    assert kept_tokens(logits, min_p=1.0) == {1, 2, 3}
    assert kept_tokens(logits, top_k=4) == {0, 1, 2, 3}


@given(
    # Of the same few logits, many are equal; these distances leave no share near a limit.
    logits=st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_keep_what_numpy_keeps(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    values = np.array(logits, np.float32) / 3
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = kept_tokens(values, **filters)
    limits = [allowed(values, top_k=top_k, top_p=top_p + d, min_p=min_p + d) for d in (-1e-5, 1e-5)]
    if limits[0] == limits[1]:  # else rounding decides
        assert found == limits[0]
    assert int(values.argmax()) in found


def test_filters_are_those_of_the_row() -> None:
    logits = random_logits(3)
    rows = make_rows(3, top_k=[1, 0, 0], top_p=[1, 0.5, 1], min_p=[0, 0, 0.3])
    found = np.asarray(jit_filter(jnp.asarray(logits), rows))
    for i, filters in enumerate(
        [
            {"top_k": 1, "top_p": 1.0, "min_p": 0.0},
            {"top_k": 0, "top_p": 0.5, "min_p": 0.0},
            {"top_k": 0, "top_p": 1.0, "min_p": 0.3},
        ]
    ):
        wanted = allowed(logits[i], **filters)  # type: ignore[arg-type]
        assert set(np.flatnonzero(found[i] > -np.inf).tolist()) == wanted


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_only_tokens_that_stay_are_drawn(filters: dict[str, float]) -> None:
    one = random_logits(1)[0]
    rows = make_rows(512, temperature=2.0, positions=np.arange(512), **filters)
    found = draw(np.tile(one, (512, 1)), rows)
    settings: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    wanted = allowed(one / 2, **settings)
    assert 1 < len(wanted) < VOCAB
    assert set(found.tolist()) == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"top_p": [1.0, 0.9]}, True),
        ({"min_p": [0.0, 0.1]}, True),
        ({"top_k": [0, 5]}, True),
        ({"temperature": [1, 0], "top_p": [1.0, 0.9], "min_p": [0, 0.1], "top_k": [0, 5]}, False),
        ({"temperature": [1, 0], "top_p": [1, 0]}, False),
        ({"temperature": [0, 1], "top_p": [0, 0.9]}, True),
    ],
    ids=["none", "top_p", "min_p", "top_k", "of a greedy row", "padding", "beside padding"],
)
def test_filters_are_computed_where_a_random_row_asks(fields: dict[str, Any], wanted: bool) -> None:
    assert bool(wants_filters(make_rows(2, **fields))) == wanted


# Random choice.


def test_a_token_depends_on_its_seed_and_position_only() -> None:
    """Wherever the row stands, and whoever stands beside it."""
    logits = np.tile(random_logits(1), (64, 1))
    seeds = np.random.default_rng(1).integers(-(2**31), 2**31, (64, 2)).astype(np.int32)
    positions = np.arange(64) % 7
    first = draw(logits, make_rows(64, seeds=seeds, positions=positions))
    assert len(set(first.tolist())) > 3
    order = np.random.default_rng(2).permutation(64)
    moved = draw(logits, make_rows(64, seeds=seeds[order], positions=positions[order]))
    np.testing.assert_array_equal(moved, first[order])
    alone = [
        int(jit_sample(jnp.asarray(logits[:1]), make_rows(1, seeds=seed, positions=position))[0])
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert alone == first.tolist()
    # Neighbours with other logits and with filters.
    logits[32:] = random_logits(32, seed=3)
    top_p = np.where(np.arange(64) < 32, 1.0, 0.3)
    beside = draw(logits, make_rows(64, seeds=seeds, positions=positions, top_p=top_p))
    np.testing.assert_array_equal(beside[:32], first[:32])


@pytest.mark.parametrize(
    "fields",
    [{"seeds": (1, 0)}, {"seeds": (0, 1)}, {"seeds": (-1, -1)}, {"positions": np.arange(64) + 64}],
    ids=["low word", "high word", "both words", "positions"],
)
def test_another_seed_or_position_draws_anew(fields: dict[str, Any]) -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    before = draw(logits, make_rows(64, positions=np.arange(64)))
    after = draw(logits, make_rows(64, **({"positions": np.arange(64)} | fields)))
    assert (before == after).mean() < 0.3  # chance: 1/12


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_probabilities(temperature: float) -> None:
    draws = 4096
    one = random_logits(1, seed=5)[0]
    rows = make_rows(draws, temperature=temperature, seeds=(11, 0), positions=np.arange(draws))
    counts = np.bincount(draw(np.tile(one, (draws, 1)), rows), minlength=VOCAB)
    p = np.exp(log_softmax(one / temperature))
    # Four standard deviations; the seeds are fixed, so this passes always or never.
    assert (np.abs(counts - draws * p) <= 4 * np.sqrt(draws * p * (1 - p)) + 1).all()


# Log-probabilities.


def test_logprobs_and_ranks_are_those_of_numpy() -> None:
    logits = random_logits(5, vocab=50)
    tokens = np.array([0, 13, 49, 7, logits[4].argmax()], np.int32)
    found = jit_logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    wanted = log_softmax(logits)
    at = np.arange(5)
    np.testing.assert_allclose(found.logprob, wanted[at, tokens], atol=1e-5)
    ranks = 1 + (logits > logits[at, tokens][:, None]).sum(axis=1)
    np.testing.assert_array_equal(found.rank, ranks)
    assert found.rank[4] == 1
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(wanted, order, 1), atol=1e-5)


@given(st.lists(st.integers(-3, 3), min_size=VOCAB, max_size=VOCAB))
def test_a_chosen_token_has_the_bits_of_its_entry_in_the_list(values: list[int]) -> None:
    logits = np.tile(np.array(values, np.float32) / 7, (VOCAB, 1))
    found = jit_logprobs(jnp.asarray(logits), jnp.arange(VOCAB, dtype=jnp.int32))
    ids, listed = np.asarray(found.top_ids[0]), np.asarray(found.top_logprobs[0])
    assert sorted(ids.tolist()) == list(range(VOCAB))
    entry = dict(zip(ids.tolist(), listed.tolist(), strict=True))
    assert [entry[token] for token in range(VOCAB)] == found.logprob.tolist()
    rank = {token: 1 + sum(v > values[token] for v in values) for token in range(VOCAB)}
    assert found.rank.tolist() == list(rank.values())


def test_logprobs_are_before_temperature_and_filters() -> None:
    logits = random_logits(2)
    rows = make_rows(2, temperature=0.1, top_k=1)
    adjustment = make_adjustment(2, bias_tokens=[[0]], bias_values=[[-9.0]])
    forced = jnp.full(2, -1, jnp.int32)
    tokens, found = jit_choose(jnp.asarray(logits), rows, adjustment, forced, jnp.array(True))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    np.testing.assert_allclose(found.logprob, log_softmax(logits).max(axis=1), atol=1e-5)
    assert np.isfinite(found.top_logprobs).all()


def test_no_target_gives_no_nan() -> None:
    found = jit_logprobs(jnp.asarray(random_logits(VOCAB)), jnp.full(VOCAB, -1, jnp.int32))
    assert np.isfinite(found.logprob).all()


# Choosing.


def test_forced_tokens_are_taken_and_scored() -> None:
    logits = random_logits(3)
    worst = int(logits[0].argmin())
    forced = jnp.array([worst, -1, 0], jnp.int32)
    rows = make_rows(3, temperature=[1, 0, 0])
    tokens, found = jit_choose(
        jnp.asarray(logits), rows, make_adjustment(3), forced, jnp.array(True)
    )
    assert tokens.tolist() == [worst, logits[1].argmax(), 0]
    wanted = log_softmax(logits)[np.arange(3), np.asarray(tokens)]
    np.testing.assert_allclose(found.logprob, wanted, atol=1e-5)
    assert found.rank.tolist()[:2] == [VOCAB, 1]


def test_logprobs_that_nobody_wants_are_zeros() -> None:
    logits, forced = jnp.asarray(random_logits(3)), jnp.full(3, -1, jnp.int32)
    args = (logits, make_rows(3), make_adjustment(3), forced)
    tokens, found = jit_choose(*args, jnp.array(False))
    wanted, scored = jit_choose(*args, jnp.array(True))
    np.testing.assert_array_equal(tokens, wanted)
    assert isinstance(found, Logprobs)
    for empty, nothing, full in zip(found, no_logprobs(3, VOCAB), scored, strict=True):
        assert (empty.shape, empty.dtype) == (full.shape, full.dtype)
        np.testing.assert_array_equal(empty, nothing)
        assert (np.asarray(empty) == 0).all()


@pytest.mark.parametrize(("vocab", "top"), [(12, 12), (20, 20), (21, 20), (1000, 20)])
def test_a_list_is_as_long_as_the_vocabulary_or_20(vocab: int, top: int) -> None:
    found = logprobs_of(jnp.zeros((1, vocab), jnp.float32), jnp.zeros(1, jnp.int32))
    assert found.top_ids.shape == found.top_logprobs.shape == (1, top)
    assert no_logprobs(1, vocab).top_ids.shape == (1, top)


# Penalties, biases, bans.


def adjusted_by_loops(
    logits: np.ndarray, prompt: list[int], output: list[int], stops: list[int], biases: Any, p: Any
) -> np.ndarray:
    """One row in float64, from the definitions: token by token."""
    x = logits.astype(np.float64)
    for token, bias in biases:
        x[token] += bias
    if p["bans_stops"]:
        x[stops] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / p["repetition"] if x[token] > 0 else x[token] * p["repetition"]
    for token in set(output):
        x[token] -= p["frequency"] * output.count(token) + p["presence"]
    return x


def tables_of(rows: list[dict[str, Any]], biases: int = 4) -> tuple[Any, Any, Any]:
    """What `start_row` makes of rows, over tables that hold something else before."""
    tables: Any = (
        jnp.full((len(rows), VOCAB), 7, jnp.int32),
        jnp.ones((len(rows), biases), jnp.int32),
        jnp.ones((len(rows), biases), jnp.float32),
    )
    for row, lists in enumerate(rows):
        for part in row_parts(row, vocab=VOCAB, num_biases=biases, **lists):
            tables = jax.jit(start_row)(*tables, part)
    return tables


tokens_lists = st.lists(st.integers(0, VOCAB - 1), max_size=8)
rows_strategy = st.fixed_dictionaries(
    {
        "prompt": tokens_lists,
        "output": tokens_lists,
        "stops": tokens_lists,
        "biases": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4).map(
            lambda found: sorted(found.items())
        ),
    }
)
penalties = st.fixed_dictionaries(
    {
        "presence": st.floats(-2, 2),
        "frequency": st.floats(-2, 2),
        "repetition": st.floats(0.1, 10),
        "bans_stops": st.booleans(),
        "active": st.booleans(),
    }
)


@given(st.lists(st.tuples(rows_strategy, penalties), min_size=3, max_size=3), st.integers(0, 99))
def test_logits_are_adjusted_as_the_definitions_say(drawn: Any, seed: int) -> None:
    logits = random_logits(3, seed=seed)
    marks, bias_tokens, bias_values = tables_of([lists for lists, _ in drawn])
    fields = {name: [p[name] for _, p in drawn] for name in drawn[0][1]}
    order = np.array([2, 0, 1], np.int32)  # the step's rows stand anywhere in the tables
    adjustment = make_adjustment(3, **{k: np.asarray(v)[order] for k, v in fields.items()})
    adjustment = adjustment._replace(
        marks=marks, bias_tokens=bias_tokens, bias_values=bias_values, table_rows=jnp.array(order)
    )
    found = np.asarray(jax.jit(adjust_logits)(jnp.asarray(logits), adjustment))
    for i, row in enumerate(order):
        lists, p = drawn[row]
        if p["active"]:
            wanted = adjusted_by_loops(logits[i], **lists, p=p)
            np.testing.assert_allclose(found[i], wanted, rtol=1e-4, atol=1e-3)
        else:
            np.testing.assert_array_equal(found[i], logits[i])


def test_long_lists_come_in_parts() -> None:
    prompt = [1, 2, 3] * MARK_CHUNK
    output = [4] * (MARK_CHUNK + 5)
    lists = {"prompt": prompt, "output": output, "stops": [2], "biases": [(5, 1.5)]}
    parts = row_parts(0, vocab=VOCAB, num_biases=2, **lists)
    assert len(parts) == 3 and [bool(part.is_first) for part in parts] == [True, False, False]
    marks, bias_tokens, bias_values = tables_of([lists], biases=2)
    wanted = np.zeros(VOCAB, np.int32)
    wanted[[1, 2, 3]] = IN_PROMPT
    wanted[2] |= IS_STOP
    wanted[4] = ONE_OUTPUT * len(output)
    np.testing.assert_array_equal(marks[0], wanted)
    assert bias_tokens.tolist() == [[5, VOCAB]] and bias_values.tolist() == [[1.5, 0.0]]


def test_an_adjusted_row_leaves_its_neighbours_alone() -> None:
    logits = jnp.asarray(random_logits(2))
    rows, forced = make_rows(2, temperature=[0, 1]), jnp.full(2, -1, jnp.int32)
    plain, _ = jit_choose(logits, rows, make_adjustment(2), forced, jnp.array(False))
    marks = np.zeros((2, VOCAB), np.int32)
    marks[0, plain[0]] = ONE_OUTPUT
    marks[1] = ONE_OUTPUT  # left by the sequence before, and of no effect
    adjustment = make_adjustment(2, active=[True, False], frequency=2.0, presence=100, marks=marks)
    found, _ = jit_choose(logits, rows, adjustment, forced, jnp.array(False))
    assert found[0] != plain[0] and found[1] == plain[1]
