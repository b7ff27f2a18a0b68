"""The arena as a decoder's memory: KV and experts read through page tables."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.control import Field, Flag, Header
from moejax.arena.experts import Paged
from moejax.arena.geometry import Geometry
from moejax.arena.kinds import KvKind
from moejax.arena.state import (
    ArenaState,
    read_linear,
    read_tokens,
    values_to_words,
    words_to_values,
    write_tokens,
)
from moejax.config import AnyAttention, ModelConfig
from moejax.layers.attention import (
    Partial,
    Qkv,
    add_keys,
    finish_partial,
    join_kv,
    split_kv,
    start_partial,
    value_size,
    visible,
)
from moejax.layers.experts import ByKernels, Experts
from moejax.pallas.attention import Plan, attend_paged, make_plan
from moejax.pallas.attention_tiling import Tiling, choose_tilings
from moejax.pallas.dispatch import REFERENCE, Kernels
from moejax.pallas.pages import write_kv

# Queries of one row, and keys of a row, that attend at once.
QUERY_TILE = 64
KEY_TILE = 256


class Batch(NamedTuple):
    """Where the tokens of a step belong, from a control array."""

    tokens: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]
    row_of: Int32[Array, " tokens"]
    """Row of the step, not of the tables."""
    table_row_of: Int32[Array, " tokens"]
    """Row of the tables."""
    table_rows: Int32[Array, " rows"]
    starts: Int32[Array, " rows"]
    lengths: Int32[Array, " rows"]
    cached: Int32[Array, " rows"]
    uses_long_rope: Bool[Array, " tokens"]


def make_batch(control: dict[str, Array], last_tokens: Int32[Array, " table_rows"]) -> Batch:
    """Reads a control array's tokens and rows."""
    header, rows = control["header"], control["rows"]
    number = jnp.arange(control["tokens"].shape[0], dtype=jnp.int32)
    used = jnp.arange(rows.shape[0], dtype=jnp.int32) < header[Header.ROWS]
    starts = jnp.where(used, rows[:, Field.TOKEN_START], len(number))
    lengths = jnp.where(used, rows[:, Field.NUM_TOKENS], 0)
    row_of = jnp.sum(number[:, None] >= starts[None, :], axis=1, dtype=jnp.int32) - 1
    row_of = jnp.maximum(row_of, 0)
    cached = rows[:, Field.CACHED]
    tokens = control["tokens"]
    last = last_tokens[rows[:, Field.ROW]][row_of]
    long_rope = (rows[:, Field.FLAGS] & int(Flag.LONG_ROPE)) > 0
    return Batch(
        tokens=jnp.where(tokens < 0, last, tokens),
        positions=cached[row_of] + number - starts[row_of],
        valid=number < header[Header.TOKENS],
        row_of=row_of,
        table_row_of=rows[:, Field.ROW][row_of],
        table_rows=rows[:, Field.ROW],
        starts=starts,
        lengths=lengths,
        cached=cached,
        uses_long_rope=long_rope[row_of],
    )


