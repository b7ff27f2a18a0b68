"""The program of one step: edits, forward pass, sampling."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from moejax.adjust import ONE_OUTPUT, Adjustment
from moejax.arena.control import Field, Flag, Header, Layout, unpack
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState, apply_edits
from moejax.config import ModelConfig
from moejax.models.batch import Batch, make_batch
from moejax.models.decoder import Decoder, Params, bind
from moejax.models.paged import make_memory
from moejax.pallas.dispatch import REFERENCE, Kernels
from moejax.sampling import Logprobs, SamplingRows, choose, logprobs_of, no_logprobs

# Places whose logits exist at once when log-probabilities of a prompt are computed.
HEAD_TILE = 64

COMPILER_OPTIONS = {
    "xla_disable_hlo_passes": ",".join(
        (
            # With a large arena XLA would recompute layers, counting the donated buffer twice.
            "rematerialization",
            # It would write the weights of products with one input next to each other, in every
            # layer of a step.
            "dot-merger",
            # Slices of small weights on a stream of their own: waiting for them takes longer, and
            # keeps the kernels of a layer out of CUDA graphs.
            "dynamic-slice-copy-fusion-async-wrapper",
        )
    ),
    # Its products get copies of a layer's weights; those of cuBLAS read the array of all layers.
    "xla_gpu_enable_triton_gemm": False,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a step's program is compiled for."""

    layout: Layout
    prefill_rows: int
    """The first rows, which may have any number of tokens; the rest have one, or none."""
    max_query: int
    """Most tokens that a row may have."""


def compiler_options(bucket: Bucket, kernels: Kernels) -> dict[str, Any]:
    """How a step's program is compiled."""
    options: dict[str, Any] = dict(COMPILER_OPTIONS)
    if kernels.products != "reference" and not bucket.prefill_rows:
        # Of a layer's kernels those run side by side that do not wait for each other: the shared
        # expert beside the routed ones. They share less memory, so steps of many tokens do without.
        options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
    return options


class StepOutput(NamedTuple):
    """What a step gives back to the host."""

    tokens: Int32[Array, " rows"]
    """The chosen token of each row that samples; undefined in other rows."""
    logprobs: Logprobs | None
    """Of these tokens; zeros unless the header wants them, None where the host left them behind."""
    targets: Logprobs | None
    """Per token of the step, where it has a target; None where no row may be a prompt's."""
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
    kernels: Kernels = REFERENCE,
) -> tuple[ArenaState, StepOutput]:
    """Applies the edits of a control array, runs its tokens, and samples.

    `state` is donated by the caller; arrays have one device's share (leading axis 1).
    """
    control = unpack(array, bucket.layout)
    state = apply_edits(state, control)
    batch = make_batch(control, state.last_tokens)
    decoder = bind(config, geometry.dtype, params)
    memory = make_memory(
        config, geometry, state, batch, bucket.prefill_rows, bucket.max_query, kernels
    )
    hidden, pages = decoder(batch.tokens, memory)

    fields = control["rows"]
    last = jnp.clip(batch.starts + batch.lengths - 1, 0, len(batch.tokens) - 1)
    logits = decoder.logits(hidden[last])
    adjustment = _adjustment(fields, batch, state)
    tokens, logprobs = choose(
        logits,
        _sampling_rows(fields, batch),
        adjustment,
        fields[:, Field.FORCED],
        control["header"][Header.WANT_LOGPROBS] > 0,
    )
    targets = _target_logprobs(decoder, hidden, control["targets"]) if bucket.prefill_rows else None
    sampled = _sampled(fields, batch)
    at = jnp.where(sampled, batch.table_rows, len(state.last_tokens))
    marked = jnp.where(sampled & adjustment.active, batch.table_rows, len(state.marks))
    state = dataclasses.replace(
        state,
        pages=pages[None],
        last_tokens=state.last_tokens.at[at].set(tokens, mode="drop"),
        marks=state.marks.at[marked, tokens].add(ONE_OUTPUT, mode="drop"),
    )
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return state, StepOutput(tokens, logprobs, targets, finite)


def _sampled(fields: Int32[Array, "rows fields"], batch: Batch) -> Bool[Array, " rows"]:
    return ((fields[:, Field.FLAGS] & int(Flag.SAMPLE)) > 0) & (batch.lengths > 0)


def _sampling_rows(fields: Int32[Array, "rows fields"], batch: Batch) -> SamplingRows:
    return SamplingRows(
        temperature=_floats(fields, Field.TEMPERATURE),
        top_p=_floats(fields, Field.TOP_P),
        min_p=_floats(fields, Field.MIN_P),
        top_k=fields[:, Field.TOP_K],
        seeds=fields[:, Field.SEED_LOW : Field.SEED_HIGH + 1],
        positions=batch.cached + batch.lengths,
    )


def _adjustment(fields: Int32[Array, "rows fields"], batch: Batch, state: ArenaState) -> Adjustment:
    flags = fields[:, Field.FLAGS]
    return Adjustment(
        active=((flags & int(Flag.CHANGES_LOGITS)) > 0) & (batch.lengths > 0),
        bans_stops=(flags & int(Flag.BANS_STOPS)) > 0,
        presence=_floats(fields, Field.PRESENCE),
        frequency=_floats(fields, Field.FREQUENCY),
        repetition=_floats(fields, Field.REPETITION),
        table_rows=batch.table_rows,
        marks=state.marks,
        bias_tokens=state.bias_tokens,
        bias_values=state.bias_values,
    )


def _floats(fields: Int32[Array, "rows fields"], field: Field) -> Float[Array, " rows"]:
    return lax.bitcast_convert_type(fields[:, field], jnp.float32)


def _target_logprobs(
    decoder: Decoder, hidden: Float[Array, "tokens hidden"], targets: Int32[Array, " tokens"]
) -> Logprobs:
    """In tiles, so that the logits of all places never exist at once; zeros without a target."""
    tokens = len(targets)
    size = min(HEAD_TILE, tokens)
    tiles = -(-tokens // size)
    pad = tiles * size - tokens
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, size, -1)
    padded = jnp.pad(targets, (0, pad), constant_values=-1).reshape(tiles, size)
    nothing = no_logprobs(size, decoder.config.vocab_size)

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
