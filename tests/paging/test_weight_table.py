"""The table of weights: what it says of pages against a model of an arena's contents."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paging.arena_model import NUM_LINEARS, WIDTHS, Model


class AnyOrder(RuleBasedStateMachine):
    """Linears sink, rise, get their lower tables, go to the host and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(6, with_host=True)
        self.table = self.model.table

    linears = st.integers(0, NUM_LINEARS - 1)

    @rule(linear=linears, width=st.sampled_from(WIDTHS))
    def reaches(self, linear: int, width: int) -> None:
        names = self.table.missing(linear, width)
        self.model.apply(self.table.settle(linear, width, self.model.bring(linear, names)))
        assert self.table.has_lower[linear]

    @rule(linear=linears)
    def sinks(self, linear: int) -> None:
        width = int(self.table.widths[linear])
        if self.table.on_host[linear] or not self.table.has_lower[linear] or not 3 < width < 16:
            return
        change = self.table.settle(linear, width - 1, {})
        assert change.edits == ((linear % 2, linear // 2, -1, width - 1),)
        runs = self.table.runs_of(linear)
        assert len(change.freed) == runs.pages(f"plane.{width - 1}") + runs.pages(f"table.{width}")
        self.model.apply(change)
        assert self.table.has_lower[linear] == (width - 1 == 3)

    @rule(linear=linears)
    def gets_its_lower_table(self, linear: int) -> None:
        if not self.table.has_lower[linear]:
            width = int(self.table.widths[linear])
            names = self.table.missing(linear, width)
            assert names == (f"table.{width - 1}",)
            self.model.apply(self.table.settle(linear, width, self.model.bring(linear, names)))

    @rule(linear=linears, width=st.sampled_from(WIDTHS[:-1]))
    def goes_to_the_host(self, linear: int, width: int) -> None:
        self.model.apply(self.table.evict(linear, width))
        assert self.table.present(linear) == ()

    @rule(linear=linears)
    @precondition(lambda self: not self.table.has_lower.all())
    def cannot_sink_without_its_lower_table(self, linear: int) -> None:
        width = int(self.table.widths[linear])
        if not self.table.has_lower[linear]:
            with pytest.raises(ValueError, match=f"has no table.{width - 1} for width"):
                self.table.settle(linear, width - 1, {})

    @invariant()
    def all_is_where_the_tables_say(self) -> None:
        self.model.check()


AnyOrder.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_what_is_wrong_changes_nothing() -> None:
    model = Model(5, with_host=False)
    table = model.table
    before = table.experts().copy(), table.owned()
    with pytest.raises(ValueError, match="linear 3 has no plane.5, table.6 for width 6"):
        table.settle(3, 6, {})
    with pytest.raises(ValueError, match="linear 3: 1 pages of table.4 are not needed"):
        table.settle(3, 5, {"table.4": [7]})
    pages = model.runs[1].pages("plane.5")
    with pytest.raises(ValueError, match="pages of plane.5 are not needed"):
        table.settle(3, 6, {"plane.5": [1] * (pages + 1)})
    with pytest.raises(ValueError, match="no pool on the host"):
        table.evict(0, 3)
    np.testing.assert_array_equal(table.experts(), before[0])
    assert table.owned() == before[1]
