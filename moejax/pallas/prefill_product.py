"""Products of a warpgroup of `prefill_kernel`: weights from shared memory, through registers."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.pallas import prefill_registers as regs
from moejax.pallas.prefill_spec import DENSE, DENSE_ATOMS, Spec

SPLAT = plgpu.Layout.WG_SPLAT(())
WORD = plgpu.Layout.WG_STRIDED((128,), 1)
"""A word of each thread of a warpgroup."""
FACTOR = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, plgpu.Layout.WGMMA)
"""The first factor of wgmma."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The references of a program, and what it works on."""

    refs: dict[str, Any]
    row: jax.Array
    """Of its expert in the table."""
    expert: jax.Array
    first_token: jax.Array
    """Row of its first token among those of all tiles."""
    start: jax.Array
    """Place of its first token."""
    count: jax.Array
    """Tokens that it has."""
    width: jax.Array
    block: jax.Array
    """Of the first block of rows, among all blocks of its part."""


def number_of(width: jax.Array, widths: Sequence[int]) -> jax.Array:
    """The place of a width among these; their number where it is none of them."""
    number = jnp.int32(len(widths))
    for n, one in enumerate(widths):
        number = jnp.where(width == one, jnp.int32(n), number)
    return number


def first_row(spec: Spec, tile: Tile, group: Any) -> tuple[jax.Array, jax.Array]:
    """(the first row of a warpgroup's block in its part, the same in the run).

    In the run, blocks beyond the last repeat it; their rows are not stored.
    """
    block = tile.block + (0 if spec.which == 0 else group)
    stored = jnp.minimum(block, spec.blocks - 1)
    if spec.which == 0:
        stored += group * spec.blocks
    return block * 64, stored * 64


def _merge(
    low: jax.Array, high: jax.Array | None, shift: int, mask: int
) -> tuple[jax.Array, jax.Array]:
    """(what `mask` selects of both, what it leaves of both), `low` in the lower places."""
    selected, left = low & np.uint32(mask), (low >> np.uint32(shift)) & np.uint32(mask)
    if high is None:
        return selected, left
    rest = np.uint32(mask ^ 0xFFFFFFFF)
    return selected | ((high << np.uint32(shift)) & rest), left | (high & rest)


def _nibbles(planes: Sequence[jax.Array]) -> list[jax.Array | None]:
    """Four words of nibbles, word r of columns 4 n + r; None of no planes."""
    if not planes:
        return [None] * 4
    least = [*planes[::-1], None, None, None]
    assert least[0] is not None
    even, odd = _merge(least[0], least[1], 1, 0x55555555)
    even_top = odd_top = None
    if least[2] is not None:
        even_top, odd_top = _merge(least[2], least[3], 1, 0x55555555)
    n0, n2 = _merge(even, even_top, 2, 0x33333333)
    n1, n3 = _merge(odd, odd_top, 2, 0x33333333)
    return [n0, n1, n2, n3]


def codes_of(planes: Sequence[jax.Array]) -> list[jax.Array]:
    """Eight words of four codes from words of planes, the most significant first.

    Word s holds columns s, 8 + s, 16 + s and 24 + s, the first in its low byte: what
    `bit_words.codes_of` gives in Gluon.
    """
    pairs = []
    for low, top in zip(_nibbles(planes[-4:]), _nibbles(planes[:-4]), strict=True):
        assert low is not None
        pairs.append(_merge(low, top, 4, 0x0F0F0F0F))
    return [first for first, _ in pairs] + [second for _, second in pairs]


