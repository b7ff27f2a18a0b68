"""From logits to tokens: greedy or random choice per row, and log-probabilities."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.adjust import Adjustment, adjust_logits

# As many alternatives as a request may ask for, per token.
MAX_LOGPROBS = 20


class SamplingRows(NamedTuple):
    """How each row chooses its token."""

    temperature: Float[Array, " rows"]
    """0: greedy."""
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    """0: all."""
    seeds: Int32[Array, "rows 2"]
    positions: Int32[Array, " rows"]
    """Of the token that is chosen: the n-th token of a request depends on its seed and n only."""


class Logprobs(NamedTuple):
    """Log-probabilities under the model itself: before penalties, temperature and filters."""

    logprob: Float[Array, " rows"]
    """Of the token in question."""
    rank: Int32[Array, " rows"]
    """1 for the most likely token."""
    top_ids: Int32[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


def sample(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Int32[Array, " rows"]:
    """Chooses one token per row, and computes what some row needs."""
    # The branches return tokens, not logits: a conditional would copy what it passes through.
    number = jnp.any(rows.temperature > 0).astype(jnp.int32) + wants_filters(rows).astype(jnp.int32)
    branches = (
        lambda logits, rows: likeliest(logits),
        partial(draw, filters=False),
        partial(draw, filters=True),
    )
    tokens: Int32[Array, " rows"] = lax.switch(number, branches, logits, rows)
    return tokens


def likeliest(logits: Float[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """The first of the likeliest tokens of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(
    logits: Float[Array, "rows vocab"], rows: SamplingRows, *, filters: bool
) -> Int32[Array, " rows"]:
    """A random token of each row with a temperature, and the likeliest of others.

    `filters`: whether top-k, top-p and min-p count.
    """
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # With the largest at 0, a tiny temperature makes others -inf and none inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    if filters:
        scaled = filter_logits(scaled, rows)

    def of_row(seed: Array, position: Array, logits: Array) -> Array:
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32))
        return jax.random.categorical(jax.random.fold_in(key, position), logits)

    drawn = jax.vmap(of_row)(rows.seeds, rows.positions, scaled).astype(jnp.int32)
    return jnp.where(rows.temperature > 0, drawn, likeliest(logits))


def wants_filters(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether a filter is to be computed. Greedy rows need none, nor does padding, all zeros."""
    filters = (rows.top_p < 1) | (rows.min_p > 0) | (rows.top_k > 0)
    return jnp.any(filters & (rows.temperature > 0))


def filter_logits(
    logits: Float[Array, "rows vocab"], rows: SamplingRows
) -> Float[Array, "rows vocab"]:
    """Sets tokens outside of top-k, then top-p, then min-p to -inf. The likeliest token stays.

    Equal logits stand or fall together at the border of top-k and of top-p.
    """
    vocab = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ordered, (k - 1)[:, None], axis=-1)
    inside = jnp.arange(vocab, dtype=jnp.int32)[None, :] < k[:, None]
    p = jax.nn.softmax(jnp.where(inside, ordered, -jnp.inf), axis=-1)
    # The smallest set whose mass reaches top_p: tokens before which less than top_p has gone.
    kept = (jnp.cumsum(p, axis=-1) - p < rows.top_p[:, None]) & inside
    last = jnp.maximum(jnp.sum(kept, axis=-1, dtype=jnp.int32) - 1, 0)
    floor = jnp.maximum(kth, jnp.take_along_axis(ordered, last[:, None], axis=-1))
    likely = ordered[:, :1] + jnp.log(jnp.maximum(rows.min_p, 0.0))[:, None]
    return jnp.where((logits >= floor) & (logits >= likely), logits, -jnp.inf)


def logprobs_of(logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]) -> Logprobs:
    """The log-probability and rank of one token per row, and the likeliest alternatives."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    # The chosen value comes from the same array as the list: clients compare the two for equality.
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    rank = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
    return Logprobs(chosen[:, 0], rank, top_ids.astype(jnp.int32), top_logprobs)


def no_logprobs(rows: int, vocab: int) -> Logprobs:
    """Zeros in place of log-probabilities that nobody asked for."""
    top = min(MAX_LOGPROBS, vocab)
    return Logprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, top), jnp.int32),
        jnp.zeros((rows, top), jnp.float32),
    )


def choose(
    logits: Float[Array, "rows vocab"],
    rows: SamplingRows,
    adjustment: Adjustment,
    forced: Int32[Array, " rows"],
    want_logprobs: Bool[Array, ""],
) -> tuple[Int32[Array, " rows"], Logprobs]:
    """One token per row, forced where `forced` >= 0, and its log-probabilities where wanted."""
    # The branches return tokens, not logits: a conditional would copy what it passes through.
    sampled = lax.cond(
        jnp.any(adjustment.active),
        lambda logits, rows, adjustment: sample(adjust_logits(logits, adjustment), rows),
        lambda logits, rows, adjustment: sample(logits, rows),
        logits,
        rows,
        adjustment,
    )
    tokens = jnp.where(forced >= 0, forced, sampled)
    nothing = no_logprobs(*logits.shape)
    found = lax.cond(want_logprobs, logprobs_of, lambda logits, tokens: nothing, logits, tokens)
    return tokens, found
