"""The arena as a decoder's memory: KV and experts read through page tables."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.control import Field, Header
from moejax.arena.format import DTYPES
from moejax.arena.geometry import Geometry
from moejax.arena.state import (
    ArenaState,
    read_tokens,
    values_to_words,
    words_to_values,
    write_tokens,
)
from moejax.config import ModelConfig
from moejax.layers.attention import (
    Partial,
    Qkv,
    add_keys,
    finish_partial,
    start_partial,
    visible,
)
from moejax.layers.experts import Paged

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
    table_rows: Int32[Array, " rows"]
    starts: Int32[Array, " rows"]
    lengths: Int32[Array, " rows"]
    cached: Int32[Array, " rows"]


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
    return Batch(
        tokens=jnp.where(tokens < 0, last, tokens),
        positions=cached[row_of] + number - starts[row_of],
        valid=number < header[Header.TOKENS],
        row_of=row_of,
        table_rows=rows[:, Field.ROW],
        starts=starts,
        lengths=lengths,
        cached=cached,
    )


class LayerTables(NamedTuple):
    """One layer's part of the tables."""

    block_pages: Int32[Array, " kv_blocks"]
    gate_up_pages: Int32[Array, "experts slots"] | None
    down_pages: Int32[Array, "experts slots2"] | None


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

    @property
    def positions(self) -> Int32[Array, " tokens"]:
        return self.batch.positions

    @property
    def valid(self) -> Bool[Array, " tokens"]:
        return self.batch.valid

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
            block_pages = self.state.block_pages[0, jnp.array(numbers)]
            moe = [moe_numbers[n] for n in numbers if n in moe_numbers]
            gate_up = self.state.gate_up_pages[0, jnp.array(moe)] if moe else None
            down = self.state.down_pages[0, jnp.array(moe)] if moe else None
            found.append(LayerTables(block_pages, gate_up, down))
        return tuple(found)

    def experts(self, carry: UInt32[Array, "pages words"], layer: LayerTables) -> Paged:
        geometry = self.geometry
        if layer.gate_up_pages is None or layer.down_pages is None:
            raise AssertionError("a layer without experts asks for them")
        return Paged(
            carry,
            None if self.state.host is None else self.state.host[0],
            layer.gate_up_pages,
            layer.down_pages,
            geometry.gate_up,
            geometry.down,
            geometry.dtype,
        )

    def attend(
        self,
        carry: UInt32[Array, "pages words"],
        layer: LayerTables,
        qkv: Qkv,
        window: int | None,
        scale: float,
    ) -> tuple[UInt32[Array, "pages words"], Float[Array, "tokens heads size"]]:
        batch, block_size = self.batch, self.geometry.block_size
        # int32[rows, blocks per row]: pages of this layer
        row_pages = layer.block_pages[self.state.block_tables[0][batch.table_rows]]
        block = jnp.minimum(batch.positions // block_size, row_pages.shape[1] - 1)
        words = values_to_words(
            jnp.concatenate([x.reshape(len(x), -1) for x in (qkv.k, qkv.v)], axis=1)
        )
        pages = write_tokens(
            carry,
            row_pages[batch.row_of, block],
            batch.positions % block_size,
            words,
            batch.valid,
        )
        o = qkv.q
        if self.prefill_rows:
            o = self._attend_ragged(pages, row_pages, qkv, window, scale)
        if self.prefill_rows < len(row_pages):
            o = self._attend_decode(pages, row_pages, qkv, o, window, scale)
        return pages, jnp.where(batch.valid[:, None, None], o, jnp.zeros((), o.dtype))

    def _attend_keys(
        self,
        pages: UInt32[Array, "pages words"],
        row_pages: Int32[Array, "rows blocks"],
        q: Float[Array, "rows queries heads size"],
        kv_heads: int,
        positions: Int32[Array, "rows queries"],
        used: Bool[Array, "rows queries"],
        window: int | None,
        scale: float,
    ) -> Float[Array, "rows queries heads size"]:
        """Attention of queries of some rows, over tiles of keys: no more than the longest needs."""
        block_size = self.geometry.block_size
        blocks = min(max(1, KEY_TILE // block_size), row_pages.shape[1])
        row_pages = jnp.pad(row_pages, ((0, 0), (0, -row_pages.shape[1] % blocks)))
        size = blocks * block_size
        end = jnp.max(jnp.where(used, positions, -1)) // size + 1
        first = jnp.int32(0)
        if window is not None:
            oldest = jnp.min(jnp.where(used, positions, row_pages.shape[1] * block_size))
            first = jnp.maximum(oldest - window + 1, 0) // size

        def add(number: Array, partial: Partial) -> Partial:
            ids = lax.dynamic_slice_in_dim(row_pages, number * blocks, blocks, axis=1)
            k, v = self._read(pages, ids, kv_heads, q.shape[-1])
            keys = number * size + jnp.arange(size, dtype=jnp.int32)
            mask = jax.vmap(lambda at: visible(at, keys, window))(positions) & used[..., None]
            return jax.vmap(add_keys, (0, 0, 0, 0, 0, None))(partial, q, k, v, mask, scale)

        start = jax.vmap(lambda row: start_partial(row, kv_heads))(q)
        partial = lax.fori_loop(first, end, add, start)
        return jax.vmap(finish_partial)(partial).astype(q.dtype)

    def _read(
        self,
        pages: UInt32[Array, "pages words"],
        page_ids: Int32[Array, "rows blocks"],
        kv_heads: int,
        size: int,
    ) -> tuple[Float[Array, "rows keys kv_heads size"], Float[Array, "rows keys kv_heads size"]]:
        """Keys and values of some blocks of rows."""
        geometry = self.geometry
        # Layers may have fewer KV heads than the page was cut for.
        token_words = 2 * kv_heads * size * DTYPES[geometry.dtype].itemsize // 4
        words = read_tokens(pages, page_ids, geometry.block_size, token_words)
        values = words_to_values(words, geometry.dtype)
        k, v = jnp.split(values.reshape(len(page_ids), -1, 2 * kv_heads, size), 2, axis=2)
        return k, v

    def _attend_decode(
        self,
        pages: UInt32[Array, "pages words"],
        row_pages: Int32[Array, "rows blocks"],
        qkv: Qkv,
        o: Float[Array, "tokens heads size"],
        window: int | None,
        scale: float,
    ) -> Float[Array, "tokens heads size"]:
        """`o` with the results of the rows of one query: all of them at once."""
        first, batch = self.prefill_rows, self.batch
        used = batch.lengths[first:] > 0
        at = jnp.minimum(batch.starts[first:], len(qkv.q) - 1)
        # Where no row is used, no tile is read.
        found = self._attend_keys(
            pages,
            row_pages[first:],
            qkv.q[at][:, None],
            qkv.k.shape[1],
            batch.cached[first:, None],
            used[:, None],
            window,
            scale,
        )
        return o.at[jnp.where(used, at, len(o))].set(found[:, 0], mode="drop")

    def _attend_ragged(
        self,
        pages: UInt32[Array, "pages words"],
        row_pages: Int32[Array, "rows blocks"],
        qkv: Qkv,
        window: int | None,
        scale: float,
    ) -> Float[Array, "tokens heads size"]:
        """The rows of several queries: tiles of queries of one row, one after the other.

        The places of other tokens hold something or other.
        """
        batch = self.batch
        tokens, size = len(batch.tokens), min(QUERY_TILE, self.max_query)
        per_row = -(-self.max_query // size)
        place = jnp.arange(size, dtype=jnp.int32)
        number = jnp.arange(self.prefill_rows * per_row, dtype=jnp.int32)
        row, first = number // per_row, number % per_row * size
        at = batch.starts[row][:, None] + first[:, None] + place[None, :]

        def tile(o: Array, number: Array) -> tuple[Array, None]:
            row, first = number // per_row, number % per_row * size

            q = lax.dynamic_index_in_dim(o, number, keepdims=False)
            out = self._attend_keys(
                pages,
                row_pages[row][None],
                q[None],
                qkv.k.shape[1],
                (batch.cached[row] + first + place)[None],
                (first + place < batch.lengths[row])[None],
                window,
                scale,
            )
            return lax.dynamic_update_index_in_dim(o, out[0], number, axis=0), None

        # The results take the place of the queries: fresh zeros would be copied for each layer.
        o, _ = lax.scan(tile, qkv.q[jnp.minimum(at, tokens - 1)], number)
        within = jnp.arange(tokens, dtype=jnp.int32) - batch.starts[batch.row_of]
        within = jnp.clip(within, 0, per_row * size - 1)
        row = jnp.minimum(batch.row_of, self.prefill_rows - 1)
        return o.reshape(-1, *o.shape[2:])[row * per_row * size + within]
