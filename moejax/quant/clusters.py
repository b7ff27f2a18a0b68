"""Nested clusters of numbers in one dimension: a seed by dynamic programming, then splits in two.

Any-Precision LLM (Park et al. 2024, section 3): the values of a row are clustered into 2^seed_bits
clusters of least weighted squared error; then every cluster is split in two, again and again. The
index of a value's cluster is its code; the top b bits of the code are its cluster at width b.
Clusters are ranges of the sorted values, so everything here works on sorted rows and prefix sums,
in float64: importances span many orders of magnitude.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8

LLOYD_STEPS = 8
# Where a row has more values, only this many borders between clusters are tried for the seed.
MAX_BORDERS = 256
# A value without importance still gets a place of its own: this share of the mean importance.
_LEAST_SHARE = 1e-6


class NestedClusters(NamedTuple):
    """Clusters of the values of each row, at every width from the seed to the parent."""

    codes: UInt8[Array, "rows values"]
    """Of parent_bits bits."""
    tables: tuple[Float[Array, "rows _"], ...]
    """float32[rows, 2^b] per width b: the weighted mean of each cluster, in rising order."""


class _Sums(NamedTuple):
    """Prefix sums along a sorted row: entry i is the sum of the first i values."""

    mass: Float[Array, " places"]
    moment: Float[Array, " places"]

    def gain(self, first: Array, last: Array) -> Array:
        """How much less the squared error of values first .. last-1 is around their mean than 0."""
        mass = self.mass[last] - self.mass[first]
        moment = self.moment[last] - self.moment[first]
        return jnp.where(mass > 0, moment * moment / jnp.where(mass > 0, mass, 1.0), 0.0)

    def mean(self, first: Array, last: Array, empty: Array) -> Array:
        """The weighted mean of values first .. last-1; `empty` where there is none."""
        mass = self.mass[last] - self.mass[first]
        moment = self.moment[last] - self.moment[first]
        return jnp.where(mass > 0, moment / jnp.where(mass > 0, mass, 1.0), empty)


def nested_clusters(
    values: Float[Array, "rows values"],
    importance: Float[Array, "rows values"],
    *,
    seed_bits: int,
    parent_bits: int,
    max_borders: int = MAX_BORDERS,
) -> NestedClusters:
    """Clusters the values of each row; to be traced with 64-bit types enabled.

    Args:
        values: finite.
        importance: finite, not negative. Every value counts a millionth of the row's mean besides,
            so that one of importance 0 finds its place; where all are 0, all count the same.
        seed_bits, parent_bits: 1 ≤ seed_bits ≤ parent_bits ≤ 8.
        max_borders: rows of at most so many values get the best seed there is; longer ones the best
            among so many borders, then Lloyd's steps.
    """

    def row(values: Array, importance: Array) -> NestedClusters:
        return _cluster_row(values, importance, seed_bits, parent_bits, max_borders)

    return jax.vmap(row)(values, importance)


def _cluster_row(
    values: Float[Array, " n"],
    importance: Float[Array, " n"],
    seed_bits: int,
    parent_bits: int,
    max_borders: int,
) -> NestedClusters:
    n = values.shape[0]
    number = lax.iota(jnp.int32, n)
    x, f, order = lax.sort((values.astype(jnp.float64), importance, number), num_keys=1)
    f = f.astype(jnp.float64)
    mean_importance = jnp.mean(f)
    f = jnp.where(mean_importance > 0, f + _LEAST_SHARE * mean_importance, 1.0)
    # Sums of squares lose the fewest digits around the mean.
    centre = jnp.sum(f * x) / jnp.sum(f)
    sums = _Sums(_prefix(f), _prefix(f * (x - centre)))

    borders = _seed(x - centre, sums, 1 << seed_bits, max_borders)
    means = sums.mean(borders[:-1], borders[1:], jnp.zeros((), jnp.float64))
    means = _fill_empty(means, borders)
    tables = [means]
    for _ in range(seed_bits, parent_bits):
        borders, means = _split(sums, borders, means)
        # Empty clusters before the first values had the mean of more than the first have now.
        means = _fill_empty(means, borders)
        tables.append(means)
    sorted_codes = jnp.sum(number[:, None] >= borders[None, 1:-1], axis=1, dtype=jnp.int32)
    codes = (
        jnp.zeros(n, jnp.uint8).at[order].set(sorted_codes.astype(jnp.uint8), unique_indices=True)
    )
    rising = (lax.cummax(means + centre).astype(jnp.float32) for means in tables)
    return NestedClusters(codes, tuple(rising))


def _prefix(x: Float[Array, " n"]) -> Float[Array, " places"]:
    return jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(x)])


def _seed(
    x: Float[Array, " n"], sums: _Sums, clusters: int, max_borders: int
) -> Integer[Array, " borders"]:
    """Borders 0 = b_0 ≤ … ≤ b_clusters = n of least error among the candidates, then refined.

    Dynamic programming (Bellman 1973): best[j] for c clusters is the largest, over i, of best[i]
    for c - 1 clusters plus the gain of a cluster from i to j.
    """
    n = x.shape[0]
    places = _candidates(x, max_borders)
    m = places.shape[0]
    number = lax.iota(jnp.int32, m)
    allowed = number[:, None] <= number[None, :]
    gains = jnp.where(allowed, sums.gain(places[:, None], places[None, :]), -jnp.inf)
    best = [gains[0]]
    for _ in range(clusters - 2):
        best.append(jnp.max(best[-1][:, None] + gains, axis=0))
    end = jnp.asarray(m - 1, jnp.int32)
    borders = [places[end]]
    for c in range(clusters - 2, -1, -1):
        end = jnp.argmax(best[c] + gains[:, end]).astype(jnp.int32)
        borders.append(places[end])
    borders.append(jnp.zeros((), jnp.int32))
    found = jnp.stack(borders[::-1])
    return found if m == n + 1 else _lloyd(x, sums, found)


def _candidates(x: Float[Array, " n"], max_borders: int) -> Integer[Array, " m"]:
    """Places of borders that are tried: all, or half of them evenly by rank and half by value."""
    n = x.shape[0]
    if n <= max_borders:
        return lax.iota(jnp.int32, n + 1)
    half = max_borders // 2
    by_rank = (lax.iota(jnp.int32, half) * n) // half
    steps = (lax.iota(jnp.int32, max_borders - half).astype(x.dtype) + 1) / (max_borders - half)
    by_value = jnp.searchsorted(x, x[0] + (x[-1] - x[0]) * steps, side="left").astype(jnp.int32)
    both = jnp.sort(jnp.concatenate([by_rank, by_value]))
    return jnp.concatenate([both, jnp.full(1, n, jnp.int32)])


def _lloyd(
    x: Float[Array, " n"], sums: _Sums, borders: Integer[Array, " borders"]
) -> Integer[Array, " borders"]:
    """Moves every border half way between the means beside it (Lloyd 1982), a few times."""

    def step(_: Array, borders: Array) -> Array:
        means = sums.mean(borders[:-1], borders[1:], jnp.zeros((), x.dtype))
        means = _fill_empty(means, borders)
        middle = (means[:-1] + means[1:]) / 2
        inner = jnp.searchsorted(x, middle, side="left").astype(jnp.int32)
        return borders.at[1:-1].set(inner)

    found: Integer[Array, " borders"] = lax.fori_loop(0, LLOYD_STEPS, step, borders)
    return found


def _fill_empty(
    means: Float[Array, " clusters"], borders: Integer[Array, " borders"]
) -> Float[Array, " clusters"]:
    """An empty cluster takes the mean of the one before it; at the start, of the one after."""
    is_empty = borders[1:] <= borders[:-1]
    number = lax.iota(jnp.int32, means.shape[0])
    before = lax.cummax(jnp.where(is_empty, -1, number))
    first = jnp.argmin(is_empty).astype(jnp.int32)
    return means[jnp.where(before < 0, first, before)]


def _split(
    sums: _Sums, borders: Integer[Array, " borders"], means: Float[Array, " clusters"]
) -> tuple[Integer[Array, " borders2"], Float[Array, " clusters2"]]:
    """Splits every cluster where the error becomes least. A part without values keeps the mean."""
    first, last = borders[:-1], borders[1:]
    place = lax.iota(jnp.int32, sums.mass.shape[0])
    inside = (place[None, :] > first[:, None]) & (place[None, :] < last[:, None])
    # Which cluster a place lies in, so that gains are computed once per place.
    cluster = jnp.sum(place[:, None] >= borders[None, 1:-1], axis=1, dtype=jnp.int32)
    gains = sums.gain(first[cluster], place) + sums.gain(place, last[cluster])
    split = jnp.argmax(jnp.where(inside, gains[None, :], -jnp.inf), axis=1).astype(jnp.int32)
    split = jnp.where(last - first > 1, split, last)
    left, right = sums.mean(first, split, means), sums.mean(split, last, means)
    both = jnp.stack([left, right], axis=1).reshape(-1)
    inner = jnp.stack([first, split], axis=1).reshape(-1)
    return jnp.concatenate([inner, last[-1:]]), both
