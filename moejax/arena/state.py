"""The arena and its tables as arrays, and the plain jax.numpy way to read and change them.

Everything here works on one device's share: arrays without the leading device axis of FORMAT.md.
These functions are the reference that kernels are tested against.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from moejax.arena.control import Header
from moejax.arena.format import (
    ATOM_ROWS,
    ATOM_WORDS,
    DTYPES,
    POISON_PAGE,
    POISON_WORD,
    dense_words,
)
from moejax.arena.geometry import LinearShape

# As an index it is beyond every array: such updates are dropped.
_OUT_OF_RANGE = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaState:
    """The arena and the tables that point into it, donated through every step (FORMAT.md 1, 3)."""

    pages: Any
    """uint32[D, pages, words]"""
    gate_up_pages: Any
    """int32[D, moe layers, experts, slots]"""
    down_pages: Any
    """int32[D, moe layers, experts, slots]"""
    widths: Any
    """int32[D, moe layers, experts, 2]"""
    block_pages: Any
    """For each kind of KV: int32[D, layers, kv_blocks]"""
    block_tables: Any
    """For each kind of KV: int32[D, rows, blocks per row]"""
    last_tokens: Any
    """int32[rows]"""
    marks: Any
    """int32[rows, vocab]: what a row has to do with a token, see moejax.sampling"""
    bias_tokens: Any
    """int32[rows, biases]"""
    bias_values: Any
    """float32[rows, biases]"""
    host: Any = None
    """uint32[D, host pages, words], or None where no page id is negative"""


def gather_pages(
    pages: UInt32[Array, "pages words"],
    ids: Int32[Array, "*shape"],
    host: UInt32[Array, "host_pages words"] | None = None,
) -> UInt32[Array, "*shape words"]:
    """The pages with these signed ids. An id outside of both pools reads as poison."""
    found = pages.at[ids].get(mode="fill", fill_value=POISON_WORD, wrap_negative_indices=False)
    if host is None:
        return found
    below = host.at[~ids].get(mode="fill", fill_value=POISON_WORD, wrap_negative_indices=False)
    return jnp.where((ids >= 0)[..., None], found, below)


def write_pages(
    pages: UInt32[Array, "pages words"],
    ids: Int32[Array, " n"],
    values: UInt32[Array, "n words"],
) -> UInt32[Array, "pages words"]:
    """The pages with some of them replaced. Page 0 and ids out of range are left out."""
    ids = jnp.where(ids > POISON_PAGE, ids, pages.shape[0])
    return pages.at[ids].set(values, mode="drop")


def decode_dense(
    run: UInt32[Array, " words"], shape: LinearShape, dtype: str
) -> Shaped[Array, "parts rows columns"]:
    """The matrices of a dense run; `run` may be longer than it."""
    row_words = dense_words(shape.columns, DTYPES[dtype].itemsize)
    row_blocks = shape.stored_rows // ATOM_ROWS
    atoms = run[: shape.stored_rows * row_words].reshape(
        row_blocks, row_words // ATOM_WORDS, ATOM_ROWS, ATOM_WORDS
    )
    words = atoms.transpose(0, 2, 1, 3).reshape(shape.parts, -1, row_words)
    return words_to_values(words, dtype)[:, : shape.rows, : shape.columns]


def words_to_values(words: UInt32[Array, "*n words"], dtype: str) -> Shaped[Array, "*n values"]:
    """Words as the values packed in them, low end first."""
    values = lax.bitcast_convert_type(words, DTYPES[dtype])
    return values.reshape(*words.shape[:-1], -1)


def values_to_words(values: Shaped[Array, "*n values"]) -> UInt32[Array, "*n words"]:
    """Values of 2 or 4 bytes packed into words, low end first."""
    per_word = 4 // values.dtype.itemsize
    if per_word > 1:
        values = values.reshape(*values.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(values, jnp.uint32)


def write_tokens(
    pages: UInt32[Array, "pages words"],
    page_ids: Int32[Array, " tokens"],
    places: Int32[Array, " tokens"],
    values: UInt32[Array, "tokens token_words"],
    valid: Bool[Array, " tokens"],
) -> UInt32[Array, "pages words"]:
    """Writes the KV of tokens, each to its place within its page.

    Invalid tokens are left out, and so are writes through an entry that points at nothing.
    """
    token_words = values.shape[1]
    page_ids = jnp.where(valid & (page_ids > POISON_PAGE), page_ids, pages.shape[0])
    at = jnp.stack([page_ids, places * token_words], axis=1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 1),
    )
    written = lax.scatter(
        pages,
        at,
        values,
        numbers,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    # XLA would fuse the write of a single token into later reads, and copy the arena for each.
    kept: UInt32[Array, "pages words"] = lax.optimization_barrier(written)
    return kept


def read_tokens(
    pages: UInt32[Array, "pages words"],
    page_ids: Int32[Array, "*rows blocks"],
    block_size: int,
    token_words: int,
) -> UInt32[Array, "*rows tokens token_words"]:
    """The KV words of all tokens of some blocks, in order."""
    found = gather_pages(pages, page_ids)[..., : block_size * token_words]
    return found.reshape(*page_ids.shape[:-1], -1, token_words)


def apply_edits(state: ArenaState, control: dict[str, Array]) -> ArenaState:
    """The state after the edit lists of a control array. Entries beyond the counts do nothing."""
    header = control["header"]

    def used(section: str, count: int) -> Array:
        """The edits, with those beyond the count pointing out of range."""
        edits = control[section]
        is_used = jnp.arange(edits.shape[0], dtype=jnp.int32) < header[count]
        return jnp.where(is_used[:, None], edits, _OUT_OF_RANGE)

    block_pages, block_tables = [], []
    for i, (pages, tables) in enumerate(zip(state.block_pages, state.block_tables, strict=True)):
        at = Header.KV_EDITS + 2 * i
        blocks, rows = used(f"block_edits.{i}", at), used(f"row_edits.{i}", at + 1)
        block_pages.append(pages.at[:, :, blocks[:, 0]].set(blocks[:, 1:].T[None], mode="drop"))
        block_tables.append(tables.at[:, rows[:, 0], rows[:, 1]].set(rows[None, :, 2], mode="drop"))
    edited = dataclasses.replace(
        state, block_pages=tuple(block_pages), block_tables=tuple(block_tables)
    )
    if control["expert_edits"].shape[0] == 0:
        return edited
    return _apply_expert_edits(edited, used("expert_edits", Header.EXPERT_EDITS))


def _apply_expert_edits(state: ArenaState, edits: Int32[Array, "edits 4"]) -> ArenaState:
    kind, linear, slot, value = edits.T
    experts = state.widths.shape[2]
    layer, expert = linear // experts, linear % experts

    def pages(table: Array, which: int) -> Array:
        at = jnp.where((kind == which) & (slot >= 0), layer, _OUT_OF_RANGE)
        return table.at[:, at, expert, slot].set(
            value[None], mode="drop", wrap_negative_indices=False
        )

    at = jnp.where(slot == -1, layer, _OUT_OF_RANGE)
    widths = state.widths.at[:, at, expert, kind].set(
        value[None], mode="drop", wrap_negative_indices=False
    )
    return dataclasses.replace(
        state,
        gate_up_pages=pages(state.gate_up_pages, 0),
        down_pages=pages(state.down_pages, 1),
        widths=widths,
    )
