"""What programs take on the device, kernel by kernel, as jax's profiler sees it."""

import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """A kernel that ran. Microseconds, from any moment on."""

    start: float
    microseconds: float
    name: str


def read_events(folder: str) -> list[Event]:
    """All kernels that ran on GPUs, in order, from a folder of a trace."""
    found: list[Event] = []
    (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        times = (event.start_ns / 1e3, event.duration_ns / 1e3)
                        found.append(Event(*times, event.name))
    if not found:
        raise SystemExit("the profiler saw no kernels: a GPU is needed")
    return sorted(found)


def busy_microseconds(events: Sequence[Event]) -> float:
    """How long at least one of the events, which are in order, was under way."""
    total, end = 0.0, float("-inf")
    for event in events:
        stop = event.start + event.microseconds
        total += max(stop - max(event.start, end), 0.0)
        end = max(end, stop)
    return total


def kernel_times(program: Callable[..., Any], *args: Any, calls: int = 10) -> dict[str, float]:
    """Microseconds of a call by kernel: the median of each, times how often a call runs it.

    Gaps between kernels are not in it. The program is called once before.
    """
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                result = program(*args)
            jax.block_until_ready(result)
        found: dict[str, list[float]] = {}
        for event in read_events(folder):
            found.setdefault(event.name, []).append(event.microseconds)
    return {name: statistics.median(t) * len(t) / calls for name, t in found.items()}
