"""The mover against a model of an arena: in any order, with faults, and by worked examples."""

import collections
import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moejax.errors import CheckpointError
from moejax.paging.mover import Mover, Ports
from moejax.paging.weight_table import Change
from paging.arena_model import NUM_LINEARS, NUM_PAGES, WIDTHS, Model

WORDS = 4


@dataclasses.dataclass
class Sent:
    """What the device is sent; it arrives when a test says so."""

    values: np.ndarray
    has_arrived: bool = False

    def is_ready(self) -> bool:
        return self.has_arrived

    def block_until_ready(self) -> "Sent":
        self.has_arrived = True
        return self


class World:
    """A model of the arena, with the other ends of a mover's ports."""

    def __init__(
        self,
        width: int = 4,
        *,
        shipment_pages: int = 5,
        most_in_flight: int = 2,
        pages: int = 10_000,
    ) -> None:
        self.model = Model(width, with_host=True)
        self.names: dict[int, tuple[int, str, int]] = {}
        self.sent: collections.deque[Sent] = collections.deque()
        self.faults: collections.deque[Exception | None] = collections.deque()
        self.room = pages
        self.mover = Mover(
            self.model.table,
            Ports(self.read, self.take, self.give_back, self.own, self.commit, self.send),
            page_words=WORDS,
            shipment_pages=shipment_pages,
            most_in_flight=most_in_flight,
        )

    def _maybe_fail(self) -> None:
        if self.faults and (fault := self.faults.popleft()) is not None:
            raise fault

    def read(self, linear: int, name: str) -> np.ndarray:
        """Pages whose first word is the number of what they hold."""
        self._maybe_fail()
        found = np.zeros((self.model.runs[linear % 2].pages(name), WORDS), np.uint32)
        for i in range(len(found)):
            found[i, 0] = len(self.names)
            self.names[len(self.names)] = (linear, name, i)
        return found

    def take(self, n: int) -> list[int] | None:
        if n > min(self.room, len(self.model.free)):
            return None
        taken = [self.model.free.pop() for _ in range(n)]
        self.model.reserved.update(taken)
        return taken

    def give_back(self, pages: Any) -> None:
        assert set(pages) <= self.model.reserved
        self.model.reserved -= set(pages)
        self.model.free += pages
        for page in pages:
            self.model.contents[page] = "another's"

    def own(self, pages: Any) -> None:
        assert set(pages) <= self.model.reserved
        self.model.reserved -= set(pages)

    def send(self, values: np.ndarray) -> Sent:
        self._maybe_fail()
        self.sent.append(Sent(values))
        return self.sent[-1]

    def commit(self, ids: np.ndarray, sent: Sent) -> None:
        assert sent.has_arrived
        for page, value in zip(ids.tolist(), sent.values, strict=True):
            if page <= NUM_PAGES:
                assert page in self.model.reserved
                self.model.contents[page] = self.names[int(value[0])]

    def arrive(self) -> None:
        waiting = [sent for sent in self.sent if not sent.has_arrived]
        if waiting:
            waiting[0].has_arrived = True

    def poll(self, most_edits: int = 10_000) -> list[Change]:
        changes = self.mover.poll(most_edits)
        assert sum(len(change.edits) for change in changes) <= most_edits
        for change in changes:
            self.model.apply(change)
        self.model.check()
        return changes

    def finish(self) -> None:
        for _ in range(1000):
            if self.mover.is_idle:
                return
            self.arrive()
            self.poll()
        raise AssertionError("it never ends")


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wanted: dict[int, int] = {}

    linears = st.integers(0, NUM_LINEARS - 1)

    @rule(linear=linears, width=st.sampled_from(WIDTHS))
    def orders(self, linear: int, width: int) -> None:
        mover = self.world.mover
        if mover.is_moving(linear):
            with pytest.raises(ValueError, match="is moving"):
                mover.order(linear, width)
        elif mover.order(linear, width):
            self.wanted[linear] = width

    @rule(linear=linears)
    def cancels(self, linear: int) -> None:
        self.world.mover.cancel(linear)
        self._forget_failed()

    @rule(linear=linears)
    def sinks(self, linear: int) -> None:
        """By another hand, which sees to it that nothing is moving."""
        table = self.world.model.table
        width = int(table.widths[linear])
        if self.world.mover.is_moving(linear) or table.on_host[linear]:
            return
        if table.has_lower[linear] and 3 < width < 16:
            self.world.model.apply(table.settle(linear, width - 1, {}))

    @rule()
    def arrives(self) -> None:
        self.world.arrive()

    @rule(most_edits=st.sampled_from([0, 3, 20, 10_000]))
    def polls(self, most_edits: int) -> None:
        self.world.poll(most_edits)
        self._check_settled()

    @rule(
        fault=st.sampled_from([None, CheckpointError("broken"), OSError("gone"), RuntimeError("x")])
    )
    def fails_next(self, fault: Exception | None) -> None:
        # Only a transfer raises RuntimeError: the device.
        if not isinstance(fault, RuntimeError):
            self.world.faults.append(fault)

    def _check_settled(self) -> None:
        self._forget_failed()
        table = self.world.model.table
        for linear, width in list(self.wanted.items()):
            if not self.world.mover.is_moving(linear):
                assert table.widths[linear] == width and not table.on_host[linear]
                del self.wanted[linear]

    def _forget_failed(self) -> None:
        mover = self.world.mover
        table = self.world.model.table
        for linear, width in list(self.wanted.items()):
            gone = not mover.is_moving(linear)
            if gone and (table.widths[linear] != width or not table.has_lower[linear]):
                del self.wanted[linear]

    @invariant()
    def pages_add_up(self) -> None:
        self.world.model.check()

    def teardown(self) -> None:
        self.world.faults.clear()
        self.world.finish()
        assert not self.world.model.reserved


