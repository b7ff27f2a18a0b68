"""A shielded call runs to its end whatever a signal handler raises."""

import signal
import threading
import time

import pytest

from moejax_serving.shield import Shield


def test_the_result_and_the_error_of_a_call_come_through():
    shield = Shield()
    assert shield(lambda: 3) == 3
    with pytest.raises(ValueError, match="no"):
        shield(lambda: (_ for _ in ()).throw(ValueError("no")))


def test_an_interrupt_waits_for_the_end_of_the_call():
    shield, ended = Shield(), threading.Event()

    def call():
        time.sleep(0.3)
        ended.set()

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            shield(call)
        assert ended.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
