"""Experts in the pages of an arena, as arrays that a program takes."""

import dataclasses
from typing import NamedTuple

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
    """Experts in the pages of an arena, through the expert table of one layer, at any widths."""

    pages: UInt32[Array, "pages words"]
    host: UInt32[Array, "host_pages words"] | None
    gate_up_pages: Int32[Array, "experts slots"]
    down_pages: Int32[Array, "experts slots2"]
    widths: Int32[Array, "experts 2"]
    """Of gate_up and down."""
    gate_up: Runs
    down: Runs

    @property
    def num_experts(self) -> int:
        return self.gate_up_pages.shape[0]

    def weights(self, expert: Int32[Array, ""]) -> ExpertWeights:
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
