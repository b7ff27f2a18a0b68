"""The arena as a decoder's memory: KV and experts read through page tables."""

import dataclasses
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import jax
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
from moejax.pallas import routing, stacked
from moejax.pallas.attention import Plan, attend_paged, make_plan
from moejax.pallas.attention_tiling import Tiling, choose_tilings
from moejax.pallas.dispatch import REFERENCE, Kernels
from moejax.pallas.pages import write_kv


class Numbers(NamedTuple):
    """Evenly spaced numbers of layers that a scan goes over."""

    first: int
    step: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["repeat"],
    meta_fields=["kv", "moe", "linears"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedLayer:
    """Where the tables say what belongs to a layer.

    The numbers are computed from that of the layer in the scan: slices of arrays of numbers would
    be copies on the device, which kernels of XLA's CUDA graphs cannot follow from layer to layer.
    """

    repeat: Int32[Array, ""] | None = None
    """The layer's number in the scan, which counts its carry."""
    kv: Numbers
    """Of the layers, among those of their kind of KV."""
    moe: Numbers | None
    """Of the layers, among those with routed experts; None if they have none."""
    linears: tuple[tuple[str, int], ...]
    """Names in the layer and first rows of the matrices that are stored as codes."""

    def number(self, of: Numbers) -> Int32[Array, ""]:
        if self.repeat is None:
            raise AssertionError("the layer is not known yet")
        number = self.repeat if of.step == 1 else self.repeat * of.step
        return number if of.first == 0 else number + of.first


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

    def layers(self, segment: int) -> tuple[PagedLayer, ...]:
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
            prefix = f"segments.{segment}.{index}."
            linears = (
                (linear.name.removeprefix(prefix), linear.first)
                for linear in self.geometry.linears
                if linear.name.startswith(prefix)
            )
            found.append(
                PagedLayer(
                    kv=_numbers(within),
                    moe=_numbers(moe) if moe else None,
                    linears=tuple(linears),
                )
            )
        return tuple(found)

    def at(self, layer: PagedLayer, repeat: Int32[Array, ""]) -> PagedLayer:
        return dataclasses.replace(layer, repeat=repeat)

    def experts(self, carry: UInt32[Array, "pages words"], layer: PagedLayer) -> Experts:
        if layer.moe is None:
            raise AssertionError("a layer without experts asks for them")
        # As they are, with the row that the layer begins at: kernels would get copies of parts.
        gate_up, down, widths = (
            table[0].reshape(-1, table.shape[-1])
            for table in (self.state.gate_up_pages, self.state.down_pages, self.state.widths)
        )
        runs, experts = self.geometry.expert_runs, self.state.widths.shape[2]
        paged = Paged(
            carry,
            None if self.state.host is None else self.state.host[0],
            gate_up,
            down,
            widths,
            runs[0],
            runs[1],
            layer=layer.number(layer.moe),
            count=experts,
        )
        return paged if self.kernels.products == "reference" else ByKernels(paged, self.kernels)

    def in_place(self, weights: Mapping[str, Float[Array, "..."]]) -> Collection[str]:
        if self.kernels.products == "reference":
            return ()
        matrices = {n for n, w in weights.items() if n.endswith(".weight") and self._takes(w)}
        found = set(matrices)
        for name in weights:
            owner, _, part = name.rpartition(".")
            if part == "weight" and owner.endswith("norm"):
                own = weights[name].ndim == 2 and self.config.norm != "layer"
            elif part in ("choice_bias", "expert_scale") or name.endswith("router.bias"):
                own = f"{owner}.weight" in matrices and routing.takes(self.config.moe.router)
            elif part == "bias":
                own = f"{owner}.weight" in matrices
            else:
                own = part in ("input_scale", "sinks")
            if own:
                found.add(name)
        return found

    def _takes(self, weight: Float[Array, "..."]) -> bool:
        """Whether a kernel multiplies the step's tokens with such matrices in place."""
        if self.kernels.products == "triton" or weight.ndim != 3:
            return False
        if self.kernels.shared_bytes < stacked.SHARED_BYTES:
            return False
        return stacked.takes(len(self.batch.tokens), weight.shape[2], weight.dtype)

    def linears(
        self, carry: UInt32[Array, "pages words"], segment: int, index: int, layer: PagedLayer
    ) -> dict[str, Array | CodedMatrix]:
        host = None if self.state.host is None else self.state.host[0]
        found: dict[str, Array | CodedMatrix] = {}
        self.current.pages = carry
        tables, widths = self.state.linear_pages[0], self.state.linear_widths[0]
        shapes = {linear.first: linear.shape for linear in self.geometry.linears}
        for name, first in layer.linears:
            row, runs = layer.number(Numbers(first, 1)), self.geometry.runs_of(shapes[first])
            if self.kernels.products == "reference":
                found[name] = read_linear(carry, host, tables[row], widths[row], runs)[0]
            else:
                found[name] = CodedMatrix(
                    self.current, host, tables, widths, row, runs, self.kernels
                )
        return found

    def attend(
        self,
        carry: UInt32[Array, "pages words"],
        layer: PagedLayer,
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
                layer.number(layer.kv),
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
                layer.number(layer.kv),
                qkv.sinks,
                plan=self.plans[part],
                part=part,
                block_size=kind.block_size,
            )
        block = jnp.minimum(batch.positions // kind.block_size, tables.shape[1] - 1)
        pages = write_tokens(
            carry,
            block_pages[layer.number(layer.kv), tables[batch.table_row_of, block]],
            batch.positions % kind.block_size,
            values_to_words(join_kv(qkv)),
            batch.valid,
        )
        view = View(
            pages, block_pages, layer.number(layer.kv), tables, kind, part, self.geometry.dtype
        )
        # Results take the place of the queries where they have their shape.
        o = qkv.q[..., : value_size(part)]
        if self.prefill_rows:
            o = attend_ragged(view, qkv, batch, self.prefill_rows, self.max_query)
        if self.prefill_rows < len(batch.starts):
            o = attend_decode(view, qkv, o, batch, self.prefill_rows)
        return pages, jnp.where(batch.valid[:, None, None], o, jnp.zeros((), o.dtype))


def _numbers(of: list[int]) -> Numbers:
    step = of[1] - of[0] if len(of) > 1 else 1
    if of != list(range(of[0], of[0] + step * len(of), step)):
        raise AssertionError("layers that repeat have numbers at even distances")
    return Numbers(of[0], step)


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