def _wait_for_weights(spec: Spec, refs: dict[str, Any], width: int, s: jax.Array) -> jax.Array:
    """Waits until the weights of a step are in shared memory; their stage."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def wait(ctx: Any, full: Any, stage: Any, parity: Any) -> None:
        regs.wait_full(full, stage, parity)

    stages = jnp.int32(spec.weight_stages(width))
    stage = lax.rem(s, stages)
    # A barrier is in its first phase, of parity 0, until the first weights of a stage are there.
    wait(refs["full"], stage, lax.rem(lax.div(s, stages), jnp.int32(2)))
    return stage


def planes_product(spec: Spec, tile: Tile, group: jax.Array) -> jax.Array:
    """float32[64, tokens]: the products of a block of rows with the tokens of the tile.

    Widths differ in how codes are made only: one loop for all keeps the registers of wgmma few
    enough to stay ahead of it.
    """
    refs = tile.refs
    ref = plgpu.RefType()
    widths = tuple(w for w in spec.widths if w != DENSE)
    number, line = number_of(tile.width, widths), jnp.int32(0)
    for width in widths:
        line = jnp.where(tile.width == width, jnp.int32(spec.table_line(width)), line)
    _, stored = first_row(spec, tile, group)
    word = plgpu.ShapeDtypeStruct((128,), jnp.uint32, WORD)

    def fill(width: int) -> jax.Array:
        slot = spec.table_slots[spec.widths.index(width)]

        @plgpu.inline_mgpu(arg_types=(ref, ref, ref, (SPLAT,) * 3), return_type=word)
        def run(ctx: Any, pages: Any, table: Any, atoms: Any, scalars: Any) -> Any:
            return regs.fill_table(spec, width, slot, pages, table, atoms, scalars)

        scalars = (tile.row, stored, group)
        return run(refs["pages"], refs["table"], refs["atoms"], scalars)

    def codes(width: int, s: jax.Array) -> list[jax.Array]:
        @plgpu.inline_mgpu(arg_types=(ref, SPLAT), return_type=[word] * (2 * width))
        def load_planes(ctx: Any, atoms: Any, first: Any) -> Any:
            return regs.load_planes(width, atoms, first)

        stage = _wait_for_weights(spec, refs, width, s)
        first = spec.table_atoms(width) + stage * 2 * width + group * width
        planes = load_planes(refs["atoms"], first)
        plgpu.barrier_arrive(refs["empty"].at[stage])
        return codes_of(planes[:width]) + codes_of(planes[width:])

    @plgpu.inline_mgpu(arg_types=([WORD] * 4, [WORD] * 4, WORD, SPLAT), return_type=FACTOR)
    def look_up(ctx: Any, upper: Any, lower: Any, table: Any, line: Any) -> Any:
        return regs.look_up(upper, lower, table, line)

    table = lax.switch(number, [functools.partial(fill, w) for w in widths])

    def factors(s: jax.Array) -> Iterator[jax.Array]:
        words = lax.switch(number, [functools.partial(codes, w) for w in widths], s)
        for n in (0, 4):
            yield look_up(words[n : n + 4], words[8 + n : 12 + n], table, line)

    return _multiply(spec, refs, factors)


def dense_product(spec: Spec, tile: Tile, group: jax.Array) -> jax.Array:
    """As `planes_product`, of rows of bfloat16."""
    refs = tile.refs

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT), return_type=(FACTOR, FACTOR))
    def load_dense(ctx: Any, atoms: Any, first: Any) -> Any:
        return regs.load_dense(atoms, first)

    def factors(s: jax.Array) -> Iterator[jax.Array]:
        stage = _wait_for_weights(spec, refs, DENSE, s)
        both = load_dense(refs["atoms"], (2 * stage + group) * DENSE_ATOMS)
        plgpu.barrier_arrive(refs["empty"].at[stage])
        yield from both

    return _multiply(spec, refs, factors)


def _multiply(spec: Spec, refs: dict[str, Any], factors: Any) -> jax.Array:
    """Multiplies the factors of each step, two of 64 columns, with the tokens of the tile."""

    def scope(acc: Any) -> jax.Array:
        def step(s: jax.Array, _: None) -> None:
            for half, a in enumerate(factors(s)):
                chunk = 2 * s + half
                place = chunk % spec.token_stages
                plgpu.barrier_wait(refs["tokens_full"].at[place])
                plgpu.wgmma(acc, a, refs["tokens"].at[place].T)
                # It reads the registers of its factor as it runs, and ptxas gives them to the next
                # weights before that. The other warpgroup multiplies while this one looks up.
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(refs["tokens_empty"].at[place])

        lax.fori_loop(0, spec.steps, step, None)
        return acc[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((64, spec.tokens), jnp.float32))
