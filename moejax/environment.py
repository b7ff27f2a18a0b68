"""What the process environment must say before jax is imported."""

import pathlib
from collections.abc import MutableMapping

_MEMORY_FRACTION = "0.92"  # the rest is for CUDA, its libraries and its graphs
_DEVICES = ("dev/nvidia[0-9]*", "dev/dxg")  # Linux, and Linux inside Windows


def prepare_environment(
    environ: MutableMapping[str, str], root: pathlib.Path = pathlib.Path("/")
) -> None:
    """Chooses the CPU where there is no GPU, and most of a GPU's memory where there is one.

    What the user has set stays. `root` is where device files are looked for.
    """
    if not _has_gpu(environ, root):
        environ.setdefault("JAX_PLATFORMS", "cpu")
    elif "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environ:  # jax refuses both names at once
        environ.setdefault("XLA_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)


def _has_gpu(environ: MutableMapping[str, str], root: pathlib.Path) -> bool:
    if environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return any(next(root.glob(pattern), None) is not None for pattern in _DEVICES)