AnyOrder.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def pages_needed(world: World, linear: int, width: int) -> int:
    table = world.model.table
    return sum(map(table.runs_of(linear).pages, table.missing(linear, width)))


def test_a_linear_rises_once_all_has_arrived() -> None:
    world = World(4, shipment_pages=1)
    table = world.model.table
    needed = pages_needed(world, 0, 5)
    assert needed > 2
    before = len(world.model.free)
    assert world.mover.order(0, 5)
    assert len(world.model.reserved) == needed == before - len(world.model.free)
    rounds = 0
    while table.widths[0] == 4:
        assert world.mover.is_moving(0)
        world.arrive()
        world.poll()
        rounds += 1
    assert rounds >= needed
    assert table.has_lower[0] and not world.mover.is_moving(0) and not world.model.reserved
    assert world.mover.counts.settled == 1
    assert world.mover.counts.bytes_sent == needed * WORDS * 4


def test_no_more_is_in_flight_than_allowed() -> None:
    world = World(4, shipment_pages=2, most_in_flight=2)
    world.mover.order(0, 6)
    for _ in range(5):
        world.poll()
    assert len(world.sent) == 2
    assert world.mover.staging_bytes == 2 * 2 * WORDS * 4
    world.arrive()
    world.poll()
    assert len(world.sent) == 3


def test_transfers_are_shared_by_orders() -> None:
    world = World(4, shipment_pages=1000)
    for linear in range(NUM_LINEARS):
        world.mover.order(linear, 5)
    world.poll()
    assert len(world.sent) == 1
    world.arrive()
    assert len(world.poll()) == NUM_LINEARS


def test_changes_wait_for_room_in_the_next_step() -> None:
    world = World(4, shipment_pages=1000)
    edits = [pages_needed(world, linear, 5) + 1 for linear in (0, 1)]
    world.mover.order(0, 5)
    world.mover.order(1, 5)
    world.poll()
    world.arrive()
    assert world.poll(edits[0] - 1) == []
    (change,) = world.poll(edits[0] + edits[1] - 1)
    assert len(change.edits) == edits[0]
    (change,) = world.poll(edits[1])
    assert len(change.edits) == edits[1]


def test_without_pages_there_is_no_order() -> None:
    world = World(4)
    world.room = pages_needed(world, 0, 5) - 1
    assert not world.mover.order(0, 5)
    assert not world.mover.is_moving(0) and not world.model.reserved
    world.room += 1
    assert world.mover.order(0, 5)


@pytest.mark.parametrize("fault", [CheckpointError("plane.4 is damaged"), OSError("no such disk")])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_linear_that_cannot_be_read_stays_as_it_is(
    fault: Exception, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of its runs it is; those read before it are not sent."""
    world = World(4, shipment_pages=1000)
    before = len(world.model.free)
    world.mover.order(0, 6)
    world.faults.extend([None] * number + [fault])
    for _ in range(3):
        world.poll()
        world.arrive()
    assert world.mover.is_idle
    assert world.model.table.widths[0] == 4
    assert len(world.model.free) == before
    assert f"linear 0 stays at its width: {fault}" in caplog.text
    assert world.mover.counts.failed == 1
    # Once more, without a fault.
    world.mover.order(0, 6)
    world.finish()
    assert world.model.table.widths[0] == 6


def test_a_transfer_that_fails_leaves_all_of_its_linears_as_they_were() -> None:
    world = World(4, shipment_pages=1000)
    world.mover.order(0, 5)
    world.mover.order(1, 5)
    # Two runs are read of each before the transfer.
    world.faults.extend([None] * 4 + [RuntimeError("the link is gone")])
    world.poll()
    assert world.mover.is_idle and world.mover.counts.failed == 2
    assert world.model.table.widths[:2].tolist() == [4, 4]
    assert not world.model.reserved


def test_pages_of_what_is_given_up_are_not_written_to() -> None:
    """Not even by a transfer that was on its way: another may hold them by then."""
    world = World(4, shipment_pages=1000)
    world.mover.order(0, 5)
    world.mover.order(1, 5)
    world.poll()
    world.mover.cancel(0)
    assert world.mover.counts.cancelled == 1
    world.arrive()
    (change,) = world.poll()  # `commit` checks that it writes to reserved pages only
    assert world.model.table.widths[:2].tolist() == [4, 5]
    assert all(kind == 1 for kind, *_ in change.edits)
    world.mover.cancel(0)  # nothing is on its way
    assert world.mover.counts.cancelled == 1


def test_the_lower_table_follows_what_has_sunk() -> None:
    world = World(5)
    table = world.model.table
    world.model.apply(table.settle(0, 4, {}))
    assert not table.has_lower[0]
    assert world.mover.order(0, 4)
    world.finish()
    assert table.has_lower[0] and table.widths[0] == 4


def test_a_linear_comes_back_from_the_host() -> None:
    world = World(5)
    table = world.model.table
    world.model.apply(table.evict(3, 4))
    world.model.check()
    assert table.on_host[3] and table.present(3) == ()
    assert world.mover.order(3, 6)
    world.finish()
    assert not table.on_host[3] and table.widths[3] == 6


def test_nothing_to_bring_is_settled_at_once() -> None:
    world = World(5)
    assert world.mover.order(0, 5)
    assert len(world.poll()) == 1
    assert world.mover.is_idle and not world.sent


def test_waiting_is_for_the_oldest_transfer() -> None:
    world = World(4, shipment_pages=2)
    world.mover.order(0, 5)
    world.mover.wait()  # nothing has been sent
    world.poll()
    world.mover.wait()
    assert [sent.has_arrived for sent in world.sent] == [True, False]
