"""How products are cut into programs: as measured on a kind of device, or by a rule."""

import functools
import json
import math
import pathlib

from moejax.arena.format import ATOM_ROWS, ceil_div, pad_to
from moejax.arena.geometry import Runs
from moejax.pallas.product import Tiling

TUNED = pathlib.Path(__file__).parent / "tuned"
"""Files of measured tilings, by kind of device."""
_LARGEST_TILE = 32
# Enough programs for each multiprocessor of the largest GPUs to have two.
_ENOUGH_PROGRAMS = 264


def choose_tilings(
    tokens: int, k: int, num_experts: int, runs: tuple[Runs, Runs], device_kind: str
) -> tuple[Tiling, Tiling]:
    """How the products of gate_up and of down are cut: as measured, or by a rule.

    Both have tiles of the same number of tokens.
    """
    size = tile_tokens(tokens, k, num_experts)
    gate_up, down = (
        choose_tiling(which, of, size, num_experts, tokens * k, device_kind)
        for which, of in enumerate(runs)
    )
    return gate_up, down


def choose_tiling(
    which: int, runs: Runs, size: int, num_experts: int, slots: int, device_kind: str
) -> Tiling:
    """How one product is cut into tiles of `size` tokens."""
    key = tuning_key(which, runs, size, min(num_experts, slots))
    found = tuned_tilings(device_kind).get(key)
    return found or default_tiling(which, runs, size, num_experts, slots)


def tile_tokens(tokens: int, k: int, num_experts: int) -> int:
    """Tokens of a tile: a power of two that holds what an expert with tokens has on average."""
    share = tokens * k / num_experts
    # Of experts that have any, if each slot went to a random one.
    mean = share / -math.expm1(-share)
    size = 8
    while size < min(1.25 * mean, _LARGEST_TILE):
        size *= 2
    return size


def tuning_key(which: int, runs: Runs, size: int, most_experts: int) -> str:
    """What a tiling is stored under: shape, tokens of a tile, experts with tokens in powers of two.

    Widths are data, so they are no part of it.
    """
    name = ("gate_up", "down")[which]
    experts = 1 << (most_experts - 1).bit_length()
    return f"{name} {runs.shape.rows}x{runs.shape.columns} tokens {size} experts {experts}"


def default_tiling(which: int, runs: Runs, size: int, num_experts: int, slots: int) -> Tiling:
    """A tiling for a shape that was not measured."""
    blocks = ceil_div(pad_to(runs.shape.rows, ATOM_ROWS), 64 if which == 0 else 128)
    programs = blocks * min(num_experts, slots)
    k_warps = 1
    while k_warps < 4 and programs * k_warps < _ENOUGH_PROGRAMS:
        k_warps *= 2
    return Tiling(tokens=size, row_warps=4, k_warps=k_warps)


@functools.cache
def tuned_tilings(device_kind: str) -> dict[str, Tiling]:
    """Measured tilings of a kind of device; empty where none were."""
    path = TUNED / f"{device_kind.replace(' ', '_')}.json"
    if not path.is_file():
        return {}
    read = json.loads(path.read_text(encoding="utf-8"))
    return {
        key: Tiling(tokens=tokens, row_warps=row_warps, k_warps=k_warps)
        for key, (tokens, row_warps, k_warps) in read.items()
    }
