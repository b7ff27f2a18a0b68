"""Steps over the arena give what a forward pass over the whole sequence gives."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.small_configs import LENGTH, VOCAB
from models.small_model import (
    DECODE,
    MIXED,
    PREFILL,
    TABLE_ROWS,
    Arena,
    distribution,
    jit_forward,
    log_softmax,
    make_model,
    prefill_bucket,
    row_of,
    state_arrays,
    whole_logprobs,
)
from moejax.arena import format
from moejax.arena.control import Control, Layout, pack
from moejax.models import paged_attention
from moejax.models.choice import StepOutput
from moejax.models.step import Bucket

TOLERANCE = 1e-4


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def prefill(
    arena: Arena, row: int, tokens: list[int], chunks: list[int], bucket: Bucket = PREFILL
) -> np.ndarray:
    """Log-probabilities after every token of a row, from steps of these sizes."""
    found = []
    at = 0
    for size in chunks:
        chunk = row_of(row, tokens[at : at + size], at, targets=[0] * size)
        found.append(target_distributions(arena.run([chunk], bucket))[:size])
        at += size
    return np.concatenate(found)


def target_distributions(output: StepOutput) -> np.ndarray:
    assert output.targets is not None
    return distribution(output.targets.top_ids, output.targets.top_logprobs)


def row_distributions(output: StepOutput) -> np.ndarray:
    return distribution(output.logprobs.top_ids, output.logprobs.top_logprobs)


# Prompts.


@pytest.mark.parametrize("length", [1, 8, 9, 64, 71, LENGTH])
def test_a_prompt_in_one_chunk(length: int) -> None:
    tokens = random_tokens(length)
    wanted = whole_logprobs(make_model(), tokens)
    arena = Arena()
    output = arena.run([row_of(2, tokens, targets=tokens)], PREFILL)
    np.testing.assert_allclose(target_distributions(output)[:length], wanted, atol=TOLERANCE)
    np.testing.assert_allclose(row_distributions(output)[0], wanted[-1], atol=TOLERANCE)
    assert output.targets is not None
    np.testing.assert_allclose(
        output.targets.logprob[:length], wanted[np.arange(length), tokens], atol=TOLERANCE
    )
    assert output.tokens[0] == wanted[-1].argmax()
    assert arena.rows.last_tokens[2] == output.tokens[0]


@pytest.mark.parametrize("chunks", [[1, 7, 63], [64, 7], [30, 30, 11], [8, 8, 8, 47]], ids=str)
def test_a_prompt_in_several_chunks(chunks: list[int]) -> None:
    tokens = random_tokens(71)
    found = prefill(Arena(), 3, tokens, chunks)
    np.testing.assert_allclose(found, whole_logprobs(make_model(), tokens), atol=TOLERANCE)


def test_prompts_of_several_rows_in_one_step() -> None:
    lengths = {5: 20, 0: 1, 3: 33}
    prompts = {row: random_tokens(n, seed=row) for row, n in lengths.items()}
    rows = [row_of(row, tokens, targets=tokens) for row, tokens in prompts.items()]
    output = Arena().run(rows, PREFILL)
    at = 0
    for i, tokens in enumerate(prompts.values()):
        wanted = whole_logprobs(make_model(), tokens)
        found = target_distributions(output)[at : at + len(tokens)]
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
        assert output.tokens[i] == wanted[-1].argmax()
        at += len(tokens)


# Decode.


def test_tokens_one_by_one() -> None:
    tokens = random_tokens(30)
    wanted = whole_logprobs(make_model(), tokens)
    arena = Arena()
    for at, token in enumerate(tokens):
        output = arena.run([row_of(4, [token], at)], DECODE)
        np.testing.assert_allclose(row_distributions(output)[0], wanted[at], atol=TOLERANCE)
        assert output.tokens[0] == wanted[at].argmax()


def test_rows_of_different_lengths_decode_together_in_any_order() -> None:
    sequences = {row: random_tokens(n, seed=row) for row, n in {1: 3, 5: 25, 0: 8, 2: 40}.items()}
    arena = Arena()
    for row, tokens in sequences.items():
        arena.run([row_of(row, tokens)], PREFILL)
    rng = np.random.default_rng(3)
    for _ in range(12):
        rows = rng.permutation([row for row in sequences if rng.random() < 0.8]).tolist()
        for row in rows:
            sequences[row] = [*sequences[row], int(rng.integers(VOCAB))]
        output = arena.run(
            [row_of(row, sequences[row][-1:], len(sequences[row]) - 1) for row in rows], DECODE
        )
        for i, row in enumerate(rows):
            wanted = whole_logprobs(make_model(), sequences[row])[-1]
            np.testing.assert_allclose(row_distributions(output)[i], wanted, atol=TOLERANCE)
            assert output.tokens[i] == wanted.argmax()


def test_minus_one_feeds_the_token_that_the_row_sampled_last() -> None:
    prompts = {4: random_tokens(5), 1: random_tokens(9, seed=1)}
    rows = [row_of(row, tokens) for row, tokens in prompts.items()]
    fed, told = Arena(), Arena()
    told_tokens = told.run(rows, PREFILL).tokens
    fed.run(rows, PREFILL)
    for n in range(6):
        lengths = [len(tokens) + n for tokens in prompts.values()]
        output = told.run(
            [
                row_of(row, [int(token)], cached)
                for row, token, cached in zip(prompts, told_tokens, lengths, strict=False)
            ],
            DECODE,
        )
        told_tokens = output.tokens
        found = fed.run(
            [row_of(row, [-1], cached) for row, cached in zip(prompts, lengths, strict=True)],
            DECODE,
        )
        np.testing.assert_array_equal(found.tokens[:2], output.tokens[:2])
        np.testing.assert_array_equal(row_distributions(found)[:2], row_distributions(output)[:2])
    assert fed.rows.last_tokens.tolist() == told.rows.last_tokens.tolist()


def test_a_row_that_does_not_sample_keeps_its_last_token() -> None:
    arena = Arena()
    before = int(arena.run([row_of(2, random_tokens(4))], PREFILL).tokens[0])
    output = arena.run([row_of(2, random_tokens(3, seed=5), 4, sample=False)], PREFILL)
    assert output.tokens[0] != before
    assert arena.rows.last_tokens[2] == before


def test_a_forced_token_is_taken_and_fed() -> None:
    tokens = random_tokens(6)
    wanted = whole_logprobs(make_model(), tokens)[-1]
    worst = int(wanted.argmin())
    arena = Arena()
    output = arena.run([row_of(0, tokens, forced=worst)], PREFILL)
    assert output.tokens[0] == worst
    np.testing.assert_allclose(output.logprobs.logprob[0], wanted[worst], atol=TOLERANCE)
    output = arena.run([row_of(0, [-1], 6)], DECODE)
    wanted = whole_logprobs(make_model(), [*tokens, worst])[-1]
    np.testing.assert_allclose(row_distributions(output)[0], wanted, atol=TOLERANCE)


def test_a_random_token_depends_on_its_place_and_not_on_the_chunks() -> None:
    tokens = random_tokens(20)
    drawn = []
    for chunks in ([20], [12, 8], [19, 1]):
        arena, at, output = Arena(), 0, None
        for size in chunks:
            chunk = tokens[at : at + size]
            output = arena.run([row_of(1, chunk, at, temperature=3.0, seed=5)], PREFILL)
            at += size
        assert output is not None
        drawn.append(int(output.tokens[0]))
    assert len(set(drawn)) == 1
    seeds = [row_of(1, [2], temperature=3.0, seed=seed << 32) for seed in range(8)]
    others = {int(Arena().run([row], DECODE).tokens[0]) for row in seeds}
    assert len(others) > 2  # the high half of a seed counts


# Where things lie.


def test_the_order_of_pages_and_blocks_changes_no_bit() -> None:
    tokens = random_tokens(40)
    outputs = []
    for seed in (0, 1):
        arena = Arena(seed=seed)
        arena.run([row_of(1, tokens)], PREFILL)
        outputs.append(row_distributions(arena.run([row_of(1, [3], 40)], DECODE))[0])
    np.testing.assert_array_equal(*outputs)


def test_the_row_of_the_tables_changes_no_bit() -> None:
    tokens = random_tokens(10)
    outputs = [
        row_distributions(Arena().run([row_of(row, tokens)], PREFILL))[0]
        for row in range(TABLE_ROWS)
    ]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


def test_a_row_may_be_used_again_by_a_shorter_sequence() -> None:
    arena = Arena()
    arena.run([row_of(1, random_tokens(40))], PREFILL)
    tokens = random_tokens(11, seed=1)  # the tables of row 1 go on with old blocks
    output = arena.run([row_of(1, tokens)], PREFILL)
    wanted = whole_logprobs(make_model(), tokens)[-1]
    np.testing.assert_allclose(row_distributions(output)[0], wanted, atol=TOLERANCE)


def test_a_step_writes_the_places_of_its_tokens_and_nothing_else() -> None:
    arena = Arena()
    before = state_arrays(arena.state)
    control = arena.control([row_of(3, random_tokens(11))])
    arena.run_array(pack(control, PREFILL.layout), PREFILL)
    after = state_arrays(arena.state)
    blocks = [edits.blocks for edits in control.kv_edits]
    # Kinds: a with its window of 5; b; c with its window of 11. Blocks of b have 16 tokens.
    assert [len(edits) for edits in blocks] == [2, 1, 2]
    new_pages = {page for edits in blocks for _, *pages in edits for page in pages}
    changed = np.flatnonzero((after["pages"][0] != before["pages"][0]).any(axis=1))
    assert set(changed.tolist()) == new_pages
    # KV heads, tokens in the last block; each key and value has 6 words.
    for edits, heads, tokens in zip(blocks, [2, 1, 2], [3, 11, 3], strict=True):
        for page in edits[-1][1:]:
            words = after["pages"][0, page] == format.POISON_WORD
            assert np.flatnonzero(words)[0] == tokens * 2 * heads * 6
            assert words[tokens * 2 * heads * 6 :].all()
    assert (after["pages"][0, 0] == format.POISON_WORD).all()
    for name in ("gate_up_pages", "down_pages", "widths"):
        np.testing.assert_array_equal(after[name], before[name])


# Programs.


def test_the_paths_of_one_and_of_several_queries_agree() -> None:
    sequences = {row: random_tokens(n, seed=row) for row, n in {1: 3, 5: 25, 0: 8}.items()}
    arena = Arena()
    for row, tokens in sequences.items():
        arena.run([row_of(row, tokens)], PREFILL)
    rows = [row_of(row, [7], len(tokens)) for row, tokens in sequences.items()]
    other = arena.copy()
    decode, ragged = arena.run(rows, DECODE), other.run(rows, PREFILL)
    np.testing.assert_allclose(
        row_distributions(decode)[:3], row_distributions(ragged)[:3], atol=1e-5
    )
    np.testing.assert_array_equal(decode.tokens[:3], ragged.tokens[:3])
    one, several = state_arrays(arena.state), state_arrays(other.state)
    # As floats: unowned pages are NaN in both.
    np.testing.assert_allclose(
        one.pop("pages").view(np.float32), several.pop("pages").view(np.float32), atol=1e-5
    )
    for name, table in one.items():
        np.testing.assert_array_equal(table, several[name], err_msg=name)


def test_prompts_and_single_tokens_share_a_step() -> None:
    sequences = {row: random_tokens(n, seed=row) for row, n in {1: 3, 5: 25, 0: 8}.items()}
    arena = Arena()
    for row, tokens in sequences.items():
        arena.run([row_of(row, tokens)], PREFILL)
    empty = row_of(0, [], sample=False)
    for prompts in ({2: 40}, {3: 9, 4: 64}, {}):
        decode = [row_of(row, [7], len(tokens)) for row, tokens in sequences.items()]
        chunks = [row_of(row, random_tokens(n, seed=n)) for row, n in prompts.items()]
        other = arena.copy()
        output = other.run([*chunks, *[empty] * (2 - len(chunks)), *decode], MIXED)
        for i, (row, n) in enumerate(prompts.items()):
            wanted = whole_logprobs(make_model(), random_tokens(n, seed=n))[-1]
            np.testing.assert_allclose(row_distributions(output)[i], wanted, atol=TOLERANCE)
            assert other.rows.last_tokens[row] == output.tokens[i]
        for i, (row, tokens) in enumerate(sequences.items(), 2):
            wanted = whole_logprobs(make_model(), [*tokens, 7])[-1]
            np.testing.assert_allclose(row_distributions(output)[i], wanted, atol=TOLERANCE)
            assert other.rows.last_tokens[row] == output.tokens[i]


def test_a_token_that_was_chosen_is_marked_where_it_counts() -> None:
    arena = Arena()
    rows = [row_of(2, [1, 2], changes_logits=True), row_of(4, [3, 4])]
    token = int(arena.run(rows, PREFILL).tokens[0])
    for n in range(1, 4):
        marks = np.array(arena.rows.marks)
        assert marks[2].sum() == 4 * n and marks[[0, 1, 3, 4, 5]].sum() == 0
        assert marks[2, token] >= 4
        penalty = {"frequency_penalty": 1.0, "changes_logits": True}
        token = int(arena.run([row_of(2, [-1], 1 + n, **penalty)], DECODE).tokens[0])


def test_a_banned_stop_and_a_bias_change_the_choice_and_not_the_log_probability() -> None:
    tokens = random_tokens(5)
    wanted = whole_logprobs(make_model(), tokens)[-1]
    best, second = np.argsort(-wanted)[:2]
    arena = Arena()
    arena.mark(3, stops=[int(best)])
    options = {"changes_logits": True, "bans_stops": True}
    output = arena.run([row_of(3, tokens, **options)], PREFILL)
    assert output.tokens[0] == second
    np.testing.assert_allclose(output.logprobs.logprob[0], wanted[second], atol=TOLERANCE)
    arena = Arena()
    arena.mark(3, biases=[(7, 100.0)])
    assert arena.run([row_of(3, tokens, changes_logits=True)], PREFILL).tokens[0] == 7
    assert arena.run([row_of(3, tokens)], PREFILL).tokens[0] == best


def garbage(array: np.ndarray, layout: Layout, control: Control) -> np.ndarray:
    """The array with anything beyond the counts of its header."""
    array = array.copy()
    rng = np.random.default_rng(0)
    counts = {
        "tokens": sum(len(row.tokens) for row in control.rows),
        "targets": sum(len(row.tokens) for row in control.rows),
        "rows": len(control.rows),
    }
    for i, edits in enumerate(control.kv_edits):
        counts |= {f"block_edits.{i}": len(edits.blocks), f"row_edits.{i}": len(edits.rows)}
    for name, count in counts.items():
        shape = layout.sections[name]
        size = int(np.prod(shape))
        part = array[layout.offsets[name] :][:size].reshape(shape)
        assert len(part) > count
        # Numbers that could be tokens, rows, blocks and pages.
        part[count:] = rng.integers(-1, 6, part[count:].shape)
    return array


@pytest.mark.parametrize("bucket", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_what_stands_beyond_the_counts_changes_nothing(bucket: Bucket) -> None:
    arena = Arena()
    arena.run([row_of(2, random_tokens(9)), row_of(4, random_tokens(5))], PREFILL)
    control = arena.control([row_of(2, [1], 9, temperature=1.0), row_of(4, [2], 5)])
    array = pack(control, bucket.layout)
    other = arena.copy()
    wanted = arena.run_array(array, bucket)
    found = other.run_array(garbage(array, bucket.layout, control), bucket)
    np.testing.assert_array_equal(found.tokens[:2], wanted.tokens[:2])
    np.testing.assert_array_equal(row_distributions(found)[:2], row_distributions(wanted)[:2])
    after, wanted_state = state_arrays(other.state), state_arrays(arena.state)
    for name, table in wanted_state.items():
        np.testing.assert_array_equal(after[name], table, err_msg=name)


@pytest.mark.parametrize("bucket", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_the_state_is_donated_and_the_arena_stays_where_it_is(bucket: Bucket) -> None:
    arena = Arena()
    before = arena.state
    address = before.pages.unsafe_buffer_pointer()
    arena.run([row_of(0, [1])], bucket)
    assert before.pages.is_deleted()
    assert all(table.is_deleted() for table in (*before.block_tables, *before.block_pages))
    assert arena.state.pages.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("key_tile", [1, 24, 1000])
def test_the_size_of_a_tile_of_keys_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, key_tile: int
) -> None:
    """One block, some that do not divide the table, more than there are."""
    monkeypatch.setattr(paged_attention, "KEY_TILE", key_tile)
    tokens = random_tokens(77)
    arena = Arena()
    model = make_model()
    run = jit_forward(model, MIXED)
    wanted = whole_logprobs(model, tokens)
    empty = row_of(0, [], sample=False)
    for rows in (
        [row_of(1, tokens[:50]), row_of(4, tokens[:30])],
        [row_of(1, tokens[50:76], 50), empty, row_of(4, tokens[30:31], 30)],
        [empty, empty, row_of(1, tokens[76:], 76), row_of(4, tokens[31:32], 31)],
    ):
        control = pack(arena.control(rows), MIXED.layout)
        arena.state, logits = run(
            model.params, arena.state, arena.rows.last_tokens, jnp.asarray(control)
        )
        at = 0
        for row in rows:
            end = at + len(row.tokens)
            expected = wanted[row.cached : row.cached + len(row.tokens)]
            np.testing.assert_allclose(log_softmax(logits[at:end]), expected, atol=TOLERANCE)
            at = end


# Another dtype.


def test_bfloat16_is_close() -> None:
    tokens = random_tokens(40)
    wanted = whole_logprobs(make_model("b", "bfloat16"), tokens)
    bucket = prefill_bucket("b")
    found = prefill(Arena("b", "bfloat16"), 1, tokens, [25, 15], bucket)
    assert np.abs(found - wanted).max() < 0.05
