"""Conversion streams: what it holds in memory depends on the largest tensor, not on the model."""

import os
import pathlib
import subprocess
import sys

import pytest

from converters import checkpoints

# 176 MB in all. The largest tensors, the stacked projections of attention and the embeddings, have
# 4 MiB; an expert has 3 MiB.
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_local_experts": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# Seen: 11 MiB, that is the tensor, Orbax's copy of it, and the staging of its writes.
LIMIT = 20 << 20

CONVERT = """
import sys
from moejax_converters.convert import convert

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

small, large, target = sys.argv[1:]
convert(small, target + "-small")
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
convert(large, target)
print(status("VmHWM") - before)
"""


@pytest.mark.shows("conversion", "memory bounded by the largest tensor")
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
@pytest.mark.parametrize("layout", checkpoints.LAYOUTS)
def test_memory_is_bounded_by_the_largest_tensor(layout: str, tmp_path: pathlib.Path):
    checkpoints.write(tmp_path / "small")
    checkpoints.write(tmp_path / "large", layout=layout, **SIZES)
    assert sum(path.stat().st_size for path in (tmp_path / "large").iterdir()) > 170e6
    result = subprocess.run(
        [sys.executable, "-c", CONVERT, *(tmp_path / name for name in ("small", "large", "out"))],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MALLOC_ARENA_MAX": "1",  # otherwise glibc keeps freed memory for each thread
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < LIMIT
