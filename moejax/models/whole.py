"""A forward pass over whole sequences, without an arena: for tests, calibration and gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from moejax.arena.format import DTYPES, decode_dense, split_halves
from moejax.arena.geometry import linear_shapes
from moejax.checkpoint import Checkpoint
from moejax.config import AnyAttention, ModelConfig
from moejax.layers.attention import Qkv, attend_rows, join_kv, split_kv, visible
from moejax.layers.experts import Stacked
from moejax.models.decoder import Params, bind


@dataclasses.dataclass(frozen=True)
class WholeMemory:
    """Causal attention among the tokens of each row; experts as stacked arrays."""

    config: ModelConfig
    rows: int
    length: int
    stacked: dict[int, Stacked]
    """Layer number → its experts."""
    long_rope: bool = False
    """Whether the long factors of longrope turn the tokens."""

    @property
    def positions(self) -> Int32[Array, " tokens"]:
        return jnp.tile(jnp.arange(self.length, dtype=jnp.int32), self.rows)

    @property
    def valid(self) -> Bool[Array, " tokens"]:
        return jnp.ones(self.rows * self.length, bool)

    @property
    def uses_long_rope(self) -> Bool[Array, " tokens"]:
        return jnp.full(self.rows * self.length, self.long_rope)

    def start(self) -> None:
        return None

    def layers(self, segment: int) -> tuple[Any, ...]:
        """Per kind of the period: its layers' experts stacked over the repeats, or nothing."""
        found = []
        for index in range(len(self.config.segments[segment].period)):
            numbers = [
                n
                for n, place in enumerate(self.config.places)
                if (place.segment, place.index) == (segment, index) and n in self.stacked
            ]
            experts = [self.stacked[n] for n in numbers]
            found.append(jax.tree.map(lambda *a: jnp.stack(a), *experts) if experts else None)
        return tuple(found)

    def attend(
        self, carry: None, layer: Any, qkv: Qkv, part: AnyAttention
    ) -> tuple[None, Float[Array, "tokens heads size"]]:
        parts = (qkv.q, *split_kv(join_kv(qkv), part))
        q, k, v = (x.reshape(self.rows, self.length, *x.shape[1:]) for x in parts)
        at = jnp.arange(self.length, dtype=jnp.int32)
        mask = jnp.broadcast_to(
            visible(at, at, part.reach)[None], (self.rows, self.length, self.length)
        )
        o = attend_rows(q, k, v, mask, part.scale, qkv.sinks)
        return None, o.reshape(*qkv.q.shape[:2], -1)

    def experts(self, carry: None, layer: Any) -> Stacked:
        experts: Stacked = layer
        return experts


def forward(
    params: Params,
    stacked: dict[int, Stacked],
    tokens: Int32[Array, "rows length"],
    *,
    config: ModelConfig,
    dtype: str,
    max_length: int | None = None,
) -> Float[Array, "rows length vocab"]:
    """Logits at every place of some sequences of equal length.

    `stacked` maps the number of each layer with routed experts to their weights. `max_length`: the
    length that the sequences may come to, which decides about longrope; None: theirs.
    """
    rows, length = tokens.shape
    decoder = bind(config, dtype, params)
    after = config.long_rope_after
    long_rope = after is not None and (max_length or length) > after
    memory = WholeMemory(config, rows, length, stacked, long_rope)
    hidden, _ = decoder(tokens.reshape(-1), memory)
    return decoder.logits(hidden).reshape(rows, length, -1)


def read_stacked(checkpoint: Checkpoint, dtype: str) -> dict[int, Stacked]:
    """The experts of a checkpoint as ordinary arrays: layer number → its experts."""
    config = checkpoint.config
    gate_up, down = linear_shapes(config)
    source = DTYPES[config.dtype]
    found = {}
    for layer in config.moe_layers:
        runs = checkpoint.expert_runs(layer)
        halves = [
            split_halves(
                decode_dense(run, gate_up.stored_rows, gate_up.columns, source), gate_up.rows
            )
            for run in runs["gate_up"]
        ]
        downs = [decode_dense(run, down.rows, down.columns, source) for run in runs["down"]]
        found[layer] = Stacked(
            jnp.asarray(np.stack([np.stack(pair) for pair in halves]), dtype),
            jnp.asarray(np.stack(downs), dtype),
        )
    return found
