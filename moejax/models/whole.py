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
from moejax.config import ModelConfig
from moejax.layers.attention import Qkv, attend_rows, visible
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

    @property
    def positions(self) -> Int32[Array, " tokens"]:
        return jnp.tile(jnp.arange(self.length, dtype=jnp.int32), self.rows)

    @property
    def valid(self) -> Bool[Array, " tokens"]:
        return jnp.ones(self.rows * self.length, bool)

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
        self, carry: None, layer: Any, qkv: Qkv, window: int | None, scale: float
    ) -> tuple[None, Float[Array, "tokens heads size"]]:
        q, k, v = (x.reshape(self.rows, self.length, *x.shape[1:]) for x in qkv)
        at = jnp.arange(self.length, dtype=jnp.int32)
        mask = jnp.broadcast_to(
            visible(at, at, window)[None], (self.rows, self.length, self.length)
        )
        return None, attend_rows(q, k, v, mask, scale).reshape(qkv.q.shape)

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
) -> Float[Array, "rows length vocab"]:
    """Logits at every place of some sequences of equal length.

    `stacked` maps the number of each layer with routed experts to their weights.
    """
    rows, length = tokens.shape
    decoder = bind(config, dtype, params)
    hidden, _ = decoder(tokens.reshape(-1), WholeMemory(config, rows, length, stacked))
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
