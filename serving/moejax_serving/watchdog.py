"""Notices work that does not come to an end."""

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `on_timeout`, once, when more than `limit` seconds lie between `begin` and `end`.

    The call comes from a thread of the watchdog's own, which sleeps until a limit may be reached:
    work of many short parts, each with its `begin`, hardly wakes it.
    """

    def __init__(self, limit: float, on_timeout: Callable[[], None]) -> None:
        self._limit = min(limit, threading.TIMEOUT_MAX)
        self._on_timeout = on_timeout
        self._changed = threading.Condition()  # guards what follows
        self._deadline: float | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name="moejax-watchdog", daemon=True).start()

    def begin(self) -> None:
        """Work begins; what was begun before has ended."""
        with self._changed:
            is_first = self._deadline is None
            self._deadline = time.monotonic() + self._limit
            if is_first:  # else the thread will look in time: deadlines only grow
                self._changed.notify()

    def end(self) -> None:
        """Nothing is to be watched until the next `begin`."""
        with self._changed:
            self._deadline = None

    def close(self) -> None:
        """Ends the thread; `on_timeout` is not called any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed and (left := self._time_left()) != 0.0:
                self._changed.wait(left)
            if self._is_closed:
                return
        self._on_timeout()

    def _time_left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())
