"""What programs take on the device, kernel by kernel, as jax's profiler sees it."""

import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax


def read_times(folder: str) -> dict[str, list[float]]:
    """Microseconds of every kernel that ran on GPUs, by name, from a folder of a trace."""
    found: dict[str, list[float]] = {}
    (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        found.setdefault(event.name, []).append(event.duration_ns / 1e3)
    if not found:
        raise SystemExit("the profiler saw no kernels: a GPU is needed")
    return found


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
        found = read_times(folder)
    return {name: statistics.median(t) * len(t) / calls for name, t in found.items()}
