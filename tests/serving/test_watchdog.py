"""Watchdog: it speaks up once, in time, and only when there is a reason."""

import threading
import time

import pytest

from moejax_serving.watchdog import Watchdog


def test_work_that_does_not_end_is_noticed_once() -> None:
    calls: list[float] = []
    noticed = threading.Event()

    def notice() -> None:
        calls.append(time.monotonic())
        noticed.set()

    begun = time.monotonic()
    watchdog = Watchdog(0.1, notice)
    watchdog.begin()
    assert noticed.wait(5)
    assert calls[0] - begun >= 0.1
    time.sleep(0.3)
    assert len(calls) == 1


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_ends_in_time_is_no_reason(is_closed: bool) -> None:
    calls: list[None] = []
    watchdog = Watchdog(0.5, lambda: calls.append(None))
    for _ in range(6):
        watchdog.begin()
        time.sleep(0.1)
    watchdog.close() if is_closed else watchdog.end()
    time.sleep(0.6)
    assert calls == []
    watchdog.close()


def test_a_rest_is_not_counted() -> None:
    noticed = threading.Event()
    watchdog = Watchdog(0.1, noticed.set)
    watchdog.begin()
    watchdog.end()
    time.sleep(0.2)
    assert not noticed.is_set()
    watchdog.begin()
    assert noticed.wait(5)


def test_any_limit_can_be_waited_for() -> None:
    noticed = threading.Event()
    before = threading.active_count()
    watchdog = Watchdog(1e300, noticed.set)
    watchdog.begin()
    time.sleep(0.05)
    assert threading.active_count() == before + 1
    watchdog.close()
