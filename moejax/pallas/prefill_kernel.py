"""The product of tokens with experts that lie in pages, in Mosaic GPU, for many tokens per expert.

A program multiplies two blocks of 64 rows of one linear (of gate and of up the same rows) with a
tile of up to 256 tokens that chose its expert. It has three warpgroups: two multiply, each a block;
the third brings tokens and weights to shared memory, stages ahead. Width and pages are data. A
multiplying thread turns words of bit-planes into codes in its registers, codes into bfloat16 by
tables in shared memory, and these are the first factor of wgmma without leaving the registers.
While it does so the other warpgroup multiplies. `prefill.permuted_columns` says in which order it
meets the columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.pallas import prefill_registers as regs
from moejax.pallas.prefill_product import (
    SPLAT,
    Tile,
    dense_product,
    first_row,
    number_of,
    planes_product,
)
from moejax.pallas.prefill_spec import (
    ATOM_WORDS,
    DENSE,
    DENSE_ATOMS,
    MAX_WEIGHT_STAGES,
    WEIGHT_ATOMS,
    Spec,
)
from moejax.pallas.prefill_store import store_down, store_gated

COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24


def make_kernel(spec: Spec, tiles: int, out_type: jax.ShapeDtypeStruct) -> Any:
    """The kernel as a function of arrays: see `_body`."""
    # Abstract to mypy only.
    tiling = (
        plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(128),  # type: ignore[abstract]
    )
    scratch: dict[str, Any] = {
        "tokens": plgpu.SMEM((spec.token_stages, spec.tokens, 64), jnp.bfloat16, transforms=tiling),
        "atoms": plgpu.SMEM((WEIGHT_ATOMS, ATOM_WORDS), jnp.uint32),
        "full": plgpu.SMEM((2 * MAX_WEIGHT_STAGES,), jnp.uint32),
        "tokens_full": plgpu.Barrier(num_barriers=spec.token_stages),
        "tokens_empty": plgpu.Barrier(num_arrivals=2, num_barriers=spec.token_stages),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=MAX_WEIGHT_STAGES),
    }
    return plgpu.kernel(
        functools.partial(_body, spec),
        out_type=out_type,
        grid=(tiles, spec.programs),
        grid_names=("tile", "program"),
        num_threads=3,
        thread_name="group",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=512,
        ),
    )


def _body(spec: Spec, *refs: Any, **scratch: Any) -> None:
    """Arguments in this order, and the output.

    pages uint32[pages, words]; table int32[rows, slots]; tiles int32[tiles, 8]: row of the
    table, first place, number of tokens (0: there is no tile), widths of gate_up and down, expert,
    as in `Grouping`;
    x bfloat16[tiles * tokens, 128 * steps], rows by tiles, columns permuted;
    where `has_bias`, bias bfloat16[experts, 2, rows] or [experts, rows].
    Output: bfloat16[tiles * tokens, out_columns] of gate_up, as x; [places, rows] of down.
    """
    names = ("pages", "table", "tiles", "x", *(("bias",) if spec.has_bias else ()), "out")
    every = dict(zip(names, refs, strict=True)) | scratch
    number, tiles = lax.axis_index("tile"), every["tiles"]
    count = tiles[number, 2]

    @pl.when(count > 0)
    def _() -> None:
        tile = Tile(
            refs=every,
            row=tiles[number, 0],
            expert=tiles[number, 5],
            first_token=number * spec.tokens,
            start=tiles[number, 1],
            count=count,
            width=tiles[number, 3 + spec.which],
            block=lax.axis_index("program") * (1 + spec.which),
        )
        group = lax.axis_index("group")

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def start(ctx: Any, full: Any) -> None:
            regs.start_barriers(MAX_WEIGHT_STAGES, full)

        start(every["full"])

        @pl.when(group == 2)
        def copy() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            _copy(spec, tile)

        @pl.when(group < 2)
        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _compute(spec, tile, group)


def _copy(spec: Spec, tile: Tile) -> None:
    """Brings weights and tokens to shared memory, step by step, as places become free."""
    refs, ref = tile.refs, plgpu.RefType()

    def by_width(value: Callable[[int], int]) -> jax.Array:
        found = jnp.int32(0)
        for width in spec.widths:
            found = jnp.where(tile.width == width, jnp.int32(value(width)), found)
        return found

    is_dense = tile.width == DENSE
    copies, stages = by_width(spec.copies), by_width(spec.weight_stages)
    first = by_width(spec.table_atoms)
    per_row = by_width(spec.row_atoms)
    bands = [first_row(spec, tile, jnp.int32(group))[1] // 64 * per_row for group in range(2)]

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, ref, (SPLAT,) * 9))
    def bring(ctx: Any, pages: Any, table: Any, atoms: Any, full: Any, scalars: Any) -> None:
        regs.bring_atoms(spec, pages, table, atoms, full, scalars)

    def step(s: jax.Array, stage: jax.Array) -> jax.Array:
        @pl.when(s >= stages)
        def wait_for_weights() -> None:
            plgpu.barrier_wait(refs["empty"].at[stage])

        # In a row of atoms a plane has one for each step, and values have DENSE_ATOMS.
        at = jnp.where(is_dense, s * DENSE_ATOMS, s)
        scalars = (tile.row, copies, *bands, at, per_row - 1, is_dense.astype(jnp.int32))
        into = first + stage * copies
        arrays = (refs["pages"], refs["table"], refs["atoms"], refs["full"])
        bring(*arrays, (*scalars, into, stage))
        for half in range(2):
            chunk = 2 * s + half
            place = chunk % spec.token_stages

            @pl.when(chunk >= spec.token_stages)
            def wait_for_tokens(place: jax.Array = place) -> None:
                plgpu.barrier_wait(refs["tokens_empty"].at[place])

            plgpu.copy_gmem_to_smem(
                refs["x"].at[pl.ds(tile.first_token, spec.tokens), pl.ds(chunk * 64, 64)],
                refs["tokens"].at[place],
                refs["tokens_full"].at[place],
            )
        return jnp.where(stage + 1 == stages, 0, stage + 1)

    # Of a width that is not stored nothing is multiplied.
    lax.fori_loop(0, jnp.where(copies > 0, spec.steps, 0), step, jnp.int32(0))


def _compute(spec: Spec, tile: Tile, group: jax.Array) -> None:
    refs = tile.refs
    shape = (64, spec.tokens)

    def nothing() -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, jnp.nan, jnp.float32), plgpu.Layout.WGMMA)

    coded = tuple(w for w in spec.widths if w != DENSE)
    kinds = []
    if coded:
        kinds.append((number_of(tile.width, coded) < len(coded), planes_product))
    if DENSE in spec.widths:
        kinds.append((tile.width == DENSE, dense_product))
    # A width that is not stored: there is no instance, and its weights read as NaN.
    kind = jnp.int32(len(kinds))
    for n, (is_kind, _) in enumerate(kinds):
        kind = jnp.where(is_kind, jnp.int32(n), kind)
    branches = [functools.partial(product, spec, tile, group) for _, product in kinds]
    acc = lax.switch(kind, [*branches, nothing])
    row, _ = first_row(spec, tile, group)
    first = tile.first_token if spec.which == 0 else tile.start
    scalars = (tile.expert, first, tile.count, row)
    ref = plgpu.RefType()
    bias = (refs["bias"],) if spec.has_bias else ()

    if spec.which == 1:

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, (ref,) * len(bias), ref, (SPLAT,) * 4))
        def run(ctx: Any, acc: Any, bias: Any, out: Any, scalars: Any) -> None:
            store_down(spec, acc, bias, out, scalars)

        run(acc, bias, refs["out"], scalars)
        return
    for mine in range(2):

        @pl.when(group == mine)
        def _(mine: int = mine) -> None:
            @plgpu.inline_mgpu(
                arg_types=(plgpu.Layout.WGMMA, (ref,) * len(bias), ref, ref, (SPLAT,) * 4)
            )
            def run(ctx: Any, acc: Any, bias: Any, out: Any, atoms: Any, scalars: Any) -> None:
                store_gated(spec, mine, acc, bias, out, atoms, scalars)

            run(acc, bias, refs["out"], refs["atoms"], scalars)
