"""What a request adds to logits before the choice: biases, banned stops, penalties.

What a row has to do with each token stands in its `marks`, one int32 per token of the vocabulary:
bit 0, the prompt holds it; bit 1, it ends the sequence; above, how often the output holds it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

IN_PROMPT = 1
IS_STOP = 2
ONE_OUTPUT = 4

# Tokens that one call of `start_row` can mark.
MARK_CHUNK = 1024


class Adjustment(NamedTuple):
    """What is added to the logits of each row."""

    active: Bool[Array, " rows"]
    """Rows to which the rest applies."""
    bans_stops: Bool[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    table_rows: Int32[Array, " rows"]
    """Where each row stands in the tables that follow."""
    marks: Int32[Array, "table_rows vocab"]
    bias_tokens: Int32[Array, "table_rows biases"]
    """Tokens outside of the vocabulary are left out."""
    bias_values: Float[Array, "table_rows biases"]


def adjust_logits(
    logits: Float[Array, "rows vocab"], adjustment: Adjustment
) -> Float[Array, "rows vocab"]:
    """The logits after bans, biases and penalties; rows that are not active keep theirs.

    In vLLM's order: bans and biases, then the repetition penalty (Keskar et al. 2019, CTRL, section
    4.1: over prompt and output), then frequency and presence penalties (OpenAI: over the output).
    """
    rows, at = jnp.arange(len(logits), dtype=jnp.int32), adjustment.table_rows
    marks, bias_tokens = adjustment.marks[at], adjustment.bias_tokens[at]
    banned = ((marks & IS_STOP) > 0) & adjustment.bans_stops[:, None]
    # Added to the logits themselves, the biases would need a copy of these first.
    changed = jnp.where(banned, -jnp.inf, logits)
    changed = changed.at[rows[:, None], bias_tokens].add(adjustment.bias_values[at], mode="drop")
    count = (marks // ONE_OUTPUT).astype(logits.dtype)
    penalty = adjustment.repetition[:, None]
    repeated = jnp.where(changed > 0, changed / penalty, changed * penalty)
    changed = jnp.where(((marks & IN_PROMPT) > 0) | (count > 0), repeated, changed)
    changed = changed - adjustment.frequency[:, None] * count
    changed = changed - jnp.where(count > 0, adjustment.presence[:, None], 0.0)
    return jnp.where(adjustment.active[:, None], changed, logits)


class RowMarks(NamedTuple):
    """A part of what `start_row` is told of a row; lists of tokens are padded by the vocabulary."""

    row: Any
    """int32"""
    is_first: Any
    """Whether this is the first part: it forgets what the row held before."""
    prompt: Any
    """int32[MARK_CHUNK], as are the next two"""
    output: Any
    stops: Any
    bias_tokens: Any
    """int32[biases], the same in every part"""
    bias_values: Any
    """float32[biases]"""


def start_row(
    marks: Int32[Array, "rows vocab"],
    bias_tokens: Int32[Array, "rows biases"],
    bias_values: Float[Array, "rows biases"],
    part: RowMarks,
) -> tuple[Int32[Array, "rows vocab"], Int32[Array, "rows biases"], Float[Array, "rows biases"]]:
    """The tables after one part of a new row's tokens."""
    vocab = marks.shape[1]
    nothing = jnp.zeros(vocab, jnp.int32)
    prompt = nothing.at[part.prompt].set(IN_PROMPT, mode="drop")
    stops = nothing.at[part.stops].set(IS_STOP, mode="drop")
    output = nothing.at[part.output].add(ONE_OUTPUT, mode="drop")
    before = jnp.where(part.is_first, 0, marks[part.row])
    row = (before | prompt | stops) + output
    return (
        marks.at[part.row].set(row),
        bias_tokens.at[part.row].set(part.bias_tokens),
        bias_values.at[part.row].set(part.bias_values),
    )


def row_parts(
    row: int,
    *,
    vocab: int,
    num_biases: int,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: Sequence[int],
    biases: Sequence[tuple[int, float]],
) -> list[RowMarks]:
    """The parts, as NumPy arrays, that tell `start_row` of a row."""
    most = max(len(prompt), len(output), len(stops), 1)

    def part(tokens: Sequence[int], start: int) -> Int32[np.ndarray, " chunk"]:
        padded = np.full(MARK_CHUNK, vocab, np.int32)
        chunk = tokens[start : start + MARK_CHUNK]
        padded[: len(chunk)] = chunk
        return padded

    bias_tokens = np.full(num_biases, vocab, np.int32)
    bias_values = np.zeros(num_biases, np.float32)
    for i, (token, value) in enumerate(biases):
        bias_tokens[i], bias_values[i] = token, value
    return [
        RowMarks(
            np.int32(row),
            np.bool_(start == 0),
            part(prompt, start),
            part(output, start),
            part(stops, start),
            bias_tokens,
            bias_values,
        )
        for start in range(0, most, MARK_CHUNK)
    ]
