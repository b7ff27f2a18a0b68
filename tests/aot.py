"""Compiles programs for an H200 on a machine without a GPU, and reads what came out.

XLA's GPU compiler is inside jax's CUDA wheels and needs only a description of the device. The
result has the optimised and scheduled HLO, memory figures and compiled kernels; it cannot be run.
Tests say `import aot`; those that ask for a mesh are skipped where the wheels are missing (extra
`compile`).
"""

import importlib.util
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 15 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

OPTIONS: Mapping[str, Any] = {
    "xla_gpu_autotune_level": 0,  # there is no device to measure on
    "xla_gpu_enable_triton_gemm": False,  # products become cuBLASLt calls, as often after tuning
}


def h200_mesh(num_devices: int = 1, axis_name: str = "x") -> Mesh:
    """A mesh of devices that can be compiled for and not run on."""
    if (reason := find_obstacle()) is not None:
        pytest.skip(reason)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), (axis_name,), axis_types=(AxisType.Auto,))


def find_obstacle() -> str | None:
    """Says why nothing can be compiled for a GPU here, or None."""
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if not any(_find_package(name) for name in plugins):
        return "needs jax's CUDA plugin: install moejax[compile]"
    # Without these two files XLA would end the process with a segmentation fault.
    roots = [pathlib.Path(os.environ.get("CUDA_ROOT", "/usr/local/cuda"))]
    roots += _find_package("nvidia.cu13") + _find_package("nvidia.cuda_nvcc")
    files = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")
    if not any(all((root / file).exists() for file in files) for root in roots):
        return "needs ptxas and libdevice of CUDA: install moejax[compile]"
    return None


def compile_for(
    mesh: Mesh,
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles fun for a mesh. args: ShapeDtypeStructs, replicated unless they have a sharding."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(arg: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=arg.sharding or replicated)

    placed = jax.tree.map(place, args)
    # The mesh in the context tells kernels which device they are lowered for.
    with jax.set_mesh(mesh):
        lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*placed)
    return lowered.compile(compiler_options={**OPTIONS, **(compiler_options or {})})


def copies(compiled: Any, min_bytes: int = 1 << 20) -> list[str]:
    """The copy instructions of at least min_bytes in the optimised HLO, as text."""
    found = []
    for line in compiled.as_text().splitlines():
        # %copy = bf16[8,128]{1,0} copy(...), %copy-start = (bf16[8,128]{1,0}, ...) copy-start(...)
        match = re.search(r"= \(?([a-z]+)(\d*)\w*\[([\d,]*)\].* copy(-start)?\(", line)
        if match is None:
            continue
        bits = 8 if match[1] == "pred" else int(match[2])
        if math.prod(int(n) for n in match[3].split(",") if n) * bits // 8 >= min_bytes:
            found.append(line.strip())
    return found


def large_matrices(compiled: Any, min_bytes: int = 1 << 20) -> list[str]:
    """Fusions in loops that write matrices of floats of at least min_bytes, as text.

    In a step of few tokens these are weights that are copied before they are used.
    """
    found = []
    for line in itertools.chain(*_loop_bodies(compiled)):
        match = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*?) fusion(?:-start)?\(", line)
        # The slice of a stack that goes into a product with it is none.
        if match is None or match[1].startswith("dynamic_slice_fusion"):
            continue
        for kind, bits, shape in re.findall(r"(b?f)(\d+)\[(\d+(?:,\d+){1,2})\]", match[2]):
            stacked = "fusion-start" in line and match[2].index(f"{kind}{bits}[{shape}]") < 3
            size = math.prod(int(n) for n in shape.split(",")) * int(bits) // 8
            if size >= min_bytes and not stacked:
                found.append(line.strip())
    return found


def slices_in_loops(compiled: Any) -> list[str]:
    """Fusions in loops that do nothing but slice, as text.

    On the device they are copies whose source changes from one round of the loop to the next, and
    XLA records the CUDA graph that has one anew for each round.
    """
    computations = _computations(compiled)
    free = {"parameter", "constant", "bitcast", "clamp", "tuple", "dynamic-slice"}
    found = []
    for line in itertools.chain(*_loop_bodies(compiled)):
        called = re.search(r" fusion(?:-start)?\(.*calls=%([\w.-]+)", line)
        if called is not None:
            kinds = {kind for row in computations[called[1]] if (kind := _operation(row))}
            if "dynamic-slice" in kinds and kinds <= free:
                found.append(line.strip())
    return found


def launches_in_loops(compiled: Any) -> list[int]:
    """Of each loop how many kernels a round launches."""
    kinds = {"fusion", "fusion-start", "custom-call", "copy", "sort"}
    return [sum(_operation(line) in kinds for line in body) for body in _loop_bodies(compiled)]


def _computations(compiled: Any) -> dict[str, list[str]]:
    """The lines of each computation of a compiled program, by its name."""
    parts = re.split(r"\n(?=%[\w.-]+ \(|ENTRY )", compiled.as_text())
    names = (re.match(r"(?:ENTRY )?%([\w.-]+) \(", part) for part in parts)
    return {n[1]: part.splitlines()[1:] for n, part in zip(names, parts, strict=True) if n}


def _loop_bodies(compiled: Any) -> list[list[str]]:
    bodies = dict.fromkeys(re.findall(r"body=%([\w.-]+)", compiled.as_text()))
    computations = _computations(compiled)
    return [computations[name] for name in bodies]


def _operation(line: str) -> str | None:
    """What an instruction does, such as fusion."""
    match = re.match(r"\s+(?:ROOT )?%[\w.-]+ = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line)
    return match[1] if match else None


def has_remat(compiled: Any) -> bool:
    """Whether XLA computes anything twice to save memory."""
    return re.search(r"%[\w.-]*\.remat", compiled.as_text()) is not None


def _find_package(name: str) -> list[pathlib.Path]:
    """The folders of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return []
    return [] if spec is None else [pathlib.Path(p) for p in spec.submodule_search_locations or ()]
