"""Products with experts at each width, against the same product in bfloat16 by XLA.

    python benchmarks/bench_kernels.py --shape Qwen1.5-MoE-A2.7B Mixtral-8x7B --tokens 1 8 64

All experts of one layer, each with so many tokens; random planes, tables and tokens. With few
tokens the kernel for few multiplies, from `--many` on that for many too. Times are those of the
kernels on the device. The bound is what must be read and written over the bandwidth of a copy, or
the operations over the rate of a large product, whichever is more; `error` is relative to float64.
Appends lines to results/kernels.jsonl. `--tune` tries tilings first, at 4 bits, and keeps the best
in moejax/pallas/tuned for this kind of device.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_speed import copy_bandwidth
from device_times import kernel_times
from published import names, published_config
from stamp import record, run_script, stamp

from moejax.arena.experts import Paged
from moejax.arena.format import POISON_WORD, ceil_div
from moejax.arena.geometry import Runs, choose_geometry
from moejax.arena.state import read_linear
from moejax.config import DENSE_WIDTH, Activation, Quantization
from moejax.errors import ConfigError
from moejax.layers.mlp import activate
from moejax.pallas.dispatch import find_kernels
from moejax.pallas.prefill import TILE_TOKENS, permuted_columns, product_prefill
from moejax.pallas.product import Tiling, product, to_fragments
from moejax.pallas.tuning import TUNED, choose_tiling, tuned_tilings, tuning_key

TILINGS = ((1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4))
"""Warps with rows of their own, and warps that share rows."""
LARGEST_TILE = 32
MOST_BITS = 6
"""Widths above it are stored in a layer of their own: their tables take more shared memory."""


class Layer(NamedTuple):
    """The experts of a layer, at all widths, in pages that hold random bits."""

    pages: jax.Array
    tables: tuple[jax.Array, jax.Array]
    runs: tuple[Runs, Runs]
    activation: Activation

    @property
    def num_experts(self) -> int:
        return len(self.tables[0])


class Tokens(NamedTuple):
    """So many tokens for each expert, cut into tiles."""

    x: jax.Array
    """bfloat16[places, columns]"""
    tiles: jax.Array
    rows: jax.Array
    """int32[tiles, size]: the places of a tile, where it has so many tokens"""


class Run(NamedTuple):
    """A product that is timed."""

    which: int
    bits: int
    tokens: int
    """Of each expert."""
    experts: int
    """Those that have any."""
    tiling: Tiling | int
    """Of the kernel for few tokens, or tokens of a tile of that for many."""

    @property
    def size(self) -> int:
        return self.tiling if isinstance(self.tiling, int) else self.tiling.tokens

    def describe(self) -> dict[str, Any]:
        if isinstance(self.tiling, int):
            return {"kernel": "mosaic", "tiling": [self.tiling]}
        tiling = [self.tiling.tokens, self.tiling.row_warps, self.tiling.k_warps]
        return {"kernel": "gluon", "tiling": tiling}


def make_layer(shape: str, most_bits: int) -> Layer:
    """One layer of a published size, stored at 3 bits to `most_bits` and at width 16."""
    config = published_config(shape)
    quantization = Quantization(seed_bits=3, parent_bits=most_bits, has_dense=True)
    geometry = choose_geometry(config, "bfloat16", quantization)
    runs = geometry.expert_runs
    count = config.moe.router.num_experts
    slots = [of.num_slots for of in runs]
    num_pages = 1 + count * sum(slots)
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
    split = count * slots[0]
    gate_up, down = ids[:split].reshape(count, -1), ids[split:].reshape(count, -1)
    # As float16 and as bfloat16 these are finite and of moderate size.
    shape_of_pages = (num_pages, geometry.page_words)
    make = jax.jit(
        lambda key: jax.random.bits(key, shape_of_pages, jnp.uint32) & jnp.uint32(0xBBFFBBFF)
    )
    pages = make(jax.random.key(0)).at[0].set(jnp.uint32(POISON_WORD))
    return Layer(pages, (jnp.asarray(gate_up), jnp.asarray(down)), runs, config.moe.activation)


def make_tokens(columns: int, run: Run) -> Tokens:
    """Tiles of the run's size; the last of an expert may hold less."""
    size, tokens = run.size, run.tokens
    each = ceil_div(tokens, size)
    number = np.arange(run.experts * each, dtype=np.int32)
    count = np.minimum(size, tokens - number % each * size).astype(np.int32)
    expert = number // each
    start = expert * tokens + number % each * size
    x = jax.random.normal(jax.random.key(1), (run.experts * tokens, columns), jnp.bfloat16)
    tiles = np.zeros((len(number), 8), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3:5] = expert, start, count, run.bits
    tiles[:, 5] = expert
    rows = np.minimum(start[:, None] + np.arange(size, dtype=np.int32), len(x) - 1)
    return Tokens(x, jnp.asarray(tiles), jnp.asarray(rows))


