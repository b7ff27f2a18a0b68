"""Which linears give bits away, and which get some back: plans of single steps of width.

PagedWeight's selection (Yang, Yifan et al. 2026, Algorithm 1): the cheapest reductions by damage
per byte until what the KV cache needs is met. Damage is the loss that sensitivities predict, times
what the routing of running requests says of the expert. Rates are those of each linear's lower
convex hull, so that a costly step that leads to a cheap one is not passed by (`allocation`).
"""

import dataclasses
import itertools

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moejax.paging.allocation import Choices


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """What one step of width costs each linear. Column j is between widths j and j + 1."""

    widths: tuple[int, ...]
    """Stored widths, rising."""
    damage: Float64[np.ndarray, "linears steps"]
    """Nats per token that a step down adds, on the hull; not negative."""
    pages: Int64[np.ndarray, "linears steps"]
    """Pages that it frees, tables counted; above 0."""


def make_rates(choices: Choices, widths: tuple[int, ...]) -> Rates:
    """Rates of linears that have all widths. `choices.sizes`: in pages.

    Raises ValueError if a wider one takes no more pages.
    """
    pages = np.diff(choices.sizes, axis=1)
    if not np.all(choices.available) or not np.all(pages > 0):
        raise ValueError("every width must be stored, and wider ones must take more pages")
    hull = _hull_values(choices)
    return Rates(widths, np.maximum(hull[:, :-1] - hull[:, 1:], 0.0), pages)


def _hull_values(choices: Choices) -> Float64[np.ndarray, "linears widths"]:
    """The lower convex hull of (size, damage) at each size: the least of all chords above it."""
    sizes, damage = choices.sizes.astype(np.float64), choices.damage
    found = damage.copy()
    for left, at, right in itertools.combinations(range(damage.shape[1]), 3):
        share = (sizes[:, at] - sizes[:, left]) / (sizes[:, right] - sizes[:, left])
        chord = damage[:, left] + share * (damage[:, right] - damage[:, left])
        found[:, at] = np.minimum(found[:, at], chord)
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """What a plan is made from, of all linears. A column is a place in `Rates.widths`."""

    column: Int64[np.ndarray, " linears"]
    """Of the width that each has."""
    least: Int64[np.ndarray, " linears"]
    """That it may sink to: the floor of its expert."""
    most: Int64[np.ndarray, " linears"]
    """That it may rise to."""
    weight: Float64[np.ndarray, " linears"]
    """Factor of its damage: how much its expert is used."""
    can_sink: Bool[np.ndarray, " linears"]
    """Whether its lower table is there, and nothing of it on its way."""
    can_rise: Bool[np.ndarray, " linears"]
    """Whether nothing of it is on its way, and it has kept its width long enough."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightPlan:
    """Linears that change by one step of width, in this order."""

    linears: Int64[np.ndarray, " chosen"]
    pages: int
    """That they free, or take."""
    damage: float
    """Nats per token that they add, or save."""


def plan_release(rates: Rates, now: Situation, needed: int) -> WeightPlan:
    """The steps down of least damage per page that free at least `needed` pages, or all there are.

    Each linear steps once. The last step may free more than is missing: then steps that can be
    done without are left out again, the most damaging first.
    """
    candidates = np.nonzero(now.can_sink & (now.column > now.least))[0]
    step = now.column[candidates] - 1
    cost = rates.damage[candidates, step] * now.weight[candidates]
    pages = rates.pages[candidates, step]
    order = np.argsort(cost / pages, kind="stable")
    count = int(np.searchsorted(np.cumsum(pages[order]), needed)) + 1 if needed > 0 else 0
    order = order[:count]
    spare = int(np.sum(pages[order])) - needed
    kept = np.ones(len(order), bool)
    for n in np.argsort(-cost[order], kind="stable"):
        if 0 < pages[order[n]] <= spare:
            kept[n] = False
            spare -= int(pages[order[n]])
    order = order[kept]
    return _plan(candidates, cost, pages, order)


def plan_spend(rates: Rates, now: Situation, spare: int) -> WeightPlan:
    """The steps up that save most damage per page, each linear once, with at most `spare` pages.

    Pages are those that a linear has more of afterwards; while it rises it holds others beside.
    Steps that save nothing are not taken.
    """
    candidates = np.nonzero(now.can_rise & (now.column < now.most))[0]
    step = now.column[candidates]
    gain = rates.damage[candidates, step] * now.weight[candidates]
    pages = rates.pages[candidates, step]
    order = np.argsort(-gain / pages, kind="stable")
    order = order[gain[order] > 0]
    fits = np.cumsum(pages[order]) <= spare
    return _plan(candidates, gain, pages, order[fits])


def _plan(
    candidates: Int64[np.ndarray, " linears"],
    damage: Float64[np.ndarray, " linears"],
    pages: Int64[np.ndarray, " linears"],
    order: Int64[np.ndarray, " chosen"],
) -> WeightPlan:
    return WeightPlan(candidates[order], int(pages[order].sum()), float(damage[order].sum()))
