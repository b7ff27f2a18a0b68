"""Affine rounding, what lookup tables are measured against: weight ~ low + scale * code.

Codes of b bits, one float16 scale and one float16 low per row, or per group of neighbouring columns
of a row: the usual round-to-nearest form of weight-only quantisation. Given importances, each group
gets the range of least importance-weighted squared error, the sum that lookup tables minimise too;
as in OmniQuant (Shao et al. 2024, learnable weight clipping) both ends of a range move, here over
a grid.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Float32, Float64, UInt8

MIN_BITS, MAX_BITS = 2, 8
MAX_WEIGHT = float(np.finfo(np.float16).max)
# By how much of half its range a group is cut; the whole range first, so that it wins a tie.
CUTS = tuple(n / 20 for n in range(11))
_PARAMETER_BITS = 32
# So many weights at a time: the search holds several arrays of their size.
_WEIGHTS_AT_ONCE = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AffineCodes:
    """Weights as codes, and the numbers that turn them back."""

    codes: UInt8[np.ndarray, "*lead columns"]
    scale: Float16[np.ndarray, "*lead groups"]
    low: Float16[np.ndarray, "*lead groups"]
    """The weight of code 0."""
    group: int
    """Columns that share a scale; the last group of a row may have fewer."""

    def decode(self) -> Float32[np.ndarray, "*lead columns"]:
        """low + scale * code, in float32."""
        columns = self.codes.shape[-1]
        scale, low = (
            np.repeat(numbers.astype(np.float32), self.group, axis=-1)[..., :columns]
            for numbers in (self.scale, self.low)
        )
        return low + scale * self.codes.astype(np.float32)


def affine_bits(columns: int, bits: int, group: int | None = None) -> float:
    """Bits per weight of rows of `columns`, scales and lows included."""
    size = _check(columns, bits, group)
    return bits + _PARAMETER_BITS * -(-columns // size) / columns


def affine_round(
    weights: Float[np.ndarray, "*lead columns"],
    bits: int,
    group: int | None = None,
    importance: Float[np.ndarray, "*lead columns"] | None = None,
) -> Float32[np.ndarray, "*lead columns"]:
    """The weights that come back from `affine_codes`."""
    return affine_codes(weights, bits, group, importance).decode()


def affine_codes(
    weights: Float[np.ndarray, "*lead columns"],
    bits: int,
    group: int | None = None,
    importance: Float[np.ndarray, "*lead columns"] | None = None,
) -> AffineCodes:
    """Rounds each weight to the nearest of the 2^bits values of its group.

    Args:
        weights: finite, and none beyond what float16 holds.
        bits: 2 to 8.
        group: so many neighbouring columns share a scale; None: all of a row.
        importance: finite, not negative. None: the values reach from the smallest to the largest
            weight of the group, and no weight moves by more than half a scale.

    Raises:
        ValueError: any of these does not hold.
    """
    columns = weights.shape[-1]
    size = _check(columns, bits, group)
    if not np.all(np.isfinite(weights)):
        raise ValueError("a weight is not finite")
    if np.any(np.abs(weights) > MAX_WEIGHT):
        raise ValueError(f"a weight is beyond {MAX_WEIGHT:.0f}, the largest float16")
    if importance is not None and not np.all((importance >= 0) & np.isfinite(importance)):
        raise ValueError("an importance is negative or not finite")
    groups = -(-columns // size)
    # Padding repeats a weight of the last group, and counts nothing.
    rows = _grouped(weights, groups, size, "edge")
    counted = None if importance is None else _grouped(importance, groups, size, "constant")
    at_once = max(1, _WEIGHTS_AT_ONCE // (groups * size))
    codes = np.empty(rows.shape, np.uint8)
    low, scale = np.empty((2, *rows.shape[:2]), np.float16)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        ends = np.min(rows[part], axis=2), np.max(rows[part], axis=2)
        levels = 2**bits - 1
        found = _stored(*ends, levels)
        if counted is not None:
            found = _search(rows[part], counted[part], *ends, levels)
        low[part], scale[part] = found
        codes[part] = _codes(rows[part], found, levels)
    lead = weights.shape[:-1]
    return AffineCodes(
        codes=codes.reshape(*lead, groups * size)[..., :columns],
        scale=scale.reshape(*lead, groups),
        low=low.reshape(*lead, groups),
        group=size,
    )


class _Range(NamedTuple):
    low: Float16[np.ndarray, "rows groups"]
    scale: Float16[np.ndarray, "rows groups"]


def _check(columns: int, bits: int, group: int | None) -> int:
    """Columns per group."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits: needs {MIN_BITS} to {MAX_BITS}")
    if columns < 1 or (group is not None and group < 1):
        raise ValueError(f"groups of {group} of {columns} columns: needs 1 or more of both")
    return columns if group is None else min(group, columns)


