"""Products with experts at each width, against the same product in bfloat16 by XLA.

    python benchmarks/bench_kernels.py --shape Qwen1.5-MoE-A2.7B Mixtral-8x7B --tokens 1 8 64

All experts of one layer, each with so many tokens; random planes, tables and tokens. Times are
those of the kernels on the device. The bound is what must be read and written over the bandwidth of
a copy, or the operations over the rate of a large product, whichever is more; `error` is relative
to float64. Appends lines to results/kernels.jsonl. `--tune` tries tilings first and keeps the best
in moejax/pallas/tuned for this kind of device.
"""

import argparse
import functools
import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_speed import copy_bandwidth
from device_times import kernel_times
from published import names, published_config
from stamp import record, stamp

from moejax.arena.experts import Paged
from moejax.arena.format import POISON_WORD, ceil_div
from moejax.arena.geometry import Runs, choose_geometry
from moejax.arena.state import read_linear
from moejax.config import Quantization
from moejax.layers.mlp import activate
from moejax.pallas.product import Tiling, product, to_fragments
from moejax.pallas.tuning import TUNED, choose_tiling, tuned_tilings, tuning_key

TILINGS = tuple(
    (rows, k) for rows, k in itertools.product((2, 4), (1, 2, 4)) if rows * k in (2, 4, 8, 16)
)
LARGEST_TILE = 32


class Layer(NamedTuple):
    """The experts of a layer in pages that hold random bits."""

    paged: Paged
    activation: Any

    @property
    def runs(self) -> tuple[Runs, Runs]:
        return self.paged.gate_up, self.paged.down


def make_layer(shape: str, bits: int, experts: int | None) -> Layer:
    """One layer of a published size, at one width."""
    config = published_config(shape)
    # Width 16 is stored with all: it is timed too.
    stored = min(max(bits, 4), 8) if bits < 16 else 6
    quantization = Quantization(seed_bits=3, parent_bits=stored, has_dense=bits == 16)
    geometry = choose_geometry(config, "bfloat16", quantization)
    runs = geometry.expert_runs
    count = experts or config.moe.router.num_experts
    slots = [of.num_slots for of in runs]
    num_pages = 1 + count * sum(slots)
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
    split = count * slots[0]
    tables = [ids[:split].reshape(count, -1), ids[split:].reshape(count, -1)]
    # As float16 and as bfloat16 these are finite and of moderate size.
    bits_of = functools.partial(jax.random.bits, shape=(num_pages, geometry.page_words))
    pages = jax.jit(lambda key: bits_of(key, dtype=jnp.uint32))(jax.random.key(0))
    finite = jax.jit(lambda p, at: p.at[at].set(p[at] & 0xBBFFBBFF), donate_argnums=0)
    if bits == 16:
        read = np.concatenate([t.reshape(-1) for t in tables])
    else:
        first = [of.table_slot(quantization.seed_bits) for of in runs]
        read = np.concatenate([t[:, at:].reshape(-1) for t, at in zip(tables, first, strict=True)])
    pages = finite(pages, jnp.asarray(read)).at[0].set(jnp.uint32(POISON_WORD))
    widths = jnp.full((count, 2), bits, jnp.int32)
    return Layer(
        Paged(pages, None, *map(jnp.asarray, tables), widths, *runs), config.moe.activation
    )


class Tokens(NamedTuple):
    """So many tokens for each expert, cut into tiles."""

    x: jax.Array
    tiles: jax.Array


def make_tokens(columns: int, experts: int, tokens: int, size: int, bits: int) -> Tokens:
    """Tiles of `size` places; the last of an expert may hold less."""
    each = ceil_div(tokens, size)
    number = np.arange(experts * each, dtype=np.int32)
    count = np.minimum(size, tokens - number % each * size).astype(np.int32)
    start = number // each * tokens + number % each * size
    x = jax.random.normal(jax.random.key(1), (len(number), size, columns), jnp.bfloat16)
    tiles = np.zeros((len(number), 8), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3:5] = number // each, start, count, bits
    return Tokens(x, jnp.asarray(tiles))


def make_program(layer: Layer, which: int, tiling: Tiling, places: int) -> Any:
    """One launch of a product, as a program of fragments, tiles and the arrays of the pages."""

    @jax.jit
    def program(x: jax.Array, tiles: jax.Array, pages: jax.Array, tables: Any, widths: Any) -> Any:
        paged = Paged(pages, None, *tables, widths, *layer.runs)
        return product(x, tiles, paged, which, tiling, layer.activation, None, places)

    paged = layer.paged
    tables = (paged.gate_up_pages, paged.down_pages)
    return lambda x, tiles: program(x, tiles, paged.pages, tables, paged.widths)


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


