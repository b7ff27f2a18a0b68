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

from moejax.arena.control import Header, LinearKind
from moejax.arena.format import (
    ATOM_ROWS,
    ATOM_WORDS,
    DTYPES,
    POISON_PAGE,
    POISON_WORD,
    WORD_BITS,
    dense_words,
    plane_words,
)
from moejax.arena.geometry import LinearShape, Runs
from moejax.config import DENSE_WIDTH

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
    linear_pages: Any
    """int32[D, linears, slots]: of linears that are not experts"""
    linear_widths: Any
    """int32[D, linears]"""
    block_pages: Any
    """For each kind of KV: int32[D, layers, kv_blocks]"""
    block_tables: Any
    """For each kind of KV: int32[D, rows, blocks per row]"""
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


def read_linear(
    pages: UInt32[Array, "pages words"],
    host: UInt32[Array, "host_pages words"] | None,
    slots: Int32[Array, " slots"],
    width: Int32[Array, ""],
    runs: Runs,
) -> Shaped[Array, "parts rows columns"]:
    """The matrices of a linear at its width, which is data. At width 0 they are NaN."""

    def dense(width: Array) -> Array:
        ids = slots[: runs.pages("dense")]
        return decode_dense(gather_pages(pages, ids, host).reshape(-1), runs.shape, runs.dtype)

    def planes(width: Array) -> Array:
        return _read_planes(pages, host, slots, width, runs)

    if runs.quantization is None:
        return dense(width)
    if not runs.quantization.has_dense:
        return planes(width)
    found: Shaped[Array, "parts rows columns"] = lax.cond(
        width == DENSE_WIDTH, dense, planes, width
    )
    return found


def _read_planes(
    pages: UInt32[Array, "pages words"],
    host: UInt32[Array, "host_pages words"] | None,
    slots: Int32[Array, " slots"],
    width: Int32[Array, ""],
    runs: Runs,
) -> Shaped[Array, "parts rows columns"]:
    bits = runs.quantization
    if bits is None:
        raise AssertionError("there are no planes")
    # Planes beyond the width may be anywhere: the poison page is read for them.
    plane = jnp.arange(bits.parent_bits, dtype=jnp.int32)
    ids = slots[: bits.parent_bits * runs.plane_pages].reshape(bits.parent_bits, -1)
    ids = jnp.where((plane < width)[:, None], ids, POISON_PAGE)
    found = gather_pages(pages, ids, host).reshape(bits.parent_bits, -1)
    codes = decode_codes(found, runs.shape, width)

    # The tables of all widths are read alike: as many pages as the largest has, from its first on.
    count = runs.pages(f"table.{bits.parent_bits}")
    first = jnp.array(
        [runs.table_slot(b) for b in range(bits.seed_bits, bits.parent_bits + 1)], jnp.int32
    )[jnp.clip(width - bits.seed_bits, 0, bits.parent_bits - bits.seed_bits)]
    ids = lax.dynamic_slice_in_dim(jnp.pad(slots, (0, count)), first, count)
    ids = jnp.where(width > 0, ids, POISON_PAGE)
    words = gather_pages(pages, ids, host).reshape(-1)
    table = lax.bitcast_convert_type(words, jnp.float16).reshape(-1).astype(runs.dtype)
    return look_up(table, codes, runs.shape, width)


def decode_codes(
    planes: UInt32[Array, "planes words"], shape: LinearShape, width: Int32[Array, ""]
) -> Int32[Array, "stored_rows columns"]:
    """The codes of `width` bits in the runs of bit-planes, the most significant first.

    Runs may be longer than a plane; planes beyond the width may hold anything.
    """
    words = from_atoms(planes, shape.stored_rows, plane_words(shape.columns))
    place = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    codes = jnp.zeros((*words.shape[1:], WORD_BITS), jnp.uint32)
    for plane, of_plane in enumerate(words):
        shift = jnp.maximum(width - 1 - plane, 0).astype(jnp.uint32)
        bit = (of_plane[:, :, None] >> place[None, None, :]) & jnp.uint32(1)
        codes = codes | jnp.where(plane < width, bit << shift, jnp.uint32(0))
    return codes.reshape(shape.stored_rows, -1)[:, : shape.columns].astype(jnp.int32)


def look_up(
    table: Shaped[Array, " entries"],
    codes: Int32[Array, "stored_rows columns"],
    shape: LinearShape,
    width: Int32[Array, ""],
) -> Shaped[Array, "parts rows columns"]:
    """The weights that codes stand for; `table` holds 2^width entries per row or group of rows."""
    row = jnp.arange(shape.stored_rows, dtype=jnp.int32) // shape.rows_per_table
    weights = jnp.take(table, (row << width)[:, None] + codes, mode="clip")
    return weights.reshape(shape.parts, -1, shape.columns)[:, : shape.rows]


def from_atoms(
    runs: UInt32[Array, "*n words"], rows: int, row_words: int
) -> UInt32[Array, "*n rows row_words"]:
    """The matrices of words of some runs, which may be longer than their atoms."""
    shape = (rows // ATOM_ROWS, row_words // ATOM_WORDS, ATOM_ROWS, ATOM_WORDS)
    atoms = runs[..., : rows * row_words].reshape(*runs.shape[:-1], *shape)
    return jnp.swapaxes(atoms, -3, -2).reshape(*runs.shape[:-1], rows, row_words)


def decode_dense(
    run: UInt32[Array, " words"], shape: LinearShape, dtype: str
) -> Shaped[Array, "parts rows columns"]:
    """The matrices of a dense run; `run` may be longer than it."""
    row_words = dense_words(shape.columns, DTYPES[dtype].itemsize)
    words = from_atoms(run, shape.stored_rows, row_words).reshape(shape.parts, -1, row_words)
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

    def put(table: Array, chosen: Array, *at: Array) -> Array:
        first = jnp.where(chosen, at[0], _OUT_OF_RANGE)
        return table.at[(slice(None), first, *at[1:])].set(
            value[None], mode="drop", wrap_negative_indices=False
        )

    of_expert = (kind == LinearKind.GATE_UP) | (kind == LinearKind.DOWN)
    is_width = slot == -1
    return dataclasses.replace(
        state,
        gate_up_pages=put(
            state.gate_up_pages,
            (kind == LinearKind.GATE_UP) & ~is_width,
            layer,
            expert,
            jnp.maximum(slot, 0),
        ),
        down_pages=put(
            state.down_pages,
            (kind == LinearKind.DOWN) & ~is_width,
            layer,
            expert,
            jnp.maximum(slot, 0),
        ),
        widths=put(state.widths, of_expert & is_width, layer, expert, kind),
        linear_pages=put(
            state.linear_pages,
            (kind == LinearKind.OTHER) & ~is_width,
            linear,
            jnp.maximum(slot, 0),
        ),
        linear_widths=put(state.linear_widths, (kind == LinearKind.OTHER) & is_width, linear),
    )