def _grouped(
    values: Float[np.ndarray, "*lead columns"], groups: int, size: int, mode: str
) -> Float32[np.ndarray, "rows groups size"]:
    rows = values.astype(np.float32).reshape(-1, values.shape[-1])
    fill = ((0, 0), (0, groups * size - values.shape[-1]))
    padded = np.pad(rows, fill, "edge") if mode == "edge" else np.pad(rows, fill)
    return padded.reshape(-1, groups, size)


def _stored(
    least: Float[np.ndarray, "rows groups"], most: Float[np.ndarray, "rows groups"], levels: int
) -> _Range:
    """What is stored for a range. It is rounded outwards, so that both ends stay within."""
    low = least.astype(np.float16)
    np.nextafter(low, np.float16(-np.inf), out=low, where=low > least)
    exact = (most.astype(np.float64) - low.astype(np.float64)) / levels
    scale = exact.astype(np.float16)
    np.nextafter(scale, np.float16(np.inf), out=scale, where=scale < exact)
    return _Range(low, scale)


def _codes(
    rows: Float32[np.ndarray, "rows groups size"], found: _Range, levels: int
) -> Float32[np.ndarray, "rows groups size"]:
    low, scale = (numbers.astype(np.float32)[..., None] for numbers in found)
    # Where the scale is 0 all weights are low itself.
    steps = np.divide(rows - low, scale, out=np.zeros_like(rows), where=scale > 0)
    codes: Float32[np.ndarray, "rows groups size"] = np.clip(np.rint(steps), 0, levels)
    return codes


def _search(
    rows: Float32[np.ndarray, "rows groups size"],
    importance: Float32[np.ndarray, "rows groups size"],
    least: Float32[np.ndarray, "rows groups"],
    most: Float32[np.ndarray, "rows groups"],
    levels: int,
) -> _Range:
    """The range of least error: cut at both ends alike, then at one end, then at the other."""
    half = (most.astype(np.float64) - least.astype(np.float64)) / 2
    cuts = np.zeros((2, *half.shape))
    best = np.full(half.shape, np.inf)
    for ends in ([0, 1], [0], [1]):
        start = cuts.copy()
        for cut in CUTS:
            tried = start.copy()
            tried[ends] = cut
            found = _stored(least + tried[0] * half, most - tried[1] * half, levels)
            error = _error(rows, importance, found, levels)
            is_better = error < best
            best = np.where(is_better, error, best)
            cuts = np.where(is_better, tried, cuts)
    return _stored(least + cuts[0] * half, most - cuts[1] * half, levels)


def _error(
    rows: Float32[np.ndarray, "rows groups size"],
    importance: Float32[np.ndarray, "rows groups size"],
    found: _Range,
    levels: int,
) -> Float64[np.ndarray, "rows groups"]:
    """The sum of importance * (weight - stored weight)^2 of each group."""
    low, scale = (numbers.astype(np.float32)[..., None] for numbers in found)
    missed = (rows - (low + scale * _codes(rows, found, levels))).astype(np.float64)
    error: Float64[np.ndarray, "rows groups"] = np.sum(importance * missed**2, axis=2)
    return error
