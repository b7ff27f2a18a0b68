"""Experts in the pages of an arena, as arrays that a program takes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from moejax.arena.geometry import Runs
from moejax.arena.state import read_linear


class ExpertWeights(NamedTuple):
    """The matrices of one expert."""

    gate: Float[Array, "width hidden"]
    up: Float[Array, "width hidden"]
    down: Float[Array, "hidden width"]


class ExpertBias(NamedTuple):
    """The biases of all experts of a layer."""

    gate: Float[Array, "experts width"]
    up: Float[Array, "experts width"]
    down: Float[Array, "experts hidden"]


@dataclasses.dataclass(frozen=True)
class Paged:
    """The experts of a layer in the pages of an arena, at any widths.

    They are found through tables that may hold other layers too: an array of all layers is in
    place, and kernels would get a copy of a part of it.
    """

    pages: UInt32[Array, "pages words"]
    host: UInt32[Array, "host_pages words"] | None
    gate_up_pages: Int32[Array, "rows slots"]
    down_pages: Int32[Array, "rows slots2"]
    widths: Int32[Array, "rows 2"]
    """Of gate_up and down."""
    gate_up: Runs
    down: Runs
    layer: Int32[Array, ""] | None = None
    """Its number among those in the tables; None: they hold no other."""
    count: int | None = None
    """Experts of the layer; None: all rows."""

    @property
    def first(self) -> Int32[Array, ""]:
        """The row of expert 0."""
        return jnp.int32(0) if self.layer is None else self.layer * self.num_experts

    @property
    def num_experts(self) -> int:
        return self.gate_up_pages.shape[0] if self.count is None else self.count

    def one_layer(self) -> "Paged":
        """The same with the rows of this layer alone."""
        if self.layer is None:
            return self
        gate_up, down, widths = (
            lax.dynamic_slice_in_dim(table, self.first, self.num_experts)
            for table in (self.gate_up_pages, self.down_pages, self.widths)
        )
        return Paged(self.pages, self.host, gate_up, down, widths, self.gate_up, self.down)

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
        expert = expert + self.first
        gate_up, down = lax.dynamic_index_in_dim(self.widths, expert, keepdims=False)
        gate, up = self._matrices(self.gate_up_pages, self.gate_up, expert, gate_up)
        (only,) = self._matrices(self.down_pages, self.down, expert, down)
        return ExpertWeights(gate, up, only)

    def _matrices(
        self,
        table: Int32[Array, "experts slots"],
        runs: Runs,
        expert: Int32[Array, ""],
        width: Int32[Array, ""],
    ) -> Float[Array, "parts rows columns"]:
        slots = lax.dynamic_index_in_dim(table, expert, keepdims=False)
        return read_linear(self.pages, self.host, slots, width, runs)