def make_plans(
    config: ModelConfig,
    geometry: Geometry,
    state: ArenaState,
    batch: Batch,
    prefill_rows: int,
    max_query: int,
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


class LayerTables(NamedTuple):
    """One layer's part of the tables."""

    block_pages: Int32[Array, " kv_blocks"]
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
    kernels: Kernels = REFERENCE
    plans: Mapping[AnyAttention, Plan] = dataclasses.field(default_factory=dict)
    """What the programs of each kind of attention do, see `make_plans`."""

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
            kind, _ = self.geometry.place_of(numbers[0])
            within = [self.geometry.place_of(n)[1] for n in numbers]
            block_pages = self.state.block_pages[kind][0, jnp.array(within)]
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
            found.append(LayerTables(block_pages, gate_up, down, widths, linears))
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
    ) -> dict[str, Float[Array, "rows columns"]]:
        host = None if self.state.host is None else self.state.host[0]
        found = {}
        for linear in self.geometry.linears:
            name = linear.name.removeprefix(f"segments.{segment}.{index}.")
            if name != linear.name:
                slots, width = layer.linears[name]
                runs = self.geometry.runs_of(linear.shape)
                found[name] = read_linear(carry, host, slots, width, runs)[0]
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
        if self.kernels.attention != "reference":
            pages = write_kv(
                carry,
                qkv.k,
                qkv.v,
                layer.block_pages,
                tables,
                batch.table_row_of,
                batch.positions,
                batch.valid,
                block_size=kind.block_size,
            )
            return pages, attend_paged(
                qkv.q,
                pages,
                layer.block_pages,
                tables,
                qkv.sinks,
                plan=self.plans[part],
                part=part,
                block_size=kind.block_size,
            )
        block = jnp.minimum(batch.positions // kind.block_size, tables.shape[1] - 1)
        pages = write_tokens(
            carry,
            layer.block_pages[tables[batch.table_row_of, block]],
            batch.positions % kind.block_size,
            values_to_words(join_kv(qkv)),
            batch.valid,
        )
        view = _View(pages, layer.block_pages, tables, kind, part, self.geometry.dtype)
        # Results take the place of the queries where they have their shape.
        o = qkv.q[..., : value_size(part)]
        if self.prefill_rows:
            o = self._attend_ragged(view, qkv)
        if self.prefill_rows < len(batch.starts):
            o = self._attend_decode(view, qkv, o)
        return pages, jnp.where(batch.valid[:, None, None], o, jnp.zeros((), o.dtype))

    def _attend_decode(
        self, view: "_View", qkv: Qkv, o: Float[Array, "tokens heads size"]
    ) -> Float[Array, "tokens heads size"]:
        """`o` with the results of the rows of one query: all of them at once."""
        first, batch = self.prefill_rows, self.batch
        used = batch.lengths[first:] > 0
        at = jnp.minimum(batch.starts[first:], len(qkv.q) - 1)
        # Where no row is used, no tile is read.
        found = _attend_keys(
            view,
            batch.table_rows[first:],
            qkv.q[at][:, None],
            qkv.sinks,
            batch.cached[first:, None],
            used[:, None],
        )
        return o.at[jnp.where(used, at, len(o))].set(found[:, 0], mode="drop")

    def _attend_ragged(self, view: "_View", qkv: Qkv) -> Float[Array, "tokens heads size"]:
        """The rows of several queries: tiles of queries of one row, one after the other.

        The places of other tokens hold something or other.
        """
        batch, rows = self.batch, self.prefill_rows
        tokens, size = len(batch.tokens), min(QUERY_TILE, self.max_query)
        # Each row has at most one tile that is not full.
        row_tiles = -(-batch.lengths[:rows] // size)
        ends = jnp.cumsum(row_tiles)
        number = jnp.arange(rows + tokens // size, dtype=jnp.int32)
        row = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        row = jnp.minimum(row, rows - 1)
        starts = ends - row_tiles
        place = (number - starts[row])[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        # Tiles beyond the last row's end are behind its last token: their queries see nothing.
        used = place < batch.lengths[row][:, None]

        def tile(o: Array, number: Array) -> tuple[Array, None]:
            q = lax.dynamic_index_in_dim(o, number, keepdims=False)
            out = _attend_keys(
                view,
                batch.table_rows[row[number]][None],
                q[None],
                qkv.sinks,
                (batch.cached[row[number]] + place[number])[None],
                used[number][None],
            )
            # The results take the place of the queries: fresh zeros would be copied per layer.
            return lax.dynamic_update_slice(o, out, (number, 0, 0, 0)), None

        at = jnp.minimum(batch.starts[row][:, None] + place, tokens - 1)
        o, _ = lax.scan(tile, qkv.q[at], number)
        row = jnp.minimum(batch.row_of, rows - 1)
        within = jnp.arange(tokens, dtype=jnp.int32) - batch.starts[row]
        flat = starts[row] * size + jnp.maximum(within, 0)
        flat = jnp.minimum(flat, len(number) * size - 1)
        return o.reshape(-1, *o.shape[2:])[flat][..., : value_size(view.part)]


class _View(NamedTuple):
    """The cache of one layer, and how to read it."""

    pages: UInt32[Array, "pages words"]
    block_pages: Int32[Array, " kv_blocks"]
    block_tables: Int32[Array, "table_rows blocks"]
    kind: KvKind
    part: AnyAttention
    dtype: str

    def read(
        self, rows: Int32[Array, " rows"], first: Int32[Array, " rows"], count: int
    ) -> tuple[Float[Array, "rows keys kv_heads size"], Float[Array, "rows keys kv_heads size2"]]:
        """Keys and values of `count` blocks of some rows, from block `first` of each on.

        Blocks beyond the end of the tables read as poison.
        """
        at = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        blocks = self.block_tables.at[rows[:, None], at].get(mode="fill", fill_value=0)
        words = read_tokens(
            self.pages, self.block_pages[blocks], self.kind.block_size, self.kind.token_words
        )
        return split_kv(words_to_values(words, self.dtype), self.part)


def _attend_keys(
    view: _View,
    table_rows: Int32[Array, " rows"],
    q: Float[Array, "rows queries heads size"],
    sinks: Float[Array, " heads"] | None,
    positions: Int32[Array, "rows queries"],
    used: Bool[Array, "rows queries"],
) -> Float[Array, "rows queries heads size2"]:
    """Attention of queries of some rows, over tiles of keys: as many as the most of a row.

    A row begins with the first tile that it sees: of a window no row reads more than its tiles.
    """
    part, block_size = view.part, view.kind.block_size
    blocks = min(max(1, KEY_TILE // block_size), view.block_tables.shape[1])
    size = blocks * block_size
    end = jnp.max(jnp.where(used, positions, -1), axis=1) // size + 1
    last_place = view.block_tables.shape[1] * block_size
    oldest = jnp.min(jnp.where(used, part.reach.oldest(positions), last_place), axis=1)
    first = jnp.maximum(oldest, 0) // size

    def add(number: Array, partial: Partial) -> Partial:
        tile = first + number
        k, v = view.read(table_rows, tile * blocks, blocks)
        keys = tile[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        seen = jax.vmap(lambda at, keys: visible(at, keys, part.reach))(positions, keys)
        mask = seen & used[..., None]
        return jax.vmap(add_keys, (0, 0, 0, 0, 0, None))(partial, q, k, v, mask, part.scale)

    start = jax.vmap(lambda row: start_partial(row, part, sinks))(q)
    partial = lax.fori_loop(0, jnp.max(end - first), add, start)
    return jax.vmap(finish_partial)(partial).astype(q.dtype)
