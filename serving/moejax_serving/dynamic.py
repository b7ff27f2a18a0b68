"""Planner dynamic: how an engine starts with it, and what trades precision for KV from then on."""

import numpy as np

from moejax.arena.geometry import Geometry
from moejax.arena.widths import Widths, uniform
from moejax.checkpoint import Checkpoint, Sensitivity
from moejax.config import DENSE_WIDTH
from moejax.errors import ConfigError
from moejax.paging.allocation import Choices, allocate
from moejax.paging.mover import Mover, Ports
from moejax.paging.planner import make_rates
from moejax.paging.weight_table import WeightTable
from moejax_serving.config import EngineConfig
from moejax_serving.kv_blocks import BlockPool
from moejax_serving.loader import expert_reader
from moejax_serving.memory import STAGING_BYTES, MemoryPlan
from moejax_serving.pages import Owner, PagePool
from moejax_serving.runner import Runner
from moejax_serving.static_plan import choices
from moejax_serving.trader import Limits, Trader

IN_FLIGHT = 2
"""Transfers at once: one is read from the host while the other is on its way."""
SHIPMENT_BYTES = STAGING_BYTES // 4
"""Of a transfer."""
LOW_SHARE = 1 / 32
"""Of the most pages that KV may take: linears sink when fewer are available."""
HIGH_SHARE = 1 / 8
"""Of these: linears rise when more are available."""
RESIDENCE = 32
"""Steps for which a linear keeps a width before it rises."""


def offered_widths(geometry: Geometry, config: EngineConfig) -> tuple[int, ...]:
    """The widths that linears may have, from `expert_bits` on. Raises ConfigError."""
    quantization = geometry.quantization
    if quantization is None:
        raise ConfigError(
            "planner dynamic needs a quantised model: moejax-convert --quantize any-precision"
        )
    stored = [width for width in quantization.widths if width != DENSE_WIDTH]
    least = stored[0] if config.expert_bits == "auto" else config.expert_bits
    if least not in stored:
        raise ConfigError(
            f"planner dynamic: expert_bits {least} is the least width, and must be one of {stored}"
        )
    return tuple(width for width in stored if width >= int(least))


def _offered(costs: Sensitivity, geometry: Geometry, widths: tuple[int, ...]) -> Choices:
    """What each linear costs at these widths: in pages, and in nats per token."""
    found = choices(costs, geometry)
    columns = [geometry.widths.index(width) for width in widths]
    return Choices(
        sizes=found.sizes[:, columns] // geometry.page_bytes, damage=found.damage[:, columns]
    )


def low_pages(plan: MemoryPlan, geometry: Geometry) -> int:
    """Pages of which fewer must not be available for long: a block of each kind at least."""
    least = sum(kind.pages_per_block for kind in geometry.kinds)
    return min(max(int(plan.kv_pages * LOW_SHARE), least), plan.kv_pages // 2)


def _high_pages(plan: MemoryPlan, geometry: Geometry) -> int:
    """What is left to new sequences and the prefix cache before linears rise."""
    largest = max(
        sum(map(runs.pages, (f"plane.{width - 1}", f"table.{width}")))
        for runs in geometry.expert_runs
        for width in geometry.widths[1:]
        if width != DENSE_WIDTH
    )
    return max(int(plan.kv_pages * HIGH_SHARE), low_pages(plan, geometry) + 1) + largest


def start_widths(
    costs: Sensitivity,
    geometry: Geometry,
    widths: tuple[int, ...],
    plan: MemoryPlan,
    linear_width: int,
) -> Widths:
    """The least damage that all memory buys, but for what KV needs at once.

    `plan`: made with the least widths, whose pages every linear has.
    """
    offered = _offered(costs, geometry, widths)
    least = int(offered.sizes[:, 0].sum())
    room = max(0, plan.kv_pages - _high_pages(plan, geometry))
    picks = allocate(offered, least + room)
    chosen = np.array(widths, np.int32)[picks].reshape(costs.experts.shape[:-1])
    return Widths(chosen, uniform(geometry, linear_width).linears)


def most_edits(geometry: Geometry) -> int:
    """Edits of a step: twice what the largest change needs, and enough to sink many linears."""
    largest = max(runs.num_slots + 1 for runs in geometry.expert_runs)
    return max(256, 2 * largest)


def make_trader(
    checkpoint: Checkpoint,
    geometry: Geometry,
    config: EngineConfig,
    plan: MemoryPlan,
    widths: Widths,
    slots: list[np.ndarray],
    pages: PagePool,
    blocks: BlockPool,
    runner: Runner,
) -> Trader:
    """A trader of an engine whose experts have just been loaded into these pages."""

    def take(n: int) -> list[int] | None:
        return pages.take(n, Owner.RESERVED) if blocks.free_pages(n) else None

    table = WeightTable(geometry, widths.experts, slots)
    ports = Ports(
        read=expert_reader(checkpoint, geometry),
        take=take,
        give_back=pages.give_back,
        own=lambda given: pages.hand_over(given, Owner.WEIGHTS),
        commit=runner.commit,
        send=runner.send,
    )
    mover = Mover(
        table,
        ports,
        page_words=geometry.page_words,
        shipment_pages=shipment_pages(geometry),
        most_in_flight=IN_FLIGHT,
    )
    offered = offered_widths(geometry, config)
    rates = make_rates(_offered(checkpoint.sensitivity(), geometry, offered), offered)
    limits = Limits(
        low_pages=low_pages(plan, geometry),
        high_pages=_high_pages(plan, geometry),
        most_edits=most_edits(geometry),
        residence=RESIDENCE,
    )
    return Trader(table, mover, rates, pages, limits)


def shipment_pages(geometry: Geometry) -> int:
    """Pages of a transfer."""
    return max(1, SHIPMENT_BYTES // geometry.page_bytes)
