"""Attention over pages by kernels: decoding at batch x context, and prompts, in bfloat16.

    python benchmarks/bench_attention.py --shape Mixtral-8x7B DeepSeek-V3

One layer's attention of published sizes, with their pages, random keys and values. Each call reads
another layer's pages, so that none are in the cache of the device already. Times are those of the
kernels on the device, without the projections. Bytes are keys and values that some query of a row
sees, read once, queries and results; operations are two products of the pairs that are seen.
Appends a line per case to results/attention.jsonl and prints a table.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_speed import copy_bandwidth
from device_times import kernel_times
from published import names, published_config, published_name
from stamp import record, run_script, stamp

from moejax.arena.format import ceil_div
from moejax.arena.geometry import choose_geometry
from moejax.config import AnyAttention, Mla
from moejax.errors import ConfigError
from moejax.pallas.attention import Plan, attend_paged, make_plan
from moejax.pallas.attention_tiling import H200_SHARED_BYTES, Tiling, choose_tilings, key_shape
from moejax.pallas.dispatch import find_kernels

ARENA_BYTES = 2 << 30
MOST_LAYERS = 16
"""That calls go through in turn: more than there are calls, where the arena has room."""
SHAPES = (
    "Mixtral-8x7B",
    "Qwen1.5-MoE-A2.7B",
    "gpt-oss-20b",
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
)
"""32 heads over 8 KV heads of 128, 16 over 16 of 128, 64 over 8 of 64 with a window of 128 tokens,
and latent attention with 16 and 128 heads."""


class Case(NamedTuple):
    """Rows of the same length."""

    rows: int
    query: int
    """Tokens of each row that attend."""
    cached: int
    """Tokens of each row before them."""
    room: int
    """Tokens that the tables have room for."""

    @property
    def context(self) -> int:
        return self.cached + self.query

    @property
    def tokens(self) -> int:
        return self.rows * self.query

    def describe(self) -> str:
        if self.query == 1:
            return f"decode {self.rows} x {self.context}"
        return f"prompt {self.query} after {self.cached}"


DECODE = tuple(
    Case(rows, 1, context - 1, context)
    for rows, context in ((1, 4096), (1, 32768), (8, 8192), (32, 4096))
)
# With room for the same, so that both are one kernel.
PROMPTS = (Case(1, 2048, 0, 10240), Case(1, 2048, 8192, 10240))


class Layer(NamedTuple):
    """An attention, and how its keys and values are stored."""

    part: AnyAttention
    page_words: int
    block_size: int


class Work(NamedTuple):
    """What a call must do."""

    moved: int
    """Bytes."""
    operations: int


def find_layer(shape: str, number: int) -> Layer:
    """A layer of a published size. Raises ConfigError where there is no such."""
    config = published_config(shape)
    if not 0 <= number < len(config.layers):
        raise ConfigError(f"{shape} has layers 0 to {len(config.layers) - 1}, and no {number}")
    geometry = choose_geometry(config, "bfloat16")
    part = config.layers[number].attention
    return Layer(part, geometry.page_words, geometry.kinds[geometry.kind_of(part)].block_size)


def describe(part: AnyAttention) -> str:
    """Heads, KV heads and their size, or heads and the sizes of latent and rotated part."""
    if isinstance(part, Mla):
        return f"mla {part.num_heads}/{part.latent_size}+{part.rope_size}"
    seen = f" window {part.window}" if part.window else f" chunk {part.chunk}" if part.chunk else ""
    return f"gqa {part.num_heads}/{part.num_kv_heads}/{part.head_size}{seen}"


def first_seen(part: AnyAttention, position: Any) -> Any:
    """The oldest token that those at positions see."""
    return np.maximum(part.reach.oldest(position), 0)


def work_of(part: AnyAttention, case: Case) -> Work:
    """What must be read, written and multiplied."""
    shape = key_shape(part)
    positions = np.arange(case.cached, case.context)
    pairs = int(np.sum(positions + 1 - first_seen(part, positions)))
    kept = case.context - int(first_seen(part, case.cached))
    values = case.rows * kept * part.cached_values
    columns = shape.heads * (shape.size + shape.value_size)
    return Work(2 * (values + case.tokens * columns), 2 * case.rows * pairs * columns)


def make_tables(layer: Layer, case: Case, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """`block_pages` of several layers, their pages in random order, and `block_tables`.

    Blocks that no query sees have no page, as in the server. Raises ValueError where the pages are
    too few for one layer.
    """
    size = layer.block_size
    first = int(first_seen(layer.part, case.cached)) // size
    used = ceil_div(case.context, size) - first
    layers = min(MOST_LAYERS, (num_pages - 1) // (case.rows * used))
    if layers == 0:
        raise ValueError(f"{case.rows * used} blocks of tokens do not fit {num_pages - 1} pages")
    numbers = 1 + np.arange(case.rows * used, dtype=np.int32).reshape(case.rows, used)
    blocks = ceil_div(case.room, size)
    block_tables = np.zeros((case.rows, blocks), np.int32)
    block_tables[:, first : first + used] = numbers
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1)[: layers * numbers.size]
    block_pages = np.zeros((layers, 1 + case.rows * blocks), np.int32)
    block_pages[:, numbers.ravel()] = ids.reshape(layers, -1)
    return block_pages, block_tables


@functools.partial(jax.jit, static_argnames=("case", "tilings"))
def plan_of(case: Case, tilings: tuple[Tiling, Tiling]) -> Plan:
    number = jnp.arange(case.rows, dtype=jnp.int32)
    return make_plan(
        table_rows=number,
        starts=number * case.query,
        lengths=jnp.full_like(number, case.query),
        cached=jnp.full_like(number, case.cached),
        tokens=case.tokens,
        prefill_rows=0 if case.query == 1 else case.rows,
        tilings=tilings,
    )


@functools.partial(jax.jit, static_argnames=("layer",))
def attend(
    q: jax.Array,
    arena: jax.Array,
    block_pages: jax.Array,
    block_tables: jax.Array,
    number: jax.Array,
    sinks: jax.Array | None,
    plan: Plan,
    *,
    layer: Layer,
) -> jax.Array:
    """`arena`: uint32[words], cut into the layer's pages. `number`: the row of `block_pages`."""
    pages = arena.reshape(-1, layer.page_words)
    options: Any = {"plan": plan, "part": layer.part, "block_size": layer.block_size}
    found: jax.Array = attend_paged(q, pages, block_pages, block_tables, number, sinks, **options)
    return found


