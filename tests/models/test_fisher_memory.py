"""The memory of a calibration depends on the largest layer, not on the model."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.calibrated import (
    Model,
    write,
)
from models.small_configs import make_config
from moejax.config import segments_of
from moejax.layers.experts import Stacked
from moejax.models.decoder import abstract_params

# Of a layer with 16 experts.
WIDE = 256
LAYER_BYTES = 16 * 3 * WIDE * WIDE * 4
LAYERS = 10

CALIBRATE = """
import pathlib, sys
import numpy as np
import jax
from moejax.checkpoint import Checkpoint
from moejax.models.fisher import layer_fishers
from moejax.models.fisher_states import States

jax.config.update("jax_disable_most_optimizations", True)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

put, peaks = States.put_inputs, []

def put_inputs(self, rows):
    put(self, rows)
    peaks.append(peak())

States.put_inputs = put_inputs
folder = pathlib.Path(sys.argv[1])
checkpoint, sequences = Checkpoint.open(folder / "model"), np.zeros((2, 16), np.int32)
for fisher in layer_fishers(checkpoint, sequences, folder=folder / "states"):
    del fisher
    peaks.append(peak())
print(*peaks)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
@pytest.mark.slow
def test_memory_does_not_grow_from_layer_to_layer(tmp_path: pathlib.Path) -> None:
    config = make_config("phi")
    (kind, _) = config.layers
    router = dataclasses.replace(kind.feed_forward.router, num_experts=16)
    part = dataclasses.replace(kind.feed_forward, router=router, expert_width=WIDE)
    kind = dataclasses.replace(kind, feed_forward=part)
    config = dataclasses.replace(config, hidden_size=WIDE, segments=segments_of([kind] * LAYERS))
    params = jax.tree.map(
        lambda a: jnp.full(a.shape, 0.01, a.dtype), abstract_params(config, "float32")
    )
    of_layer = Stacked(
        np.full((16, 2, WIDE, WIDE), 0.01, np.float32),
        np.full((16, WIDE, WIDE), 0.01, np.float32),
    )
    write(Model(config, params, dict.fromkeys(range(LAYERS), of_layer)), tmp_path / "model")
    result = subprocess.run(
        [sys.executable, "-c", CALIBRATE, tmp_path],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
            # Otherwise glibc keeps freed memory, for each thread and between what is in use.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    peaks = np.array(result.stdout.split(), np.int64)
    # Inputs of all layers, and of what comes after them; then the layers, from the last one on.
    forward, backward = peaks[: LAYERS + 1], peaks[LAYERS + 1 :]
    assert len(backward) == LAYERS
    # The first layers of each way bring what compiling takes, and the most that a layer needs.
    for of_way in (forward, backward):
        assert of_way[-1] - of_way[2] < 3 * LAYER_BYTES
