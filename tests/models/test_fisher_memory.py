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
LARGE_LAYERS = 10

CALIBRATE = """
import pathlib, sys
import numpy as np
import jax
from moejax.checkpoint import Checkpoint
from moejax.models.fisher import layer_fishers

jax.config.update("jax_disable_most_optimizations", True)

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def calibrate(name):
    checkpoint = Checkpoint.open(pathlib.Path(sys.argv[1]) / name)
    sequences = np.zeros((2, 16), np.int32)
    for fisher in layer_fishers(checkpoint, sequences, folder=pathlib.Path(sys.argv[1]) / "states"):
        del fisher

calibrate("small")
calibrate("small")
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
calibrate("large")
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_memory_is_bounded_by_one_layer(tmp_path: pathlib.Path) -> None:
    config = make_config("phi")
    (kind, _) = config.layers
    router = dataclasses.replace(kind.feed_forward.router, num_experts=16)
    part = dataclasses.replace(kind.feed_forward, router=router, expert_width=WIDE)
    kind = dataclasses.replace(kind, feed_forward=part)
    for name, count in (("small", 2), ("large", LARGE_LAYERS)):
        large = dataclasses.replace(config, hidden_size=WIDE, segments=segments_of([kind] * count))
        params = jax.tree.map(
            lambda a: jnp.full(a.shape, 0.01, a.dtype), abstract_params(large, "float32")
        )
        of_layer = Stacked(
            np.full((16, 2, WIDE, WIDE), 0.01, np.float32),
            np.full((16, WIDE, WIDE), 0.01, np.float32),
        )
        write(Model(large, params, dict.fromkeys(range(count), of_layer)), tmp_path / name)
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
    # A layer's experts as they lie in the file, and in float32; their gradients, and the sums. Seen
    # are 6 to 8 layers; 15 where all files stay mapped.
    assert int(result.stdout) < 9 * LAYER_BYTES
