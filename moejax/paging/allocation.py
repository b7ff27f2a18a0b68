"""Static widths: the least damage that a number of bytes buys.

Choosing one width per linear under a byte budget is the multiple-choice knapsack problem. Its
linear relaxation is solved exactly by steps along the lower convex hull of each linear's (bytes,
damage) points, in order of damage saved per byte (Sinha and Zoltners 1979; Kellerer, Pferschy and
Pisinger 2004, Knapsack Problems, section 11.2). Stopped where the budget ends, the steps leave less
than one step of damage to the integer optimum; what is left then goes to smaller changes.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped

from moejax.errors import CapacityError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What every width of every linear costs. A column is a width, in rising order."""

    sizes: Int64[np.ndarray, "linears widths"]
    """Bytes. Below 0: the linear does not have this width."""
    damage: Float64[np.ndarray, "linears widths"]
    """Finite and not negative; of any unit. What stands at widths that are missing is not read."""

    def __post_init__(self) -> None:
        if self.sizes.shape != self.damage.shape:
            raise ValueError(
                f"sizes {self.sizes.shape} and damage {self.damage.shape}: needs one shape"
            )
        available = self.available
        if not np.all(np.any(available, axis=1)):
            linear = int(np.argmin(np.any(available, axis=1)))
            raise ValueError(f"linear {linear} has no width: all of its sizes are negative")
        bad = available & ~((self.damage >= 0) & np.isfinite(self.damage))
        if np.any(bad):
            linear, column = (int(n) for n in np.argwhere(bad)[0])
            raise ValueError(
                f"the damage of linear {linear} in column {column} is "
                f"{self.damage[linear, column]}: it must be finite and not negative"
            )

    @property
    def available(self) -> Bool[np.ndarray, "linears widths"]:
        """Which widths the linears have."""
        return self.sizes >= 0