def tilings_of(
    layer: Layer, case: Case, shared_bytes: int = H200_SHARED_BYTES
) -> tuple[Tiling, Tiling]:
    """As the server chooses them."""
    return choose_tilings(
        layer.part,
        "bfloat16",
        rows=case.rows if case.query == 1 else 0,
        longest=case.room,
        max_query=case.query,
        shared_bytes=shared_bytes,
    )


def make_arguments(layer: Layer, case: Case, num_words: int) -> tuple[Any, ...]:
    """Queries, which repeat random numbers, `block_pages`, `block_tables` and sinks or None."""
    shape = key_shape(layer.part)
    tables = make_tables(layer, case, num_words // layer.page_words)
    some = np.random.default_rng(1).standard_normal(1 << 16).astype(jnp.bfloat16)
    q = jnp.asarray(np.resize(some, (case.tokens, shape.heads, shape.size)))
    has_sinks = not isinstance(layer.part, Mla) and layer.part.sinks
    sinks = jnp.zeros(shape.heads, jnp.bfloat16) if has_sinks else None
    return q, *map(jnp.asarray, tables), sinks


def make_program(
    layer: Layer, case: Case, arena: jax.Array, tilings: tuple[Tiling, Tiling]
) -> Callable[[], jax.Array]:
    """What attends when called, each time in the next layer."""
    q, block_pages, block_tables, sinks = make_arguments(layer, case, arena.size)
    plan = plan_of(case, tilings)
    numbers = itertools.cycle(list(jnp.arange(len(block_pages), dtype=jnp.int32)))

    def program() -> jax.Array:
        arrays = (q, arena, block_pages, block_tables, next(numbers), sinks)
        found: jax.Array = attend(*arrays, plan, layer=layer)
        return found

    return program


def make_arena(num_bytes: int) -> jax.Array:
    """Words whose halves are, as bfloat16, 0.5 to 0.75 or -0.75 to -0.5."""

    def make(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, (num_bytes // 4,), jnp.uint32)
        words: jax.Array = bits & jnp.uint32(0x803F803F) | jnp.uint32(0x3F003F00)
        return words

    arena: jax.Array = jax.jit(make)(jax.random.key(0))
    return arena


def line_of(
    layer: Layer, case: Case, microseconds: float, tiling: Tiling, bandwidth: float
) -> dict[str, Any]:
    """What a line of results says of a case."""
    work = work_of(layer.part, case)
    return {
        "attention": describe(layer.part),
        "case": case.describe(),
        "rows": case.rows,
        "query": case.query,
        "context": case.context,
        "page_bytes": 4 * layer.page_words,
        "block_size": layer.block_size,
        "tiling": dataclasses.asdict(tiling),
        "microseconds": round(microseconds, 1),
        "bytes": work.moved,
        "percent_of_bandwidth": round(100 * work.moved / bandwidth / (1e-6 * microseconds), 1),
        "tflops_per_s": round(work.operations / microseconds / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, help=f"of {', '.join(names())}")
    parser.add_argument("--layer", type=int, default=0, help="of the model (default: 0)")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    args = parser.parse_args()
    try:
        shared_bytes = find_kernels("bfloat16", "triton").shared_bytes
        layers = {published_name(n): find_layer(n, args.layer) for n in args.shape}
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    bandwidth = copy_bandwidth(1 << 31)
    arena = make_arena(ARENA_BYTES)
    table = []
    for (shape, layer), case in itertools.product(layers.items(), DECODE + PROMPTS):
        tilings = tilings_of(layer, case, shared_bytes)
        program = make_program(layer, case, arena, tilings)
        microseconds = sum(kernel_times(program).values())
        tiling = tilings[0 if case.query == 1 else 1]
        found = line_of(layer, case, microseconds, tiling, bandwidth)
        record("attention", {**stamp(args.commit), "shape": shape, **found})
        table.append(
            f"{found['attention']:24} {found['case']:22} {found['microseconds']:9.1f} us"
            f" {found['percent_of_bandwidth']:6.1f} % {found['tflops_per_s']:7.1f} TFLOP/s"
        )
    print(f"percent of the bandwidth of a copy, {bandwidth / 1e12:.2f} TB/s:", *table, sep="\n")


if __name__ == "__main__":
    run_script(main)
