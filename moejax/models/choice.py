"""What follows the layers of a step: the choice of tokens, in programs of their own.

The host knows how tokens are chosen. At a branch within the program of the layers XLA would ask the
GPU which way is taken, and the host would wait until all layers have run instead of preparing the
next step.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.adjust import ONE_OUTPUT, Adjustment
from moejax.arena.control import Field, Flag, RowControl
from moejax.config import ModelConfig
from moejax.models.decoder import Params, bind
from moejax.sampling import (
    Logprobs,
    SamplingRows,
    choose,
    draw,
    likeliest,
    logprobs_of,
    no_logprobs,
)

HEAD_TILE = 64
"""Places whose logits exist at once when log-probabilities of a prompt are computed."""


class Way(enum.Enum):
    """How the rows of a step choose their tokens."""

    GREEDY = "greedy"
    """The likeliest token."""
    RANDOM = "random"
    """Rows with a temperature draw from all tokens."""
    FILTERED = "filtered"
    """They draw from what top-k, top-p and min-p leave."""
    ANY = "any"
    """As each row wants, with penalties, biases and log-probabilities; the device finds out."""


def way_of(rows: Sequence[RowControl], *, want_logprobs: bool) -> Way:
    """The least that does what all rows want."""
    if want_logprobs or any(row.changes_logits for row in rows):
        return Way.ANY
    drawn = [row for row in rows if row.temperature > 0]
    if any(row.top_p < 1 or row.min_p > 0 or row.top_k > 0 for row in drawn):
        return Way.FILTERED
    return Way.RANDOM if drawn else Way.GREEDY


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTables:
    """What is remembered of the rows of all steps (FORMAT.md 3)."""

    last_tokens: Any
    """int32[rows]"""
    marks: Any
    """int32[rows, vocab]: what a row has to do with a token, see moejax.adjust"""
    bias_tokens: Any
    """int32[rows, biases]"""
    bias_values: Any
    """float32[rows, biases]"""


class RowLogits(NamedTuple):
    """What the layers of a step give to the choice."""

    logits: Float[Array, "rows vocab"]
    fields: Int32[Array, "rows fields"]
    """Of the control array."""
    lengths: Int32[Array, " rows"]
    """Tokens of each row in the step; 0 where it is empty."""
    want_logprobs: Bool[Array, ""]


class StepOutput(NamedTuple):
    """What a step gives back to the host."""

    tokens: Int32[Array, " rows"]
    """The chosen token of each row that samples; undefined in other rows."""
    finite: Bool[Array, " rows"]
    """Whether a row's logits are all numbers: of NaN, from broken weights, token 0 is taken."""
    logprobs: Logprobs | None = None
    """Of these tokens; None where nobody wants them."""
    targets: Logprobs | None = None
    """Per token of the step, where it has a target; None where nobody wants them."""


def choose_one_way(
    last_tokens: Int32[Array, " table_rows"], given: RowLogits, *, way: Way
) -> tuple[Int32[Array, " table_rows"], StepOutput]:
    """One token of each row, in one way for all but ANY; and the tokens that rows chose last."""
    rows = _sampling_rows(given)
    if way is Way.ANY:
        raise ValueError("choose_any_way does this")
    if way is Way.GREEDY:
        tokens = likeliest(given.logits)
    else:
        tokens = draw(given.logits, rows, filters=way is Way.FILTERED)
    forced = given.fields[:, Field.FORCED]
    tokens = jnp.where(forced >= 0, forced, tokens)
    return _remember(last_tokens, given, tokens), StepOutput(tokens, _finite(given))


def choose_any_way(
    last_tokens: Int32[Array, " table_rows"],
    marks: Int32[Array, "table_rows vocab"],
    bias_tokens: Int32[Array, "table_rows biases"],
    bias_values: Float[Array, "table_rows biases"],
    given: RowLogits,
) -> tuple[Int32[Array, " table_rows"], Int32[Array, "table_rows vocab"], StepOutput]:
    """One token of each row as it wants; marks count the tokens of rows whose logits change."""
    fields = given.fields
    flags, table_rows = fields[:, Field.FLAGS], fields[:, Field.ROW]
    adjustment = Adjustment(
        active=((flags & int(Flag.CHANGES_LOGITS)) > 0) & (given.lengths > 0),
        bans_stops=(flags & int(Flag.BANS_STOPS)) > 0,
        presence=_floats(fields, Field.PRESENCE),
        frequency=_floats(fields, Field.FREQUENCY),
        repetition=_floats(fields, Field.REPETITION),
        table_rows=table_rows,
        marks=marks,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
    )
    tokens, logprobs = choose(
        given.logits,
        _sampling_rows(given),
        adjustment,
        fields[:, Field.FORCED],
        given.want_logprobs,
    )
    marked = jnp.where(_sampled(given) & adjustment.active, table_rows, len(marks))
    marks = marks.at[marked, tokens].add(ONE_OUTPUT, mode="drop")
    output = StepOutput(tokens, _finite(given), logprobs)
    return _remember(last_tokens, given, tokens), marks, output


def target_logprobs(
    params: Params,
    hidden: Float[Array, "tokens hidden"],
    targets: Int32[Array, " tokens"],
    *,
    config: ModelConfig,
    dtype: str,
) -> Logprobs:
    """Log-probabilities of the targets of a step's tokens, and zeros where there is none (-1).

    In tiles, so that the logits of all places never exist at once.
    """
    decoder = bind(config, dtype, params)
    tokens = len(targets)
    size = min(HEAD_TILE, tokens)
    tiles = -(-tokens // size)
    pad = tiles * size - tokens
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, size, -1)
    padded = jnp.pad(targets, (0, pad), constant_values=-1).reshape(tiles, size)
    nothing = no_logprobs(size, config.vocab_size)

    def compute(tile: tuple[Array, Array]) -> Logprobs:
        found: Logprobs = lax.cond(
            jnp.any(tile[1] >= 0),
            lambda hidden, targets: logprobs_of(decoder.logits(hidden), targets),
            lambda hidden, targets: nothing,
            *tile,
        )
        return found

    found = lax.map(compute, (hidden, padded))
    return Logprobs(*(x.reshape(tiles * size, *x.shape[2:])[:tokens] for x in found))


def _remember(
    last_tokens: Int32[Array, " table_rows"], given: RowLogits, tokens: Int32[Array, " rows"]
) -> Int32[Array, " table_rows"]:
    at = jnp.where(_sampled(given), given.fields[:, Field.ROW], len(last_tokens))
    return last_tokens.at[at].set(tokens, mode="drop")


def _sampled(given: RowLogits) -> Bool[Array, " rows"]:
    return ((given.fields[:, Field.FLAGS] & int(Flag.SAMPLE)) > 0) & (given.lengths > 0)


def _finite(given: RowLogits) -> Bool[Array, " rows"]:
    return jnp.all(jnp.isfinite(given.logits), axis=-1)


def _sampling_rows(given: RowLogits) -> SamplingRows:
    fields = given.fields
    return SamplingRows(
        temperature=_floats(fields, Field.TEMPERATURE),
        top_p=_floats(fields, Field.TOP_P),
        min_p=_floats(fields, Field.MIN_P),
        top_k=fields[:, Field.TOP_K],
        seeds=fields[:, Field.SEED_LOW : Field.SEED_HIGH + 1],
        positions=fields[:, Field.CACHED] + given.lengths,
    )


def _floats(fields: Int32[Array, "rows fields"], field: Field) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(fields[:, field], jnp.float32)
