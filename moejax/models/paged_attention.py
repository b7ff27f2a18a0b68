"""Attention over keys and values in pages, in plain jax.numpy: tile after tile of a row's keys.

The path for every backend, and the reference of the kernels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.kinds import KvKind
from moejax.arena.state import read_tokens, words_to_values
from moejax.config import AnyAttention
from moejax.layers.attention import (
    Partial,
    Qkv,
    add_keys,
    finish_partial,
    split_kv,
    start_partial,
    value_size,
    visible,
)
from moejax.models.batch import Batch

# Queries of one row, and keys of a row, that attend at once.
QUERY_TILE = 64
KEY_TILE = 256


class View(NamedTuple):
    """The cache of one layer, and how to read it."""

    pages: UInt32[Array, "pages words"]
    block_pages: Int32[Array, "layers kv_blocks"]
    layer: Int32[Array, ""]
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
            self.pages,
            self.block_pages[self.layer, blocks],
            self.kind.block_size,
            self.kind.token_words,
        )
        return split_kv(words_to_values(words, self.dtype), self.part)


def attend_decode(
    view: View,
    qkv: Qkv,
    o: Float[Array, "tokens heads size"],
    batch: Batch,
    first: int,
) -> Float[Array, "tokens heads size"]:
    """`o` with the results of the rows from `first` on, of one query each: all of them at once."""
    used = batch.lengths[first:] > 0
    at = jnp.minimum(batch.starts[first:], len(qkv.q) - 1)
    # Where no row is used, no tile is read.
    found = attend_keys(
        view,
        batch.table_rows[first:],
        qkv.q[at][:, None],
        qkv.sinks,
        batch.cached[first:, None],
        used[:, None],
    )
    return o.at[jnp.where(used, at, len(o))].set(found[:, 0], mode="drop")


def attend_ragged(
    view: View, qkv: Qkv, batch: Batch, rows: int, max_query: int
) -> Float[Array, "tokens heads size"]:
    """The first rows, of several queries: tiles of queries of one row, one after the other.

    The places of other tokens hold something or other.
    """
    tokens, size = len(batch.tokens), min(QUERY_TILE, max_query)
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
        out = attend_keys(
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


def attend_keys(
    view: View,
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
