"""Kernels in Triton's interpreter: what they compute, without a GPU.

The interpreter is chosen when a kernel is defined, by the environment, so it runs in a process of
its own, which this file starts and is. Programs run one after the other, so it finds no race.
"""

import importlib
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from np_tensor import NpTensor


class Call(NamedTuple):
    kernel: str
    """module:name"""
    grid: int
    arrays: Sequence[np.ndarray]
    constants: Mapping[str, Any]


def interpret(folder: pathlib.Path, calls: Sequence[Call]) -> list[list[np.ndarray]]:
    """The arrays of each call after it."""
    # The interpreter of 3.6 takes no loop bounds that are computed in the kernel.
    pytest.importorskip("triton", minversion="3.7")
    given, found = folder / "calls", folder / "found"
    given.write_bytes(pickle.dumps([tuple(call) for call in calls]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, __file__, given, found], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return pickle.loads(found.read_bytes())


def main(given: str, found: str) -> None:
    results = []
    for name, grid, arrays, constants in pickle.loads(pathlib.Path(given).read_bytes()):
        module, kernel = name.split(":")
        # Calls may have been given the same array.
        tensors = [NpTensor(array.copy()) for array in arrays]
        getattr(importlib.import_module(module), kernel)[(grid,)](*tensors, **constants)
        results.append([tensor.array for tensor in tensors])
    pathlib.Path(found).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
