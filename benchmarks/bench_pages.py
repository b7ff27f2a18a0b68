"""Kernels that write and copy pages of the arena, and the grouping of tokens by expert.

    python benchmarks/bench_pages.py

Pages of 64 KiB in an arena that is changed in place: 128 MiB committed and moved, KV of tokens
written (8 KV heads of 128, bfloat16). Times are those of the kernels on the device; of few tokens
they are those of a launch. Bytes are what is read and written. Appends a line per case to
results/pages.jsonl and prints a table, which says whether copies keep to their limit.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_speed import copy_bandwidth
from device_times import kernel_times
from stamp import record, run_script, stamp

from moejax.errors import ConfigError
from moejax.pallas.dispatch import find_kernels
from moejax.pallas.grouping import TILE_COLUMNS, group, num_tiles
from moejax.pallas.pages import commit_pages, move_pages, write_kv

PAGE_WORDS = 16384
NUM_PAGES = 8192
COPIED_PAGES = 2048
COPY_LIMIT = 100.0
"""Microseconds that a copy of 128 MiB may take."""
KV_TOKENS = (1, 64, 4096)
KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 16
ROWS, ROW_BLOCKS = 64, 16
TILE = 16
GROUPED = (
    *((1, 8, 128), (16, 8, 128), (64, 8, 128), (64, 8, 512)),
    *((128, 8, 128), (512, 8, 128), (4096, 8, 128), (4096, 8, 512)),
)
"""Tokens, experts of each, and experts of a layer."""


class Case(NamedTuple):
    """A program that is timed."""

    name: str
    size: dict[str, int]
    program: Callable[..., Any]
    """Of pages, which it is given and returns where it is `in_place`, and `arguments`."""
    arguments: tuple[Any, ...]
    moved: int
    """Bytes that must be read and written."""
    in_place: bool = True
    limit: float | None = None
    """Microseconds."""


def copy_cases(num_pages: int = NUM_PAGES, copied: int = COPIED_PAGES) -> Iterator[Case]:
    """Staged pages that are committed, and pages that move, to random places."""
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
    targets, sources = jnp.asarray(ids[:copied]), jnp.asarray(ids[copied : 2 * copied])
    moved = 2 * copied * PAGE_WORDS * 4
    size = {"pages": copied}
    staged = jnp.ones((copied, PAGE_WORDS), jnp.uint32)
    yield Case("commit_pages", size, commit_pages, (targets, staged), moved, limit=COPY_LIMIT)
    yield Case("move_pages", size, move_pages, (sources, targets), moved, limit=COPY_LIMIT)


def kv_case(tokens: int, num_pages: int = NUM_PAGES) -> Case:
    """So many tokens, which follow each other in up to 64 rows, in the second of two layers."""
    rng = np.random.default_rng(0)
    k = jnp.ones((tokens, KV_HEADS, HEAD_SIZE), jnp.bfloat16)
    blocks = ROWS * ROW_BLOCKS
    pages = 1 + rng.permutation(num_pages - 1)[: 2 * blocks].reshape(2, blocks)
    number = np.arange(tokens)
    each = -(-tokens // ROWS)
    arguments = (
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(rng.permutation(blocks).reshape(ROWS, ROW_BLOCKS), jnp.int32),
        jnp.int32(1),
        jnp.asarray(number // each, jnp.int32),
        jnp.asarray(number % each, jnp.int32),
        jnp.ones(tokens, bool),
    )
    program = functools.partial(write_kv, block_size=BLOCK_SIZE)
    return Case("write_kv", {"tokens": tokens}, program, (k, 2 * k, *arguments), 4 * k.nbytes)


def group_case(tokens: int, k: int, experts: int) -> Case:
    """Each token chooses k experts at random."""
    chosen = np.random.default_rng(0).random((tokens, experts)).argsort(axis=1)[:, :k]
    ids = jnp.asarray(chosen, jnp.int32)
    arguments = (ids, jnp.ones(tokens, bool), jnp.full((experts, 2), 4, jnp.int32))
    tiles = num_tiles(tokens * k, experts, TILE)
    read = sum(argument.nbytes for argument in arguments)
    size = {"tokens": tokens, "experts_per_token": k, "experts": experts}
    written = 4 * (tiles * TILE_COLUMNS + 2 * tokens * k)
    program = functools.partial(group, size=TILE)
    return Case("group", size, program, arguments, read + written, in_place=False)


def make_cases() -> Iterator[Case]:
    yield from copy_cases()
    yield from map(kv_case, KV_TOKENS)
    yield from (group_case(*sizes) for sizes in GROUPED)


def changed_in_place(
    program: Callable[..., jax.Array], pages: jax.Array
) -> Callable[..., jax.Array]:
    """The program that is given what it returned before, and no copy of it is made."""
    donating = jax.jit(program, donate_argnums=0)

    def call(*arguments: Any) -> jax.Array:
        nonlocal pages
        pages = donating(pages, *arguments)
        return pages

    return call


def microseconds_of(case: Case) -> float:
    if case.in_place:
        pages = jnp.zeros((NUM_PAGES, PAGE_WORDS), jnp.uint32)
        program = changed_in_place(case.program, pages)
    else:
        program = jax.jit(case.program)
    return sum(kernel_times(program, *case.arguments).values())


def line_of(case: Case, microseconds: float, bandwidth: float) -> dict[str, Any]:
    """What a line of results says of a case."""
    limit: dict[str, Any] = {}
    if case.limit is not None:
        limit = {"limit_microseconds": case.limit, "keeps_limit": microseconds <= case.limit}
    return {
        "kernel": case.name,
        **case.size,
        "microseconds": round(microseconds, 2),
        "bytes": case.moved,
        "percent_of_bandwidth": round(100 * case.moved / bandwidth / (1e-6 * microseconds), 1),
        **limit,
    }


def row_of(line: dict[str, Any], case: Case) -> str:
    """Its line of the table."""
    size = " ".join(f"{name} {n}" for name, n in case.size.items())
    text = (
        f"{case.name:13} {size:46} {line['microseconds']:8.2f} us"
        f" {line['bytes']:11,} bytes {line['percent_of_bandwidth']:6.1f} %"
    )
    if case.limit is None:
        return text
    return f"{text}  {'within' if line['keeps_limit'] else 'ABOVE'} {case.limit:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    args = parser.parse_args()
    try:
        find_kernels("bfloat16", "triton")
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    bandwidth = copy_bandwidth(1 << 31)
    table = []
    for case in make_cases():
        found = line_of(case, microseconds_of(case), bandwidth)
        record("pages", {**stamp(args.commit), **found})
        table.append(row_of(found, case))
    print(f"percent of the bandwidth of a copy, {bandwidth / 1e12:.2f} TB/s:", *table, sep="\n")


if __name__ == "__main__":
    run_script(main)
