"""Widths of experts by what they cost in accuracy, chosen once for a number of bytes."""

import numpy as np

from moejax.arena.geometry import Geometry
from moejax.arena.widths import Widths, uniform
from moejax.checkpoint import Sensitivity
from moejax.errors import CapacityError
from moejax.paging.allocation import Choices, allocate, expert_choices
from moejax_serving.memory import human


def static_widths(costs: Sensitivity, geometry: Geometry, budget: int, linear_width: int) -> Widths:
    """The widths of least total error whose pages take at most `budget` bytes.

    Raises CapacityError if the experts do not fit at their least widths.
    """
    offered = choices(costs, geometry)
    if (least := int(offered.sizes.min(axis=1).sum())) > budget:
        raise CapacityError(
            f"the pages of {len(offered.sizes)} linears of experts take at least {human(least)} "
            f"({least} bytes); expert_memory (--expert-memory) is {human(budget)}"
        )
    picks = allocate(offered, budget)
    chosen = np.array(geometry.widths, np.int32)[picks].reshape(costs.experts.shape[:-1])
    return Widths(chosen, uniform(geometry, linear_width).linears)


def choices(costs: Sensitivity, geometry: Geometry) -> Choices:
    """What each linear of the experts may be: bytes of its pages, and nats per token."""
    sizes = [
        [runs.pages_at(width) * geometry.page_bytes for width in geometry.widths]
        for runs in geometry.expert_runs
    ]
    return expert_choices(costs.experts, np.array(sizes, np.int64))