def error_of(layer: Layer, which: int, tokens: Tokens, found: jax.Array) -> float:
    """The relative error of the first tile, against float64."""
    paged, runs = layer.paged, layer.runs[which]
    table = (paged.gate_up_pages, paged.down_pages)[which]
    read = jax.jit(lambda p, t, w: read_linear(p, None, t, w, runs))
    weights = np.asarray(read(paged.pages, table[0], paged.widths[0, which]).astype(jnp.float32))
    count = int(tokens.tiles[0, 2])
    x = np.asarray(tokens.x[0, :count].astype(jnp.float32), np.float64)
    y = [x @ part.astype(np.float64).T for part in weights]
    if which == 1:
        got = np.asarray(found[:count].astype(jnp.float32), np.float64)
        return float(np.linalg.norm(got - y[0]) / np.linalg.norm(y[0]))
    wide = [jnp.asarray(part, jnp.float32) for part in y]
    wanted = np.zeros((1, tokens.x.shape[1], runs.shape.rows), np.float32)
    wanted[0, :count] = np.asarray(activate(wide[0], wide[1], layer.activation))
    places = (-1, 2, 4, tokens.x.shape[1], 4, 2, 4)
    wanted = np.asarray(to_fragments(jnp.asarray(wanted)))[0].reshape(places)[:, :, :, :count]
    got = np.asarray(found[0].astype(jnp.float32)).reshape(places)[:, :, :, :count]
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def time_of(layer: Layer, which: int, tokens: int, tiling: Tiling) -> tuple[float, float]:
    """(microseconds, error) of a product."""
    runs, experts = layer.runs[which], layer.paged.num_experts
    bits = int(layer.paged.widths[0, which])
    made = make_tokens(runs.shape.columns, experts, tokens, tiling.tokens, bits)
    program = make_program(layer, which, tiling, experts * tokens)
    fragments = jax.jit(to_fragments)(made.x)
    times = kernel_times(program, fragments, made.tiles)
    return sum(times.values()), error_of(layer, which, made, program(fragments, made.tiles))


def tune(layer: Layer, which: int, tokens: int, size: int) -> None:
    """Tries tilings, and writes the best for this kind of device."""
    kind = jax.devices()[0].device_kind
    runs, experts = layer.runs[which], layer.paged.num_experts
    key = tuning_key(which, runs, size, experts)
    found = {}
    for row_warps, k_warps in TILINGS:
        tiling = Tiling(tokens=size, row_warps=row_warps, k_warps=k_warps)
        found[tiling] = time_of(layer, which, tokens, tiling)[0]
        print(f"  {key}: {row_warps} x {k_warps} warps {found[tiling]:.1f} us", flush=True)
    best = min(found, key=found.__getitem__)
    TUNED.mkdir(exist_ok=True)
    path = TUNED / f"{kind.replace(' ', '_')}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known[key] = [best.tokens, best.row_warps, best.k_warps]
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
    tuned_tilings.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["Qwen1.5-MoE-A2.7B", "Mixtral-8x7B", "Qwen3-30B-A3B", "Gemma-4-26B-A4B"],
        help=f"of {', '.join(names())}",
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4, 5, 6, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--experts", type=int, help="only so many of a layer's")
    parser.add_argument("--tune", action="store_true", help="try tilings, at 4 bits, first")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    args = parser.parse_args()
    bandwidth, rate = copy_bandwidth(1 << 31), product_rate()
    for shape in args.shape:
        dense: dict[tuple[int, int], float] = {}
        for bits in sorted(args.bits, key=lambda b: b != 4):
            layer = make_layer(shape, bits, args.experts)
            experts = layer.paged.num_experts
            for which, tokens in itertools.product((0, 1), args.tokens):
                runs = layer.runs[which]
                of = runs.shape
                size = min(LARGEST_TILE, max(8, 1 << (tokens - 1).bit_length()))
                if args.tune and bits == 4:
                    tune(layer, which, tokens, size)
                kind = jax.devices()[0].device_kind
                tiling = choose_tiling(which, runs, size, experts, experts * tokens, kind)
                rows = of.parts * of.rows
                if (which, tokens) not in dense:
                    dense[which, tokens] = dense_microseconds(experts, rows, of.columns, tokens)
                microseconds, error = time_of(layer, which, tokens, tiling)
                weights = experts * rows * of.columns
                table = 0 if bits == 16 else of.table_bytes(bits) * experts
                moved = weights * bits / 8 + table + 2 * experts * tokens * (rows + of.columns)
                bound = 1e6 * max(moved / bandwidth, 2 * weights * tokens / rate)
                record(
                    "kernels",
                    {
                        **stamp(args.commit),
                        "shape": f"{shape} {('gate_up', 'down')[which]}",
                        "experts": experts,
                        "bits": bits,
                        "tokens_per_expert": tokens,
                        "tiling": [tiling.tokens, tiling.row_warps, tiling.k_warps],
                        "microseconds": round(microseconds, 1),
                        "bf16_microseconds": round(dense[which, tokens], 1),
                        "x_bf16": round(dense[which, tokens] / microseconds, 2),
                        "percent_of_bound": round(100 * bound / microseconds, 1),
                        "error": float(f"{error:.1e}"),
                    },
                )
            del layer


if __name__ == "__main__":
    main()
