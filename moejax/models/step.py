"""The program of one step: edits, forward pass, sampling."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.arena.control import Field, Flag, Header, Layout, unpack
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState, apply_edits
from moejax.config import ModelConfig
from moejax.models.decoder import Decoder, Params, bind
from moejax.models.paged import Batch, PagedMemory, make_batch
from moejax.sampling import Logprobs, SamplingRows, choose, logprobs_of

# Places whose logits exist at once when log-probabilities of a prompt are computed.
HEAD_TILE = 64

# With a large arena XLA would otherwise recompute layers, counting the donated buffer twice.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a step's program is compiled for."""

    layout: Layout
    max_query: int
    """Most tokens that a row may have."""
    with_targets: bool
    """Whether log-probabilities of the targets are computed."""


class StepOutput(NamedTuple):
    """What a step gives back to the host."""

    tokens: Int32[Array, " rows"]
    """The chosen token of each row that samples; undefined in other rows."""
    logprobs: Logprobs
    """Of these tokens; zeros unless the header wants them."""
    targets: Logprobs | None
    """Of the targets, per token of the step."""
    finite: Bool[Array, " rows"]
    """Whether a row's logits are all numbers: of NaN, from broken weights, token 0 is taken."""


def step(
    params: Params,
    state: ArenaState,
    array: Int32[Array, " control"],
    *,
    config: ModelConfig,
    geometry: Geometry,
    bucket: Bucket,
) -> tuple[ArenaState, StepOutput]:
    """Applies the edits of a control array, runs its tokens, and samples.

    `state` is donated by the caller; arrays have one device's share (leading axis 1).
    """
    control = unpack(array, bucket.layout)
    state = apply_edits(state, control)
    batch = make_batch(control, state.last_tokens)
    decoder = bind(config, geometry.dtype, params)
    memory = PagedMemory(config, geometry, state, batch, bucket.max_query)
    hidden, pages = decoder(batch.tokens, memory)

    fields = control["rows"]
    last = jnp.clip(batch.starts + batch.lengths - 1, 0, len(batch.tokens) - 1)
    logits = decoder.logits(hidden[last])
    tokens, logprobs = choose(
        logits,
        _sampling_rows(fields, batch),
        fields[:, Field.FORCED],
        control["header"][Header.WANT_LOGPROBS] > 0,
    )
    targets = _target_logprobs(decoder, hidden, control["targets"]) if bucket.with_targets else None
    sampled = _sampled(fields, batch)
    at = jnp.where(sampled, batch.table_rows, len(state.last_tokens))
    state = dataclasses.replace(
        state,
        pages=pages[None],
        last_tokens=state.last_tokens.at[at].set(tokens, mode="drop"),
    )
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return state, StepOutput(tokens, logprobs, targets, finite)


def _sampled(fields: Int32[Array, "rows fields"], batch: Batch) -> Bool[Array, " rows"]:
    return ((fields[:, Field.FLAGS] & int(Flag.SAMPLE)) > 0) & (batch.lengths > 0)


def _sampling_rows(fields: Int32[Array, "rows fields"], batch: Batch) -> SamplingRows:
    def floats(field: Field) -> Float[Array, " rows"]:
        return lax.bitcast_convert_type(fields[:, field], jnp.float32)

    return SamplingRows(
        temperature=floats(Field.TEMPERATURE),
        top_p=floats(Field.TOP_P),
        min_p=floats(Field.MIN_P),
        top_k=fields[:, Field.TOP_K],
        seeds=fields[:, Field.SEED_LOW : Field.SEED_HIGH + 1],
        positions=batch.cached + batch.lengths,
    )


def _target_logprobs(
    decoder: Decoder, hidden: Float[Array, "tokens hidden"], targets: Int32[Array, " tokens"]
) -> Logprobs:
    """In tiles, so that the logits of all places never exist at once."""
    tokens = len(targets)
    size = min(HEAD_TILE, tokens)
    tiles = -(-tokens // size)
    pad = tiles * size - tokens
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, size, -1)
    padded = jnp.pad(targets, (0, pad), constant_values=-1).reshape(tiles, size)
    found = lax.map(lambda tile: logprobs_of(decoder.logits(tile[0]), tile[1]), (hidden, padded))
    return Logprobs(*(x.reshape(tiles * size, *x.shape[2:])[:tokens] for x in found))
