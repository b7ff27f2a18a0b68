"""Calls the kernels of `pages_kernel`, which change pages of the arena in place.

The arena goes in and out as a value. Where it is donated, and nothing else reads the old value,
no copy of it is made, in a scan over layers neither.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.format import POISON_PAGE
from moejax.arena.state import gather_pages, values_to_words, write_pages, write_tokens
from moejax.pallas.bridge import triton_call, with_reference

COPY_BLOCK = 4096
"""Words that a program copies: of 128 threads each has eight loads of 16 bytes in flight."""


def write_kv(
    pages: UInt32[Array, "pages words"],
    k: Float[Array, "tokens kv_heads size"],
    v: Float[Array, "tokens kv_heads size2"] | None,
    block_pages: Int32[Array, "layers kv_blocks"],
    block_tables: Int32[Array, "rows blocks"],
    layer: Int32[Array, ""],
    rows: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
    valid: Bool[Array, " tokens"],
    *,
    block_size: int,
) -> UInt32[Array, "pages words"]:
    """Writes the KV of a step's tokens into one layer's pages, each token to its position.

    `layer`: its row of `block_pages`. `rows`: of the tables, for each token. `v` None: what is
    cached is `k` alone. Left out are invalid tokens, positions outside of the tables, and entries
    that point at no page.
    """
    dtypes = {part.dtype for part in (k, v) if part is not None}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}):
        raise TypeError(f"KV is bfloat16 or float32, not {' and '.join(sorted(map(str, dtypes)))}")
    values = _values(k) + _values(v)
    if values * k.dtype.itemsize % 4:
        raise ValueError(f"the {values} values of a token do not fill whole words")
    if block_size * values * k.dtype.itemsize > 4 * pages.shape[1]:
        raise ValueError(f"{block_size} tokens of {values} values do not fit a page")
    if len(k) == 0:
        return pages
    tokens = (block_pages, block_tables, layer, rows, positions, valid)
    joined = with_reference(
        partial(write_kv_reference, block_size=block_size),
        partial(_write_kv, block_size=block_size),
    )
    found: UInt32[Array, "pages words"] = joined(pages, k, v, *tokens)
    return found


def write_kv_reference(
    pages: UInt32[Array, "pages words"],
    k: Float[Array, "tokens kv_heads size"],
    v: Float[Array, "tokens kv_heads size2"] | None,
    block_pages: Int32[Array, "layers kv_blocks"],
    block_tables: Int32[Array, "rows blocks"],
    layer: Int32[Array, ""],
    rows: Int32[Array, " tokens"],
    positions: Int32[Array, " tokens"],
    valid: Bool[Array, " tokens"],
    *,
    block_size: int,
) -> UInt32[Array, "pages words"]:
    """The same in plain jax.numpy, by `write_tokens`."""
    block = _look_up(block_tables, rows, positions // block_size)
    page_ids = _look_up(block_pages, jnp.full_like(block, layer), block)
    parts = [part.reshape(len(part), -1) for part in (k, v) if part is not None]
    words = values_to_words(jnp.concatenate(parts, axis=1))
    return write_tokens(pages, page_ids, positions % block_size, words, valid)


def commit_pages(
    pages: UInt32[Array, "pages words"],
    targets: Int32[Array, " n"],
    staged: UInt32[Array, "n words"],
) -> UInt32[Array, "pages words"]:
    """Copies staged pages, on the device or on the host, to the pages with these ids.

    No id may come twice. Page 0 and ids out of range are left out.
    """
    if len(staged) == 0:
        return pages
    found: UInt32[Array, "pages words"] = with_reference(_commit_reference, _commit)(
        pages, targets, staged
    )
    return found


def move_pages(
    pages: UInt32[Array, "pages words"],
    sources: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    host: UInt32[Array, "host_pages words"] | None = None,
) -> UInt32[Array, "pages words"]:
    """Copies pages with signed ids, of the arena or of the host's pool, to pages of the arena.

    Targets differ from each other and from all sources. Where either id is 0 or out of range, the
    copy is left out.
    """
    if len(sources) == 0:
        return pages
    found: UInt32[Array, "pages words"] = with_reference(_move_reference, _move)(
        pages, sources, targets, host
    )
    return found


def _write_kv(pages, k, v, block_pages, block_tables, layer, rows, positions, valid, *, block_size):
    from moejax.pallas.pages_kernel import write_kv_kernel

    k_values, v_values = _values(k), _values(v)
    ref = jax.new_ref(pages)
    triton_call(
        ref,
        k,
        k if v is None else v,
        block_pages,
        block_tables,
        layer[None],
        rows,
        positions,
        valid,
        kernel=write_kv_kernel,
        out_type=(),
        grid=len(k),
        num_warps=4,
        PAGES=pages.shape[0],
        PAGE_VALUES=pages.shape[1] * 4 // k.dtype.itemsize,
        KV_BLOCKS=block_pages.shape[1],
        ROWS=block_tables.shape[0],
        BLOCKS=block_tables.shape[1],
        BLOCK_SIZE=block_size,
        K_VALUES=k_values,
        V_VALUES=v_values,
        K_BLOCK=_power_of_two(k_values),
        V_BLOCK=_power_of_two(max(v_values, 1)),
    )
    return jax.freeze(ref)


def _commit_reference(pages, targets, staged):
    return write_pages(pages, targets, jax.device_put(staged, jax.memory.Space.Device))


def _commit(pages, targets, staged):
    return _copy(pages, staged, targets, targets, staged=True)


def _move_reference(pages, sources, targets, host):
    if host is not None:
        host = jax.device_put(host, jax.memory.Space.Device)
    host_pages = 0 if host is None else host.shape[0]
    exists = (sources < pages.shape[0]) & (sources >= -host_pages) & (sources != POISON_PAGE)
    targets = jnp.where(exists, targets, POISON_PAGE)
    return write_pages(pages, targets, gather_pages(pages, sources, host))


def _move(pages, sources, targets, host):
    return _copy(pages, host, sources, targets, staged=False)


def _copy(pages, other, sources, targets, *, staged):
    from moejax.pallas.pages_kernel import copy_pages_kernel

    words = pages.shape[1]
    block = min(COPY_BLOCK, _power_of_two(words))
    ref = jax.new_ref(pages)
    triton_call(
        ref,
        targets if other is None else other,
        sources,
        targets,
        kernel=copy_pages_kernel,
        out_type=(),
        grid=len(targets) * -(-words // block),
        num_warps=4,
        PAGES=pages.shape[0],
        OTHER_PAGES=0 if other is None else other.shape[0],
        STAGED=staged,
        WORDS=words,
        BLOCK=block,
    )
    return jax.freeze(ref)


def _look_up(
    table: Int32[Array, "*shape"], *at: Int32[Array, " tokens"]
) -> Int32[Array, " tokens"]:
    """Entries of a table; those outside of it read as those that point at nothing."""
    return table.at[at].get(mode="fill", fill_value=POISON_PAGE, wrap_negative_indices=False)


def _values(part: Float[Array, "tokens kv_heads size"] | None) -> int:
    """Values of a token."""
    return 0 if part is None else part.shape[1] * part.shape[2]


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
