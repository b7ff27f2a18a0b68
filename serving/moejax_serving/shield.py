"""A call that no signal cuts short."""

import concurrent.futures
import threading
from collections.abc import Callable


class Shield:
    """Runs calls in a thread of its own, since signal handlers raise in the main thread only.

    A step that is cut short between the program's call and its return has given its arena away and
    got none back. What a handler raises, such as KeyboardInterrupt, comes when the call has ended.
    """

    def __init__(self) -> None:
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "moejax-step")

    def __call__[T](self, call: Callable[[], T]) -> T:
        """The result of a call."""
        if threading.current_thread() is not threading.main_thread():
            return call()
        future = self._worker.submit(call)
        raised: BaseException | None = None
        while True:
            try:
                concurrent.futures.wait([future])
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
        return future.result()
