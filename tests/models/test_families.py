"""A small model like each family: steps over the arena, whole sequences, gradients."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.small_configs import FAMILIES, LENGTH, VOCAB
from models.small_model import (
    QUICK,
    Arena,
    jit_forward,
    log_softmax,
    make_model,
    mixed_bucket,
    row_of,
    whole_logprobs,
)
from moejax.arena.control import RowControl, pack
from moejax.models.decoder import flatten_params
from moejax.models.whole import forward

TOLERANCE = 2e-5
# Families whose layers do not all see everything.
LIMITED = ("gemma", "gpt-oss", "llama4")


class Step(NamedTuple):
    """Row → tokens of it, and rows of one token."""

    chunks: dict[int, int]
    singles: tuple[int, ...] = ()


# Chunks of any size, alone and with others; then single tokens, past a chunk that comes late.
STEPS = [
    Step({1: 9}),
    Step({1: 1, 4: 20}),
    Step({4: 7, 1: 30}),
    Step({1: 17}, (4,)),
    *[Step({}, (4, 1))] * 3,
    Step({2: 12}, (1, 4)),
    *[Step({}, (2, 1, 4))] * 5,
    Step({2: 3, 4: 9}, (1,)),
    *[Step({}, (4, 2, 1))] * 9,
]
MOST_QUERIES = 30


def lengths() -> dict[int, int]:
    """Row → tokens that it has after all steps."""
    found: dict[int, int] = {}
    for chunks, singles in STEPS:
        for row, count in [*chunks.items(), *((row, 1) for row in singles)]:
            found[row] = found.get(row, 0) + count
    return found


@cache
def program(name: str) -> Any:
    return jit_forward(make_model(name), mixed_bucket(name))


@cache
def wanted(name: str) -> dict[int, tuple[list[int], np.ndarray]]:
    """Row → its tokens, and the log-probabilities after each of them."""
    model, found = make_model(name), {}
    for row, length in lengths().items():
        tokens = np.random.default_rng(row).integers(0, VOCAB, length).tolist()
        # Longrope asks for the most tokens that a sequence may have; None: many.
        is_short = model.config.long_rope_after is not None and not is_long(row)
        max_length = model.config.long_rope_after if is_short else None
        found[row] = tokens, whole_logprobs(model, tokens, max_length=max_length)
    return found


def is_long(row: int) -> bool:
    """Whether the sequence of a row is longer than what longrope was trained with at first."""
    return lengths()[row] > 32


def run(arena: Arena, rows: list[RowControl]) -> list[np.ndarray]:
    """The log-probabilities after each token of each row."""
    array = pack(arena.control(rows), mixed_bucket(arena.name).layout)
    arena.state, logits = program(arena.name)(
        arena.model.params, arena.state, arena.rows.last_tokens, jnp.asarray(array)
    )
    ends = np.cumsum([len(row.tokens) for row in rows])
    found = np.split(log_softmax(logits), ends)
    return found[:-1]


def test_the_steps_are_what_the_tests_need() -> None:
    assert lengths() == {1: 76, 4: 55, 2: 29}
    assert max(count for step in STEPS for count in step.chunks.values()) == MOST_QUERIES


@pytest.mark.parametrize("reuses", [False, True], ids=["poison", "foreign"])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_over_the_arena_give_what_the_whole_sequences_give(name: str, reuses: bool) -> None:
    """Pages that nobody owns are poison, those of blocks that left a window too.

    The tables still name these blocks: their pages hold poison, or what another row wrote.
    """
    arena, cached = Arena(name, seed=1, reuses=reuses), dict.fromkeys(lengths(), 0)
    num_foreign = 0

    def part(row: int, count: int) -> RowControl:
        tokens, start = wanted(name)[row][0], cached[row]
        return row_of(row, tokens[start : start + count], start, long_rope=is_long(row))

    for chunks, singles in STEPS:
        rows = [part(row, count) for row, count in chunks.items()]
        rows += [row_of(0, [], sample=False)] * (2 - len(rows))
        rows += [part(row, 1) for row in singles]
        for row, found in zip(rows, run(arena, rows), strict=True):
            if row.tokens:
                expected = wanted(name)[row.row][1][row.cached : row.cached + len(row.tokens)]
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)
                cached[row.row] += len(row.tokens)
        num_foreign += count_foreign(arena)
    assert cached == lengths()
    assert (arena.num_given_back > 0) == (name in LIMITED)
    assert (num_foreign > 0) == (name in LIMITED and reuses)


def count_foreign(arena: Arena) -> int:
    """Entries of block tables that name a block of another row; checks what rows hold."""
    found = 0
    for kind, tables, held in zip(
        arena.model.geometry.kinds, arena.state.block_tables, arena.held, strict=True
    ):
        entries = np.asarray(tables[0])
        for row, blocks in held.items():
            own = {index: block for index, (block, *_) in blocks.items()}
            assert len(own) <= kind.most_blocks(LENGTH, MOST_QUERIES)
            assert all(entries[row, index] == block for index, block in own.items())
            others = {
                block
                for other, theirs in held.items()
                for block, *_ in theirs.values()
                if other != row
            }
            found += sum(int(entry) in others for entry in entries[row])
    return found


def test_longrope_turns_short_and_long_sequences_in_other_ways() -> None:
    """What the tests above compare is not the same for both."""
    model, tokens = make_model("phi"), wanted("phi")[2][0]
    short, long = (whole_logprobs(model, tokens, max_length=length) for length in (32, None))
    assert np.abs(short - long).max() > 0.01


# Gradients.

# What has no gradient: it only chooses.
WITHOUT_GRADIENT = {"deepseek": {"segments.1.0.feed_forward.router.choice_bias"}}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_all_weights_are_finite(name: str) -> None:
    model = make_model(name)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 14)).astype(np.int32)

    def loss(params: Any, stacked: Any) -> jax.Array:
        logits = forward(
            params, stacked, jnp.asarray(tokens), config=model.config, dtype=model.dtype
        )
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    gradient = jax.jit(jax.grad(loss, (0, 1)), compiler_options=QUICK)
    dense, experts = gradient(model.params, model.stacked)
    found = {leaf_name: np.asarray(leaf) for leaf_name, leaf in flatten_params(dense).items()}
    for layer, stacked in experts.items():
        found |= {f"{layer}.gate_up": stacked.gate_up, f"{layer}.down": stacked.down}
    assert all(np.isfinite(leaf).all() for leaf in found.values())
    without = {leaf_name for leaf_name, leaf in found.items() if not np.any(leaf)}
    assert without == WITHOUT_GRADIENT.get(name, set())
