"""A forward pass over whole sequences, without an arena: for tests, calibration and gradients."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from moejax.arena.format import DTYPES, decode_dense
from moejax.arena.geometry import linear_shapes
from moejax.checkpoint import Checkpoint
from moejax.checkpoint.layout import LINEARS
from moejax.config import DENSE_WIDTH, AnyAttention, ModelConfig
from moejax.layers.attention import Qkv, attend_rows, join_kv, split_kv, visible
from moejax.layers.experts import Stacked
from moejax.models.decoder import Params, bind
from moejax.quant.linear import decode_linear


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

    def at(self, layer: Any, repeat: Int32[Array, ""]) -> Any:
        return layer

    def in_place(self, weights: Mapping[str, Float[Array, "..."]]) -> Collection[str]:
        return ()

    def linears(self, carry: None, segment: int, index: int, layer: Any) -> dict[str, Any]:
        return {}

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
    long_rope = takes_long_rope(config, max_length or length)
    memory = WholeMemory(config, rows, length, stacked, long_rope)
    hidden, _ = decoder(tokens.reshape(-1), memory)
    return decoder.logits(hidden).reshape(rows, length, -1)


def takes_long_rope(config: ModelConfig, max_length: int) -> bool:
    """Whether a sequence that may come to this length takes the long factors of longrope."""
    after = config.long_rope_after
    return after is not None and max_length > after


def read_stacked(
    checkpoint: Checkpoint,
    dtype: str,
    widths: Int[np.ndarray, "moe_layers experts 2"] | None = None,
) -> dict[int, Stacked]:
    """The experts of a checkpoint as ordinary arrays: layer number → its experts.

    `widths`: of gate_up and down of each expert; None: 16.
    """
    config, experts = checkpoint.config, checkpoint.config.moe.router.num_experts
    found = {}
    for number, layer in enumerate(config.moe_layers):
        of_layer = np.full((experts, 2), DENSE_WIDTH) if widths is None else widths[number]
        gate_up, down = (
            jnp.stack(
                [
                    read_linear(checkpoint, layer, e, which, int(of_layer[e, which]), dtype)
                    for e in range(experts)
                ]
            )
            for which in (0, 1)
        )
        found[layer] = Stacked(gate_up, down[:, 0])
    return found


def read_linear(
    checkpoint: Checkpoint, layer: int, expert: int, which: int, width: int, dtype: str
) -> Float[Array, "parts rows columns"]:
    """The matrices of an expert's gate_up (which = 0) or down (1), at a width that is stored."""
    config, runs = checkpoint.config, checkpoint.expert_runs(layer)
    shape, linear = linear_shapes(config, checkpoint.quantization)[which], LINEARS[which]
    if width == DENSE_WIDTH:
        run = runs[f"{linear}.dense"][expert]
        matrix = decode_dense(run, shape.stored_rows, shape.columns, DTYPES[config.dtype])
        halves = matrix.reshape(shape.parts, -1, shape.columns)[:, : shape.rows]
        return jnp.asarray(halves.astype(DTYPES[dtype]))
    planes = np.stack([runs[f"{linear}.plane.{p}"][expert] for p in range(width)])
    return decode_linear(planes, runs[f"{linear}.table.{width}"][expert], shape, width).astype(
        dtype
    )
