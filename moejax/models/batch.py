"""Where the tokens of a step belong."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from moejax.arena.control import Field, Flag, Header


class Batch(NamedTuple):
    """Where the tokens of a step belong, from a control array."""

    tokens: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]
    row_of: Int32[Array, " tokens"]
    """Row of the step, not of the tables."""
    table_row_of: Int32[Array, " tokens"]
    """Row of the tables."""
    table_rows: Int32[Array, " rows"]
    starts: Int32[Array, " rows"]
    lengths: Int32[Array, " rows"]
    cached: Int32[Array, " rows"]
    uses_long_rope: Bool[Array, " tokens"]


def make_batch(control: dict[str, Array], last_tokens: Int32[Array, " table_rows"]) -> Batch:
    """Reads a control array's tokens and rows."""
    header, rows = control["header"], control["rows"]
    number = jnp.arange(control["tokens"].shape[0], dtype=jnp.int32)
    used = jnp.arange(rows.shape[0], dtype=jnp.int32) < header[Header.ROWS]
    starts = jnp.where(used, rows[:, Field.TOKEN_START], len(number))
    lengths = jnp.where(used, rows[:, Field.NUM_TOKENS], 0)
    row_of = jnp.sum(number[:, None] >= starts[None, :], axis=1, dtype=jnp.int32) - 1
    row_of = jnp.maximum(row_of, 0)
    cached = rows[:, Field.CACHED]
    tokens = control["tokens"]
    last = last_tokens[rows[:, Field.ROW]][row_of]
    long_rope = (rows[:, Field.FLAGS] & int(Flag.LONG_ROPE)) > 0
    return Batch(
        tokens=jnp.where(tokens < 0, last, tokens),
        positions=cached[row_of] + number - starts[row_of],
        valid=number < header[Header.TOKENS],
        row_of=row_of,
        table_row_of=rows[:, Field.ROW][row_of],
        table_rows=rows[:, Field.ROW],
        starts=starts,
        lengths=lengths,
        cached=cached,
        uses_long_rope=long_rope[row_of],
    )
