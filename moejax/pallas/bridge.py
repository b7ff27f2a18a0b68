"""The one place that knows the versions of jax-triton and Triton.

Kernels are written in Triton or Gluon, called with `triton_call`, and joined to their references by
`with_reference`. Neither triton nor jax_triton is imported before a kernel is called, so that a
machine without them runs the references. A module that defines kernels needs triton at its top:
import it inside the function that calls `triton_call`.
"""

import copy
import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from moejax.pallas.kernel_cache import read_or_make

SUPPORTED = {
    "jax": ("0.11.1", "0.12"),
    "jax-triton": ("0.4.1", "0.5"),
    "triton": ("3.6", "3.9"),
}
"""For each package, the first version that works and the first that does not."""


def triton_call(
    *args: Any,
    kernel: Any,
    out_type: Any,
    grid: Any,
    compute_capability: int | None = None,
    backend_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Triton or Gluon kernel: `jax_triton.triton_call` of 0.4, whose arguments these are.

    `compute_capability` (90 for an H200) is asked of the device if it is left out: the first GPU
    of this machine, and where there is none, the devices of the mesh in `jax.set_mesh`.
    """
    jax_triton = _import_jax_triton()
    options = dict(backend_options or {})
    if _parse(importlib.metadata.version("triton")) >= (3, 7):
        # Left alone, triton writes PTX 9.1 or newer for Blackwell; CUDA 12.9 and 13.0 refuse it.
        options.setdefault("ptx_version", 88)
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        compute_capability=compute_capability,
        backend_options=options,
        **kwargs,
    )


def with_reference(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Joins a kernel with what it computes: runs `kernel` on a GPU and `reference` on a CPU.

    Both take the same positional arrays or pytrees and return the same shapes and dtypes; bind
    anything static with functools.partial. jax traces both and lowers one. If the packages for
    kernels are missing, or `kernel` raises NotImplementedError for these arguments, a GPU refuses
    with that reason, and a CPU goes on. jax.shard_map needs check_vma=False, since kernels do not
    say along which axes their results vary.
    """

    def kernel_or_refusal(*args: Any) -> Any:
        reason = find_obstacle()
        if reason is None:
            try:
                return kernel(*args)
            except NotImplementedError as error:
                reason = str(error)
        refuse = functools.partial(_refusal_p.bind, reason=reason)
        return jax.tree.map(refuse, reference(*args))

    def joined(*args: Any) -> Any:
        return lax.platform_dependent(*args, cpu=reference, cuda=kernel_or_refusal)

    return joined


@functools.cache
def find_obstacle() -> str | None:
    """Says why no kernel can be called here, or None."""
    installed = {}
    for name in SUPPORTED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return find_unsupported(installed)


def find_unsupported(installed: Mapping[str, str]) -> str | None:
    """Says which of these versions, by package, kernels cannot work with, or None."""
    for name, (first, end) in SUPPORTED.items():
        if name not in installed:
            return f"kernels need {name}: install moejax[cuda12] or moejax[cuda13]"
        if not _parse(first) <= _parse(installed[name]) < _parse(end):
            return f"kernels need {name} >= {first} and < {end}, and {installed[name]} is installed"
    return None


def _parse(version: str) -> tuple[int, ...]:
    """The release part of a version: (3, 6, 0) for 3.6.0+git1234."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    return tuple(int(part) for part in match[0].split("."))


@functools.cache
def _import_jax_triton() -> ModuleType:
    if (reason := find_obstacle()) is not None:
        raise NotImplementedError(reason)
    from triton.backends.nvidia import driver

    if not hasattr(driver, "TMA_TF32"):
        # Without this name, which triton has from 3.7 on, jax-triton takes NVIDIA's back end for
        # missing. It is used for tensor descriptors of tf32 only.
        driver.TMA_TF32 = 11
    import jax_triton
    from jax_triton import triton_lib

    triton_lib.compile_ttir_inplace = _compile_either(triton_lib.compile_ttir_inplace)
    triton_lib.TritonFunction._compile_kernel = _keep_compiled(
        triton_lib.TritonFunction._compile_kernel, triton_lib
    )
    return jax_triton


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What is kept of a kernel that was compiled."""

    name: str
    ptx: str
    shared_bytes: int
    scratch_bytes: int | None
    scratch_align: int | None


def _keep_compiled(compile_kernel: Callable[..., Any], triton_lib: ModuleType) -> Any:
    """jax-triton's compiler of kernels, which looks on disk before it reads a kernel's source."""

    def compile_or_read(
        function: Any, spec: Any, target: Any, backend: Any, backend_options: Mapping[str, Any]
    ) -> Any:
        def make() -> CompiledKernel:
            found = compile_kernel(function, spec, target, backend, backend_options)[3]
            if found.tensordesc_meta:
                raise NotImplementedError("kernels with tensor descriptors")
            return CompiledKernel(
                name=found.name,
                ptx=found.binary,
                shared_bytes=found.shared_mem_bytes,
                scratch_bytes=found.global_scratch_size,
                scratch_align=found.global_scratch_align,
            )

        # The first holds the source, with that of all functions that it calls.
        parts: list[Any] = [function.fn.cache_key, target]
        for values in (spec.signature, spec.attrs, spec.constants, backend_options):
            parts.append(sorted((str(k), repr(v)) for k, v in values.items()))
        kept = read_or_make([repr(part) for part in parts], make, CompiledKernel)
        scratch = (kept.scratch_bytes, kept.scratch_align)
        kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
            kept.name,
            backend_options["num_warps"],
            backend_options["num_ctas"],
            kept.shared_bytes,
            kept.ptx,
            "",  # its text, for a reader: it would be in every program
            target.arch,
            *(() if kept.scratch_bytes is None else scratch),
        )
        result = triton_lib.CompilationResult(kept.ptx, kept.name, kept.shared_bytes, "", "")
        return kernel, "", None, result

    return compile_or_read


def _compile_either(compile_triton: Callable[..., Any]) -> Callable[..., Any]:
    """jax-triton's compiler of modules, for Gluon's too.

    jax-triton takes Gluon kernels through the passes of Triton kernels, which choose layouts of
    their own, pipeline loads into shared memory, and need minutes for long programs.
    """

    def compile_module(module: Any, backend: Any, options: Any, target: Any) -> Any:
        # Only Gluon says in the module how many warps there are.
        if "ttg.num-warps" in str(module):
            backend = copy.copy(backend)
            backend.make_ttir = lambda module, *rest: module
            backend.make_ttgir = backend.gluon_to_ttgir
        return compile_triton(module, backend, options, target)

    return compile_module


def _raise_refusal(*args: Any, reason: str) -> Any:
    raise NotImplementedError(reason)


# Stands for a kernel that cannot be called: an identity that no device can be made to run. Raising
# while jax traces would also stop the CPU, which never runs this branch.
_refusal_p = Primitive("refused_kernel")
_refusal_p.def_impl(_raise_refusal)
_refusal_p.def_abstract_eval(lambda x, *, reason: x)
mlir.register_lowering(_refusal_p, lambda ctx, x, *, reason: _raise_refusal(reason=reason))
