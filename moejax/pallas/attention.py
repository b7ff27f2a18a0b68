"""Calls the kernels of `attention_kernel`: attention of a step's queries over the arena.

`make_plan` says once per step what each program does; every layer is given it. `attend_paged` then
takes one launch for rows of one query (and a second that adds up, where keys are shared out among
programs), and one for rows of several. What they cost follows the keys that are seen.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from moejax.config import AnyAttention
from moejax.pallas.attention_tiling import (
    KeyShape,
    Tiling,
    itemsize_of,
    key_shape,
    pad_columns,
)
from moejax.pallas.bridge import triton_call

MAX_GRID = 65535
COMBINED_COLUMNS = 128


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["items"], meta_fields=["tiling", "by_item"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What the programs of a launch do."""

    items: Any
    """int32[items, 4]: first token, queries (0: nothing to do), row of the tables, position of the
    first query. Queries whose position is before the first token see nothing and get zeros."""
    tiling: Tiling
    by_item: bool
    """Results have the places of items (of one query each), not those of tokens."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["decode", "ragged"], meta_fields=["tokens"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What attention of a step does, for layers of the same shape and reach."""

    decode: Launch | None
    """Rows of one token at most."""
    ragged: Launch | None
    """Rows of any number of tokens, and the tokens that belong to no row."""
    tokens: int


def make_plan(
    *,
    table_rows: Int32[Array, " rows"],
    starts: Int32[Array, " rows"],
    lengths: Int32[Array, " rows"],
    cached: Int32[Array, " rows"],
    tokens: int,
    prefill_rows: int,
    tilings: tuple[Tiling, Tiling],
) -> Plan:
    """The plan of a step whose rows are these, as in a Batch.

    Rows after the first `prefill_rows` have one token at most; rows have the step's tokens from 0
    on, one after the other. Tokens beyond them get zeros.
    """
    decode = ragged = None
    if prefill_rows:
        first, last = slice(None, prefill_rows), slice(prefill_rows, None)
        items = _tiles(
            (table_rows[first], starts[first], lengths[first], cached[first]),
            jnp.sum(lengths),
            tokens,
            tilings[1].queries,
        )
        ragged = Launch(items=items, tiling=tilings[1], by_item=False)
        if prefill_rows < len(starts):
            at = jnp.where(lengths > 0, starts, tokens)
            items = jnp.stack([at, lengths, table_rows, cached], axis=1)[last]
            decode = Launch(items=items, tiling=tilings[0], by_item=True)
    else:
        at = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.sum(at[:, None] >= (starts + lengths)[None, :], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, len(starts) - 1)
        position = jnp.where(at < jnp.sum(lengths), cached[row], -1)
        items = jnp.stack([at, jnp.ones_like(at), table_rows[row], position], axis=1)
        decode = Launch(items=items, tiling=tilings[0], by_item=True)
    return Plan(decode=decode, ragged=ragged, tokens=tokens)


