"""The arena as a decoder's memory: KV and experts read through page tables."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.experts import Paged
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState, read_linear, values_to_words, write_tokens
from moejax.config import AnyAttention, ModelConfig
from moejax.layers.attention import Qkv, join_kv, value_size
from moejax.layers.experts import ByKernels, Experts
from moejax.models.batch import Batch
from moejax.models.coded import CodedMatrix, Current
from moejax.models.paged_attention import View, attend_decode, attend_ragged
from moejax.pallas.attention import Plan, attend_paged, make_plan
from moejax.pallas.attention_tiling import Tiling, choose_tilings
from moejax.pallas.dispatch import REFERENCE, Kernels
from moejax.pallas.pages import write_kv


class LayerTables(NamedTuple):
    """One layer's part of the tables."""

    layer: Int32[Array, ""]
    """Its number among those of its kind of KV."""
    gate_up_pages: Int32[Array, "experts slots"] | None
    down_pages: Int32[Array, "experts slots2"] | None
    widths: Int32[Array, "experts 2"] | None
    linears: dict[str, tuple[Int32[Array, " slots"], Int32[Array, ""]]]
    """Slots and width of the matrices that are stored as codes, by their names in the layer."""


@dataclasses.dataclass(frozen=True)
class PagedMemory:
    """One device's arena and the batch of a step. The carry is the array of pages."""

    config: ModelConfig
    geometry: Geometry
    state: ArenaState
    batch: Batch
    prefill_rows: int
    """Rows after these have one token at most."""
    max_query: int
    """No row has more tokens than this in the step."""
    kernels: Kernels
    plans: Mapping[AnyAttention, Plan]
    """What the programs of each kind of attention do; empty where no kernel attends."""
    current: Current

    @property
    def positions(self) -> Int32[Array, " tokens"]:
        return self.batch.positions

    @property
    def valid(self) -> Bool[Array, " tokens"]:
        return self.batch.valid

    @property
    def uses_long_rope(self) -> Bool[Array, " tokens"]:
        return self.batch.uses_long_rope

    def start(self) -> UInt32[Array, "pages words"]:
        pages: UInt32[Array, "pages words"] = self.state.pages[0]
        return pages

    def layers(self, segment: int) -> tuple[LayerTables, ...]:
        places = self.config.places
        moe_numbers = {layer: i for i, layer in enumerate(self.config.moe_layers)}
        found = []
        for index in range(len(self.config.segments[segment].period)):
            numbers = [
                n
                for n, place in enumerate(places)
                if (place.segment, place.index) == (segment, index)
            ]
            within = [self.geometry.place_of(n)[1] for n in numbers]
            moe = [moe_numbers[n] for n in numbers if n in moe_numbers]
            state = self.state
            gate_up, down, widths = (
                table[0, jnp.array(moe)] if moe else None
                for table in (state.gate_up_pages, state.down_pages, state.widths)
            )
            prefix = f"segments.{segment}.{index}."
            linears = {
                linear.name.removeprefix(prefix): (
                    state.linear_pages[0, linear.first : linear.first + linear.repeats],
                    state.linear_widths[0, linear.first : linear.first + linear.repeats],
                )
                for linear in self.geometry.linears
                if linear.name.startswith(prefix)
            }
            found.append(LayerTables(jnp.array(within, jnp.int32), gate_up, down, widths, linears))
        return tuple(found)

    def experts(self, carry: UInt32[Array, "pages words"], layer: LayerTables) -> Experts:
        if layer.gate_up_pages is None or layer.down_pages is None or layer.widths is None:
            raise AssertionError("a layer without experts asks for them")
        paged = Paged(
            carry,
            None if self.state.host is None else self.state.host[0],
            layer.gate_up_pages,
            layer.down_pages,
            layer.widths,
            *self.geometry.expert_runs,
        )
        return paged if self.kernels.products == "reference" else ByKernels(paged, self.kernels)

    def linears(
        self, carry: UInt32[Array, "pages words"], segment: int, index: int, layer: LayerTables
    ) -> dict[str, Array | CodedMatrix]:
        host = None if self.state.host is None else self.state.host[0]
        found: dict[str, Array | CodedMatrix] = {}
        self.current.pages = carry
        for linear in self.geometry.linears:
            name = linear.name.removeprefix(f"segments.{segment}.{index}.")
            if name != linear.name:
                slots, width = layer.linears[name]
                runs = self.geometry.runs_of(linear.shape)
                if self.kernels.products == "reference":
                    found[name] = read_linear(carry, host, slots, width, runs)[0]
                else:
                    found[name] = CodedMatrix(self.current, host, slots, width, runs, self.kernels)
        return found

    def attend(
        self,
        carry: UInt32[Array, "pages words"],
        layer: LayerTables,
        qkv: Qkv,
        part: AnyAttention,
    ) -> tuple[UInt32[Array, "pages words"], Float[Array, "tokens heads size"]]:
        batch = self.batch
        number = self.geometry.kind_of(part)
        kind = self.geometry.kinds[number]
        tables = self.state.block_tables[number][0]
        block_pages = self.state.block_pages[number][0]
        if self.kernels.attention != "reference":
            pages = write_kv(
                carry,
                qkv.k,
                qkv.v,
                block_pages,
                tables,
                layer.layer,
                batch.table_row_of,
                batch.positions,
                batch.valid,
                block_size=kind.block_size,
            )
            self.current.pages = pages
            return pages, attend_paged(
                qkv.q,
                pages,
                block_pages,
                tables,
                layer.layer,
                qkv.sinks,
                plan=self.plans[part],
                part=part,
                block_size=kind.block_size,
            )
        block = jnp.minimum(batch.positions // kind.block_size, tables.shape[1] - 1)
        pages = write_tokens(
            carry,
            block_pages[layer.layer, tables[batch.table_row_of, block]],
            batch.positions % kind.block_size,
            values_to_words(join_kv(qkv)),
            batch.valid,
        )
        view = View(pages, block_pages, layer.layer, tables, kind, part, self.geometry.dtype)
        # Results take the place of the queries where they have their shape.
        o = qkv.q[..., : value_size(part)]
        if self.prefill_rows:
            o = attend_ragged(view, qkv, batch, self.prefill_rows, self.max_query)
        if self.prefill_rows < len(batch.starts):
            o = attend_decode(view, qkv, o, batch, self.prefill_rows)
        return pages, jnp.where(batch.valid[:, None, None], o, jnp.zeros((), o.dtype))


def make_memory(
    config: ModelConfig,
    geometry: Geometry,
    state: ArenaState,
    batch: Batch,
    prefill_rows: int,
    max_query: int,
    kernels: Kernels = REFERENCE,
) -> PagedMemory:
    """The memory of a step. Rows after the first `prefill_rows` have one token at most."""
    plans = {}
    if kernels.attention != "reference":
        # Once for all layers: each small operation would be a launch in each of them.
        plans = _make_plans(
            config, geometry, state, batch, prefill_rows, max_query, kernels.shared_bytes
        )
    return PagedMemory(
        config, geometry, state, batch, prefill_rows, max_query, kernels, plans, Current()
    )


def _make_plans(
    config: ModelConfig,
    geometry: Geometry,
    state: ArenaState,
    batch: Batch,
    prefill_rows: int,
    max_query: int,
    shared_bytes: int,
) -> dict[AnyAttention, Plan]:
    """The plan of attention by kernels, for each kind of attention that the layers have.

    The first `prefill_rows` may have any number of tokens up to `max_query`, the others one.
    """
    plans: dict[tuple[Tiling, Tiling], Plan] = {}
    found = {}
    for part in dict.fromkeys(layer.attention for layer in config.layers):
        number = geometry.kind_of(part)
        tables = state.block_tables[number]
        tilings = choose_tilings(
            part,
            geometry.dtype,
            rows=len(batch.starts) - prefill_rows,
            longest=tables.shape[2] * geometry.kinds[number].block_size,
            max_query=max_query,
            shared_bytes=shared_bytes,
        )
        if tilings not in plans:
            plans[tilings] = make_plan(
                table_rows=batch.table_rows,
                starts=batch.starts,
                lengths=batch.lengths,
                cached=batch.cached,
                tokens=len(batch.tokens),
                prefill_rows=prefill_rows,
                tilings=tilings,
            )
        found[part] = plans[tilings]
    return found