def expert_choices(
    errors: Float64[np.ndarray, "layers experts 2 widths"], sizes: Int64[np.ndarray, "2 widths2"]
) -> Choices:
    """Of every gate_up and down, in this order: damage is half its error, in nats per token.

    `sizes` may have one width more than `errors`: the last one, without error.
    """
    damage = errors.reshape(-1, errors.shape[-1]) / 2
    exact = np.zeros((len(damage), sizes.shape[1] - damage.shape[1]))
    return Choices(
        sizes=np.tile(sizes, (len(damage) // 2, 1)), damage=np.concatenate([damage, exact], axis=1)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps up the hulls of all linears, the one that saves the most damage per byte first.

    Those of a linear stand in the order in which they follow each other. Where steps save the same
    per byte, the linear with the lower number comes first.
    """

    start: Int64[np.ndarray, " linears"]
    """The column of each linear before its first step: that of the fewest bytes."""
    linear: Int64[np.ndarray, " steps"]
    source: Int64[np.ndarray, " steps"]
    """The column that a step leaves."""
    target: Int64[np.ndarray, " steps"]
    """The column that it reaches."""
    bytes: Int64[np.ndarray, " steps"]
    """How many it adds; above 0."""
    rate: Float64[np.ndarray, " steps"]
    """Damage saved per byte; falling."""


def total(choices: Choices, picks: Int64[np.ndarray, " linears"]) -> tuple[int, float]:
    """Bytes and damage of one column per linear. Raises ValueError for a width that is missing."""
    within = (picks >= 0) & (picks < choices.sizes.shape[1])
    picked = np.where(within, picks, 0)
    sizes, damage = _chosen(choices.sizes, picked), _chosen(choices.damage, picked)
    missing = ~within | (sizes < 0)
    if np.any(missing):
        linear = int(np.argmax(missing))
        raise ValueError(f"linear {linear} has no width in column {picks[linear]}")
    return int(np.sum(sizes)), float(np.sum(damage))


def lower_hull(
    sizes: Int64[np.ndarray, " widths"], damage: Float64[np.ndarray, " widths"]
) -> Int64[np.ndarray, " points"]:
    """Columns on the lower convex hull of one linear, from the fewest bytes to the least damage.

    Columns that need more bytes than another and save nothing are left out. Whether one on the line
    between two others counts is left to rounding.
    """
    hull = _hulls(Choices(sizes=sizes[None], damage=damage[None]))[0]
    points: Int64[np.ndarray, " points"] = hull[hull >= 0]
    return points


def hull_steps(choices: Choices) -> Steps:
    """The steps between neighbours on the hulls of all linears, sorted."""
    hulls = _hulls(choices)
    linear, number = np.nonzero(hulls[:, 1:] >= 0)
    source, target = hulls[linear, number], hulls[linear, number + 1]
    added = choices.sizes[linear, target] - choices.sizes[linear, source]
    saved = choices.damage[linear, source] - choices.damage[linear, target]
    # Rounding must not put a step before the one that leads to it.
    rates = np.full((hulls.shape[0], hulls.shape[1] - 1), np.inf)
    rates[linear, number] = saved / added
    rate = np.minimum.accumulate(rates, axis=1)[linear, number]
    # They stand by linear and number now, and a stable sort keeps that.
    order = np.argsort(-rate, kind="stable")
    return Steps(
        start=hulls[:, 0].copy(),
        linear=linear[order],
        source=source[order],
        target=target[order],
        bytes=added[order],
        rate=rate[order],
    )


def allocate(choices: Choices, budget: int) -> Int64[np.ndarray, " linears"]:
    """The column of each linear, of nearly the least total damage that `budget` bytes allow.

    The damage is above the least possible by no more than what one step on a hull saves, and never
    above that of a column that fits for all linears. The same inputs give the same result.

    Raises:
        CapacityError: not even the fewest bytes of each linear fit.
    """
    steps = hull_steps(choices)
    least, _ = total(choices, steps.start)
    if least > budget:
        raise CapacityError(
            f"{len(choices.sizes)} linears need at least {least} bytes, the budget is {budget}"
        )
    best = _fill(choices, _climb(steps, budget - least), budget)
    damage = total(choices, best)[1]
    for column in np.nonzero(np.all(choices.available, axis=0))[0]:
        uniform = np.full(len(best), column)
        # Where the next step does not fit, a uniform width may still use the budget to the byte.
        if total(choices, uniform)[0] <= budget and total(choices, uniform)[1] < damage:
            best = _fill(choices, uniform, budget)
            damage = total(choices, best)[1]
    return best


def _hulls(choices: Choices) -> Int64[np.ndarray, "linears widths"]:
    """The columns on the hull of each linear in their order, then -1.

    From each point to the one that saves the most damage per byte, for all linears at once.
    """
    sizes, available = choices.sizes, choices.available
    damage = np.where(available, choices.damage, np.inf)
    least = np.min(np.where(available, sizes, np.iinfo(np.int64).max), axis=1, keepdims=True)
    at = np.argmin(np.where(sizes == least, damage, np.inf), axis=1)
    hulls = np.full(sizes.shape, -1, np.int64)
    hulls[:, 0] = at
    for number in range(1, sizes.shape[1]):
        added = sizes - _chosen(sizes, at)[:, None]
        saved = _chosen(damage, at)[:, None] - damage
        is_useful = (added > 0) & (saved > 0)
        rate = np.divide(saved, added, out=np.full(sizes.shape, -1.0), where=is_useful)
        following = np.argmax(rate, axis=1)
        goes_on = _chosen(rate, following) >= 0
        if not np.any(goes_on):
            break
        hulls[goes_on, number] = following[goes_on]
        at = np.where(goes_on, following, at)
    return hulls


def _climb(steps: Steps, spare: int) -> Int64[np.ndarray, " linears"]:
    """Columns after the steps that `spare` bytes pay for, up to the first that does not fit."""
    taken = int(np.searchsorted(np.cumsum(steps.bytes), spare, side="right"))
    picks = steps.start.copy()
    # A linear's later steps stand behind its earlier ones, and the last assignment counts.
    picks[steps.linear[:taken]] = steps.target[:taken]
    return picks


def _fill(
    choices: Choices, picks: Int64[np.ndarray, " linears"], budget: int
) -> Int64[np.ndarray, " linears"]:
    """Spends what is left: later steps and columns off the hulls, while any saves damage and fits.

    In each round a linear changes once at most, those first that save the most per byte.
    """
    picks = picks.copy()
    spare = budget - total(choices, picks)[0]
    while True:
        added = choices.sizes - _chosen(choices.sizes, picks)[:, None]
        saved = _chosen(choices.damage, picks)[:, None] - choices.damage
        linear, column = np.nonzero(choices.available & (added <= spare) & (saved > 0))
        if len(linear) == 0:
            return picks
        added, saved = added[linear, column], saved[linear, column]
        # A change that needs no bytes comes first.
        rate = np.divide(saved, added, out=np.full(saved.shape, np.inf), where=added > 0)
        order = np.lexsort((column, linear, -saved, -rate))
        changed: set[int] = set()
        for change in order.tolist():
            of = int(linear[change])
            if of not in changed and added[change] <= spare:
                changed.add(of)
                picks[of] = column[change]
                spare -= int(added[change])


def _chosen(
    table: Shaped[np.ndarray, "linears widths"], picks: Int64[np.ndarray, " linears"]
) -> Shaped[np.ndarray, " linears"]:
    return np.take_along_axis(table, picks[:, None], axis=1)[:, 0]
