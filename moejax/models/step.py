"""The program of one step: edits and layers. What follows is in `choice`."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moejax.arena.control import Header, Layout, unpack
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState, apply_edits
from moejax.config import ModelConfig
from moejax.models.batch import make_batch
from moejax.models.choice import RowLogits
from moejax.models.decoder import Params, bind
from moejax.models.paged import make_memory
from moejax.pallas.dispatch import REFERENCE, Kernels

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
# What XLA records into CUDA graphs unasked, and loops.
_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"


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
        # The loop over layers becomes part of the graph, layer by layer, so that the device does
        # not wait for a launch of the host at each of them.
        options["xla_gpu_enable_command_buffer"] = _IN_GRAPHS
        options["xla_gpu_command_buffer_unroll_loops"] = True
    return options


def step(
    params: Params,
    state: ArenaState,
    last_tokens: Int32[Array, " table_rows"],
    array: Int32[Array, " control"],
    *,
    config: ModelConfig,
    geometry: Geometry,
    bucket: Bucket,
    kernels: Kernels = REFERENCE,
) -> tuple[ArenaState, RowLogits, Float[Array, "tokens hidden"] | None]:
    """Applies the edits of a control array and runs its tokens through the layers.

    `state` is donated by the caller; arrays have one device's share (leading axis 1).

    Returns:
        The state, the logits of each row's last token, and what all tokens are before the head,
        for `target_logprobs`, or None where no row may be a prompt's.
    """
    control = unpack(array, bucket.layout)
    state = apply_edits(state, control)
    batch = make_batch(control, last_tokens)
    decoder = bind(config, geometry.dtype, params)
    memory = make_memory(
        config, geometry, state, batch, bucket.prefill_rows, bucket.max_query, kernels
    )
    hidden, pages = decoder(batch.tokens, memory)
    last = jnp.clip(batch.starts + batch.lengths - 1, 0, len(batch.tokens) - 1)
    given = RowLogits(
        decoder.logits(hidden[last]),
        control["rows"],
        batch.lengths,
        control["header"][Header.WANT_LOGPROBS] > 0,
    )
    state = dataclasses.replace(state, pages=pages[None])
    return state, given, hidden if bucket.prefill_rows else None
