"""How attention over pages is cut into programs: shapes of keys and sizes of tiles.

Plain arithmetic: no array is touched.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from moejax.config import AnyAttention, Mla

H200_SHARED_BYTES = 232448
"""Shared memory that one program may have; 166912 on an A100, 101376 on other Amperes."""
H200_CORES = 132
STAGE_BYTES = 36864
"""Of keys and values of a tile: with the next one under way, three programs fit a core."""
LEAST_SHARE = 64
"""Keys that are not worth a further program while others have none."""
BUSY_SHARE = 4096
"""The same, where rows and heads alone occupy the device."""
LONGEST_SHARE = 16384
"""Keys of a program at most, if splits are enough."""
MAX_SPLITS = 64
MAX_COLUMNS = 576
"""Of a key, with padding: 512 and 64."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """What kernels must know of an attention's keys and values."""

    heads: int
    kv_heads: int
    main: int
    """Columns of a key that are multiplied first; the `rest` may be none."""
    rest: int
    shared: bool
    """The main columns of a key are its value."""

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        return self.main + self.rest

    @property
    def value_size(self) -> int:
        return self.main if self.shared else self.size

    @property
    def key_columns(self) -> int:
        """With padding."""
        return pad_columns(self.main) + pad_columns(self.rest)

    @property
    def value_columns(self) -> int:
        return pad_columns(self.main) if self.shared else self.key_columns

    @property
    def stored_columns(self) -> int:
        """Columns that a program reads of each key."""
        return self.key_columns if self.shared else 2 * self.key_columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How attention is cut. The best depends on shape and device."""

    heads: int
    """That share a KV head, of a program."""
    queries: int
    """Neighbouring ones of a row, of a program."""
    keys: int
    """Of a tile: a power of two from 16 on."""
    warps: int
    stages: int = 3
    splits: int = 1
    """Programs that the keys of a query are shared out to, at most."""
    least_share: int = LEAST_SHARE
    """Keys of such a program, at least."""

    @property
    def rows(self) -> int:
        """Of the products: heads times queries, padded."""
        return pad_columns(self.heads * self.queries)

    def shared_bytes(self, shape: KeyShape, itemsize: int) -> int:
        """Shared memory of a program with three stages: tiles of keys, queries and weights."""
        # Warp-group products read queries and tiles while others arrive.
        tiles = 3 if self.rows >= 64 and itemsize == 2 else 2
        values = tiles * self.keys * shape.stored_columns
        return (values + self.rows * (shape.key_columns + self.keys)) * itemsize


def key_shape(part: AnyAttention) -> KeyShape:
    """Raises NotImplementedError for heads that are too large."""
    if isinstance(part, Mla):
        kv_heads, main, rest = 1, part.latent_size, part.rope_size
    else:
        kv_heads = part.num_kv_heads
        main, rest = cut_columns(part.head_size)
    shape = KeyShape(
        heads=part.num_heads,
        kv_heads=kv_heads,
        main=main,
        rest=rest,
        shared=isinstance(part, Mla),
    )
    if pad_columns(main) > 512 or shape.key_columns > MAX_COLUMNS:
        raise NotImplementedError(f"attention kernels have no keys of {shape.size} values")
    return shape


def pad_columns(size: int) -> int:
    """The power of two that holds so many, 16 at least; 0 of none."""
    return max(16, 1 << (size - 1).bit_length()) if size else 0


def cut_columns(size: int) -> tuple[int, int]:
    """A size as two parts, of which the second may be none: what takes fewest padded columns."""
    padded = pad_columns(size)
    main = padded // 2
    if main >= 16 and main < size and main + pad_columns(size - main) < padded:
        return main, size - main
    return size, 0


def choose_tilings(
    part: AnyAttention,
    dtype: Any,
    *,
    rows: int,
    longest: int,
    max_query: int,
    shared_bytes: int = H200_SHARED_BYTES,
    cores: int = H200_CORES,
) -> tuple[Tiling, Tiling]:
    """For rows of one query and for others. `longest`: tokens of the longest row.

    Not measured: chosen so that tiles fit shared memory and registers.
    """
    shape, itemsize = key_shape(part), itemsize_of(dtype)
    keys = max(16, 1 << (STAGE_BYTES // (shape.stored_columns * itemsize)).bit_length() - 1)

    # Heads that share keys are computed together: the fewer tiles of them, the fewer reads.
    most = 16 if shape.group <= 16 or itemsize == 4 else 64
    decode = _fit(shape, itemsize, shared_bytes, most, 1, min(keys, 128))
    programs = rows * shape.kv_heads * -(-shape.group // decode.heads)
    resident = max(1, shared_bytes // (decode.shared_bytes(shape, itemsize) + 1024))
    seen = min(longest, part.reach.window or part.reach.chunk or longest)
    free = max(1, cores * resident // max(programs, 1))
    least = LEAST_SHARE if free > 1 else BUSY_SHARE
    splits = min(max(free, -(-seen // LONGEST_SHARE)), -(-seen // least), MAX_SPLITS)
    decode = dataclasses.replace(decode, splits=max(splits, 1), least_share=least)

    most_rows = 16 if itemsize == 4 else 128 if shape.value_columns <= 128 else 64
    heads = -(-shape.group // -(-shape.group // 16))
    queries = max(1, min(most_rows // heads, max_query))
    ragged = _fit(shape, itemsize, shared_bytes, 16, queries, min(keys, 64))
    return decode, ragged


def _fit(
    shape: KeyShape, itemsize: int, shared_bytes: int, most_heads: int, queries: int, keys: int
) -> Tiling:
    """The largest tiling up to these sizes that fits shared memory."""
    while True:
        tiles = -(-shape.group // most_heads)
        heads = -(-shape.group // tiles)
        large = pad_columns(heads * queries) * shape.value_columns > 64 * 128
        found = Tiling(heads=heads, queries=queries, keys=keys, warps=8 if large else 4)
        if found.shared_bytes(shape, itemsize) + 1024 <= shared_bytes:
            return found
        if keys > 16:
            keys //= 2
        elif queries > 1:
            queries = -(-queries // 2)
        elif heads > 16:
            most_heads //= 2
        else:
            raise NotImplementedError(
                f"keys of {shape.size} values do not fit {shared_bytes} bytes of shared memory"
            )


def itemsize_of(dtype: Any) -> int:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"attention kernels compute in bfloat16 or float32, not {dtype}")
    return jnp.dtype(dtype).itemsize