def _tiles(
    of_rows: tuple[Int32[Array, " rows"], ...],
    total: Int32[Array, ""],
    tokens: int,
    size: int,
) -> Int32[Array, "tiles 4"]:
    """Tiles of `size` neighbouring queries of one row, and of the tokens from `total` on."""
    behind = (0, total, tokens - total, 0)
    table_rows, starts, lengths, cached = (
        jnp.append(field, jnp.asarray(n, jnp.int32))
        for field, n in zip(of_rows, behind, strict=True)
    )
    rows = len(starts)
    # Each row has at most one tile that is not full.
    number = jnp.arange(rows + tokens // size, dtype=jnp.int32)
    tiles = -(-lengths // size)
    ends = jnp.cumsum(tiles)
    row = jnp.sum(number[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, rows - 1)
    first = (number - (ends - tiles)[row]) * size
    count = jnp.clip(lengths[row] - first, 0, size)
    position = jnp.where(row < rows - 1, cached[row] + first, -count)
    return jnp.stack([starts[row] + first, count, table_rows[row], position], axis=1)


def attend_paged(
    q: Float[Array, "tokens heads size"],
    pages: UInt32[Array, "pages words"],
    block_pages: Int32[Array, "layers kv_blocks"],
    block_tables: Int32[Array, "table_rows blocks"],
    layer: Int32[Array, ""],
    sinks: Float[Array, " heads"] | None = None,
    *,
    plan: Plan,
    part: AnyAttention,
    block_size: int,
) -> Float[Array, "tokens heads size2"]:
    """Attention of a step's queries over keys and values in pages, the step's own among them.

    `layer`: its row of `block_pages`; XLA would copy a slice of the table for every layer.
    In bfloat16 and float32. Raises NotImplementedError for what the kernels cannot do, ValueError
    where shapes contradict the plan or `part`.
    """
    shape = key_shape(part)
    if q.shape != (plan.tokens, shape.heads, shape.size):
        raise ValueError(f"queries of {q.shape} are not {plan.tokens} tokens of {shape}")
    call = functools.partial(
        _attend, (q, pages, block_pages, block_tables, layer[None]), sinks, shape, part, block_size
    )
    if plan.decode is None:
        if plan.ragged is None:
            raise ValueError("the plan of a step without rows")
        return call(plan.ragged)
    alone = call(plan.decode)
    if plan.ragged is None:
        return alone
    return call(plan.ragged).at[plan.decode.items[:, 0]].set(alone, mode="drop")


def _attend(
    arrays: tuple[Array, ...],
    sinks: Float[Array, " heads"] | None,
    shape: KeyShape,
    part: AnyAttention,
    block_size: int,
    launch: Launch,
) -> Float[Array, "places heads size"]:
    """One launch of programs, and that which combines what they found."""
    q, pages, block_pages, block_tables, _ = arrays
    tiling, number = launch.tiling, len(launch.items)
    itemsize = itemsize_of(q.dtype)
    token_values, page_values = part.cached_values, pages.shape[1] * 4 // itemsize
    if not 0 < block_size * token_values <= page_values:
        raise ValueError(f"{block_size} tokens of {token_values} values do not fit a page")
    if number > MAX_GRID:
        raise NotImplementedError(f"attention kernels take {MAX_GRID} tiles, not {number}")
    if tiling.splits > 1 and not launch.by_item:
        raise NotImplementedError("only the keys of single queries are shared out")

    from moejax.pallas.attention_kernel import attend_kernel, combine_kernel

    reach: dict[str, Any] = {
        "WINDOW": part.reach.window or 0,
        "CHUNK": part.reach.chunk or 0,
    }
    shares: dict[str, Any] = {
        "KEYS": tiling.keys,
        "SPLITS": tiling.splits,
        "LEAST_TILES": -(-tiling.least_share // tiling.keys),
        # Rows of 16 bytes, with room for a number behind the values.
        "PARTIAL": -(-(shape.value_size + 1) // 4) * 4,
    }
    places = number if launch.by_item else len(q)
    whole = jax.ShapeDtypeStruct((places, shape.heads, shape.value_size), q.dtype)
    partial_shape = (number, tiling.splits, shape.heads, shares["PARTIAL"])
    found = triton_call(
        *arrays,
        launch.items,
        q if sinks is None else sinks,
        kernel=attend_kernel,
        out_type=jax.ShapeDtypeStruct(partial_shape, jnp.float32) if tiling.splits > 1 else whole,
        grid=(shape.kv_heads * -(-shape.group // tiling.heads), tiling.splits, number),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        SCALE=part.scale,
        HEADS=shape.heads,
        GROUP=shape.group,
        TILE_HEADS=tiling.heads,
        M=tiling.rows,
        MAIN=shape.main,
        MAIN_PADDED=pad_columns(shape.main),
        REST=shape.rest,
        REST_PADDED=pad_columns(shape.rest),
        SHARED=shape.shared,
        KV_HEADS=shape.kv_heads,
        PAGE_VALUES=page_values,
        TOKEN_VALUES=token_values,
        BLOCK_SIZE=block_size,
        TABLE_BLOCKS=block_tables.shape[1],
        KV_BLOCKS=block_pages.shape[1],
        HAS_SINKS=sinks is not None,
        ONE_QUERY=tiling.queries == 1,
        BY_ITEM=launch.by_item,
        **reach,
        **shares,
    )
    if tiling.splits == 1:
        return found
    columns = min(COMBINED_COLUMNS, pad_columns(shape.value_size))
    return triton_call(
        found,
        launch.items,
        kernel=combine_kernel,
        out_type=whole,
        grid=(shape.heads * -(-shape.value_size // columns), number),
        num_warps=4,
        HEADS=shape.heads,
        VALUE_SIZE=shape.value_size,
        COLUMNS=columns,
        SPLITS_PADDED=1 << (tiling.splits - 1).bit_length(),
        **reach,
        **shares,
    )
