"""How products are cut into programs: as measured on a kind of device, or by a rule."""

import functools
import json
import math
import pathlib

from moejax.arena.format import ATOM_ROWS, ceil_div, pad_to
from moejax.arena.geometry import Runs
from moejax.errors import ConfigError
from moejax.pallas.prefill import TILE_TOKENS
from moejax.pallas.product import Tiling

TUNED = pathlib.Path(__file__).parent / "tuned"
"""Files of measured tilings, by kind of device."""
_LARGEST_TILE = 32
_WARPS = {1, 2, 4, 8}
# Of a tile, for which the tokens are read often enough from the caches.
_FEW_TOKENS = 8
_MULTIPROCESSORS = 132
"""Of an H200."""
# Of the kernel for many tokens: rows of a program, of which a multiprocessor has one at a time.
_PREFILL_ROWS = 128
# Tokens that a program could multiply in the time that it takes for any number: not measured.
_DECODED_TOKENS = 100
# What keys of its tiles begin with.
_PREFILL = "prefill"


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
    mean = tokens * k / _experts_with_tokens(tokens, k, num_experts)
    # Of experts that are chosen some have more; all tokens pass a matrix that is none of several.
    most = mean if k == num_experts else 1.25 * mean
    size = 8
    while size < min(most, _LARGEST_TILE):
        size *= 2
    return size


def _experts_with_tokens(tokens: int, k: int, num_experts: int) -> float:
    """How many they are on average, if each slot went to a random one."""
    return -num_experts * math.expm1(-tokens * k / num_experts)


def choose_prefill_tile(tokens: int, k: int, num_experts: int, down: Runs, device_kind: str) -> int:
    """Tokens of a tile of the kernel for many tokens: as measured, or by `prefill_cost`."""
    key = prefill_key(tokens, k, num_experts, down)
    found = tuned_prefill_tiles(device_kind).get(key)
    blocks = ceil_div(down.shape.rows, _PREFILL_ROWS)
    costs = {size: prefill_cost(tokens, k, num_experts, blocks, size) for size in TILE_TOKENS}
    return found or min(costs, key=costs.__getitem__)


def prefill_cost(tokens: int, k: int, num_experts: int, blocks: int, size: int) -> int:
    """A guess of the time of a launch with tiles of `size` tokens and `blocks` programs for each.

    In tokens that a program multiplies. The last tile of an expert is half full on average.
    """
    if k == num_experts:
        tiles = float(k * ceil_div(tokens, size))
    else:
        experts = _experts_with_tokens(tokens, k, num_experts)
        tiles = max(experts, tokens * k / size + experts / 2)
    return math.ceil(tiles * blocks / _MULTIPROCESSORS) * (_DECODED_TOKENS + size)


def prefill_key(tokens: int, k: int, num_experts: int, down: Runs) -> str:
    """What such a tile is stored under: shape of down, tokens of an expert on average, experts.

    Both numbers in powers of two.
    """
    mean = 1 << (ceil_div(tokens * k, num_experts) - 1).bit_length()
    experts = 1 << (num_experts - 1).bit_length()
    return f"{_PREFILL} {down.shape.rows}x{down.shape.columns} mean {mean} experts {experts}"


def tuning_key(which: int, runs: Runs, size: int, most_experts: int) -> str:
    """What a tiling is stored under: shape, tokens of a tile, experts with tokens in powers of two.

    Widths are data, so they are no part of it.
    """
    name = ("gate_up", "down")[which]
    experts = 1 << (most_experts - 1).bit_length()
    return f"{name} {runs.shape.rows}x{runs.shape.columns} tokens {size} experts {experts}"


def default_tiling(which: int, runs: Runs, size: int, num_experts: int, slots: int) -> Tiling:
    """A tiling for a shape that was not measured: what was best for Qwen1.5-MoE on an H200."""
    blocks = ceil_div(pad_to(runs.shape.rows, ATOM_ROWS), 32 if which == 0 else 64)
    programs = blocks * min(num_experts, slots)
    if programs <= _MULTIPROCESSORS:
        return Tiling(tokens=size, row_warps=2, k_warps=4)
    if size > _FEW_TOKENS and programs > 4 * _MULTIPROCESSORS:
        return Tiling(tokens=size, row_warps=4, k_warps=1)
    return Tiling(tokens=size, row_warps=2, k_warps=2)


@functools.cache
def tuned_tilings(device_kind: str) -> dict[str, Tiling]:
    """Measured tilings of a kind of device; empty where none were."""
    found = {}
    for key, value in _read(device_kind).items():
        if key.startswith(_PREFILL):
            continue
        if len(value) != 3 or f" tokens {value[0]} " not in key or not set(value[1:]) <= _WARPS:
            raise ConfigError(f"{_path(device_kind)}: '{key}' cannot be cut as {value}")
        found[key] = Tiling(tokens=value[0], row_warps=value[1], k_warps=value[2])
    return found


@functools.cache
def tuned_prefill_tiles(device_kind: str) -> dict[str, int]:
    """The same of tiles of the kernel for many tokens."""
    found = {}
    for key, value in _read(device_kind).items():
        if not key.startswith(_PREFILL):
            continue
        if len(value) != 1 or value[0] not in TILE_TOKENS:
            raise ConfigError(f"{_path(device_kind)}: '{key}' cannot be cut as {value}")
        found[key] = value[0]
    return found


def _path(device_kind: str) -> pathlib.Path:
    return TUNED / f"{device_kind.replace(' ', '_')}.json"


def _read(device_kind: str) -> dict[str, list[int]]:
    """What a file says. Raises ConfigError where it is damaged."""
    path = _path(device_kind)
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: needs an object of tilings")
    for key, value in read.items():
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise ConfigError(f"{path}: '{key}' needs a list of whole numbers")
    return read