def make_program(layer: Layer, run: Run) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One launch of a product, and what it is called with."""
    which, places = run.which, run.experts * run.tokens
    tokens = make_tokens(layer.runs[which].shape.columns, run)
    widths = jnp.full((layer.num_experts, 2), run.bits, jnp.int32)
    if isinstance(run.tiling, int):
        x = jax.jit(permuted_columns)(tokens.x[tokens.rows.reshape(-1)])
    else:
        x = jax.jit(to_fragments)(tokens.x)

    def program(x: jax.Array, tiles: jax.Array, pages: jax.Array, tables: Any, widths: Any) -> Any:
        paged = Paged(pages, None, *tables, widths, *layer.runs)
        options = (layer.activation, None, places)
        if isinstance(run.tiling, int):
            return product_prefill(x, tiles, paged, which, run.tiling, *options)
        return product(x, tiles, paged, which, run.tiling, *options)

    return jax.jit(program), (x, tokens.tiles, layer.pages, layer.tables, widths)


def dense_microseconds(experts: int, rows: int, columns: int, tokens: int) -> float:
    """The same product in bfloat16 by XLA."""
    w = jax.random.normal(jax.random.key(0), (experts, rows, columns), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (experts, max(tokens, 2), columns), jnp.bfloat16)
    program = jax.jit(lambda w, x: jnp.einsum("enk,emk->enm", w, x))
    return sum(kernel_times(program, w, x).values())


def product_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    n = 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    program = jax.jit(lambda a, b: a @ b)
    return 2 * n**3 / (1e-6 * sum(kernel_times(program, a, a).values()))


def error_of(layer: Layer, run: Run, found: jax.Array) -> float:
    """The relative error of the first tile, against float64."""
    runs, which = layer.runs[run.which], run.which
    read = jax.jit(lambda p, t: read_linear(p, None, t, jnp.int32(run.bits), runs))
    weights = np.asarray(read(layer.pages, layer.tables[which][0]).astype(jnp.float32))
    tokens = make_tokens(runs.shape.columns, run)
    count = min(run.size, run.tokens)
    x = np.asarray(tokens.x[:count].astype(jnp.float32), np.float64)
    y = [x @ part.astype(np.float64).T for part in weights]
    if which == 1:
        wanted, got = y[0], np.asarray(found[:count].astype(jnp.float32), np.float64)
    else:
        wide = [jnp.asarray(part, jnp.float32) for part in y]
        in_order = permuted_columns if isinstance(run.tiling, int) else to_fragments
        gated = activate(wide[0], wide[1], layer.activation)
        # What fills up the last columns is not written.
        written = np.asarray(in_order(jnp.ones_like(gated))) > 0
        wanted = np.asarray(in_order(gated))[written]
        got = np.asarray(found[:count].astype(jnp.float32))[written]
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def time_of(layer: Layer, run: Run) -> tuple[float, float]:
    """(microseconds, error) of a product."""
    program, arguments = make_program(layer, run)
    times = kernel_times(program, *arguments)
    return sum(times.values()), error_of(layer, run, program(*arguments))


def tile_size(tokens: int) -> int:
    return min(LARGEST_TILE, max(8, 1 << (tokens - 1).bit_length()))


def tune(layer: Layer, which: int, tokens: int, experts: int) -> None:
    """Tries tilings, and writes the best for this kind of device."""
    kind, size = jax.devices()[0].device_kind, tile_size(tokens)
    key = tuning_key(which, layer.runs[which], size, experts)
    found = {}
    for row_warps, k_warps in TILINGS:
        tiling = Tiling(tokens=size, row_warps=row_warps, k_warps=k_warps)
        program, arguments = make_program(layer, Run(which, 4, tokens, experts, tiling))
        try:
            found[tiling] = sum(kernel_times(program, *arguments).values())
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"  {key}: {row_warps} x {k_warps} warps: {str(error)[:80]}")
            continue
        print(f"  {key}: {row_warps} x {k_warps} warps {found[tiling]:.1f} us", flush=True)
    best = min(found, key=found.__getitem__)
    TUNED.mkdir(exist_ok=True)
    path = TUNED / f"{kind.replace(' ', '_')}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known[key] = [best.tokens, best.row_warps, best.k_warps]
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
    tuned_tilings.cache_clear()


def runs_of(layer: Layer, which: int, bits: int, tokens: int, many: int) -> Iterator[Run]:
    """What multiplies so many tokens of each expert."""
    experts, kind = layer.num_experts, jax.devices()[0].device_kind
    if tokens <= max(many, LARGEST_TILE):
        size = tile_size(tokens)
        tiling = choose_tiling(which, layer.runs[which], size, experts, experts * tokens, kind)
        yield Run(which, bits, tokens, experts, tiling)
    if tokens >= many:
        size = min(n for n in TILE_TOKENS if n >= min(tokens, max(TILE_TOKENS)))
        yield Run(which, bits, tokens, experts, size)


def line_of(
    layer: Layer, run: Run, dense: Callable[..., float], bandwidth: float, rate: float
) -> dict[str, Any]:
    """What a line of results says of a run. `dense`: as `dense_microseconds`."""
    of, experts, tokens = layer.runs[run.which].shape, run.experts, run.tokens
    rows = of.parts * of.rows
    baseline = dense(experts, rows, of.columns, tokens)
    microseconds, error = time_of(layer, run)
    weights = experts * rows * of.columns
    table = 0 if run.bits == DENSE_WIDTH else of.table_bytes(run.bits) * experts
    moved = weights * run.bits / 8 + table + 2 * experts * tokens * (rows + of.columns)
    bound = 1e6 * max(moved / bandwidth, 2 * weights * tokens / rate)
    return {
        "experts": experts,
        "bits": run.bits,
        "tokens_per_expert": tokens,
        **run.describe(),
        "microseconds": round(microseconds, 1),
        "bf16_microseconds": round(baseline, 1),
        "x_bf16": round(baseline / microseconds, 2),
        "percent_of_bound": round(100 * bound / microseconds, 1),
        "error": float(f"{error:.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["Qwen1.5-MoE-A2.7B", "Mixtral-8x7B", "Qwen3-30B-A3B", "Gemma-4-26B-A4B"],
        help=f"of {', '.join(names())}",
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4, 5, 6, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256])
    parser.add_argument(
        "--many", type=int, default=32, help="tokens from which Mosaic multiplies (default: 32)"
    )
    parser.add_argument("--tune", action="store_true", help="try tilings, at 4 bits, first")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    args = parser.parse_args()
    try:
        find_kernels("bfloat16", "gluon")
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    bandwidth, rate = copy_bandwidth(1 << 31), product_rate()
    dense = functools.cache(dense_microseconds)
    for shape, above in itertools.product(args.shape, (False, True)):
        of_layer = [b for b in args.bits if (MOST_BITS < b < DENSE_WIDTH) == above]
        if not of_layer:
            continue
        layer = make_layer(shape, max(of_layer) if above else MOST_BITS)
        experts = layer.num_experts
        for which, tokens in itertools.product((0, 1), args.tokens):
            if args.tune and not above and tokens <= LARGEST_TILE:
                k = published_config(shape).moe.router.experts_per_token
                # At one token also a batch of one, and one of four.
                for count in (k, min(4 * k, experts), experts) if tokens == 1 else (experts,):
                    tune(layer, which, tokens, count)
            for bits in of_layer:
                for run in runs_of(layer, which, bits, tokens, args.many):
                    record(
                        "kernels",
                        {
                            **stamp(args.commit),
                            "shape": f"{shape} {('gate_up', 'down')[which]}",
                            **line_of(layer, run, dense, bandwidth, rate),
                        },
                    )
        del layer


if __name__ == "__main__":
    run_script(main)
