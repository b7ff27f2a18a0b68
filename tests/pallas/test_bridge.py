import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.pallas import bridge

X = jax.ShapeDtypeStruct((512,), jnp.float32)
FACTOR = jax.ShapeDtypeStruct((1,), jnp.float32)
GOOD = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.6.0+git1234"}


def scale_reference(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * factor[0]


def scale_triton(x: jax.Array, factor: jax.Array) -> jax.Array:
    import triton
    import triton.language as tl

    @triton.jit
    def scale_kernel(
        x_ref,  # [n]
        factor_ref,  # [1]
        out_ref,  # [n]
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ref + at, tl.load(x_ref + at) * tl.load(factor_ref))

    return bridge.triton_call(
        x, factor, kernel=scale_kernel, out_type=jax.typeof(x), grid=x.size // 128, BLOCK=128
    )


def make_scale(kernel: Callable[..., jax.Array] = scale_triton) -> Callable[..., jax.Array]:
    """A new function each time: jax remembers what it traced of the last one."""
    return bridge.with_reference(scale_reference, kernel)


def refuse(x: jax.Array, factor: jax.Array) -> jax.Array:
    raise NotImplementedError("n must be a multiple of 1024")


def arguments(platform: str = "cpu") -> tuple[jax.Array, jax.Array]:
    """0, 1, 2, ... and a half, on a device of this platform, where jax.jit runs what takes them."""
    arrays = (jnp.arange(512, dtype=jnp.float32), jnp.array([0.5], jnp.float32))
    return jax.device_put(arrays, jax.devices(platform)[0])


@pytest.fixture
def needs_kernels() -> None:
    if (reason := bridge.find_obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "find_obstacle", lambda: "kernels need triton")


def test_the_reference_runs_on_a_cpu():
    np.testing.assert_array_equal(jax.jit(make_scale())(*arguments()), np.arange(512) / 2)


def test_the_kernel_compiles_for_an_h200(needs_kernels):
    compiled = aot.compile_for(aot.h200_mesh(), make_scale(), X, FACTOR)
    assert 'custom_call_target="triton_kernel_call_ffi"' in compiled.as_text()


@pytest.mark.gpu
def test_the_kernel_equals_its_reference_on_a_gpu(needs_kernels):
    x, factor = arguments("gpu")
    np.testing.assert_array_equal(jax.jit(make_scale())(x, factor), np.arange(512) / 2)
    np.testing.assert_array_equal(make_scale()(x, factor), np.arange(512) / 2)


def test_a_cpu_needs_no_triton(without_triton):
    np.testing.assert_array_equal(jax.jit(make_scale())(*arguments()), np.arange(512) / 2)


def test_a_gpu_without_triton_is_told_so(without_triton):
    with pytest.raises(NotImplementedError, match="kernels need triton"):
        aot.compile_for(aot.h200_mesh(), make_scale(), X, FACTOR)


def test_what_a_kernel_refuses_still_runs_on_a_cpu(needs_kernels):
    np.testing.assert_array_equal(jax.jit(make_scale(refuse))(*arguments()), np.arange(512) / 2)


def test_what_a_kernel_refuses_stops_a_gpu_with_its_reason(needs_kernels):
    with pytest.raises(NotImplementedError, match="n must be a multiple of 1024"):
        aot.compile_for(aot.h200_mesh(), make_scale(refuse), X, FACTOR)


def test_supported_versions_pass():
    assert bridge.find_unsupported(GOOD) is None


@pytest.mark.parametrize(
    ("name", "version"),
    [("jax", "0.12.0"), ("jax-triton", "0.3.1"), ("triton", "3.5.1"), ("triton", "3.9.0")],
)
def test_another_version_is_refused_by_name(name, version):
    reason = bridge.find_unsupported(GOOD | {name: version})
    first, end = bridge.SUPPORTED[name]
    assert reason == f"kernels need {name} >= {first} and < {end}, and {version} is installed"


def test_a_missing_package_is_refused_by_name():
    reason = bridge.find_unsupported({"jax": "0.11.2"})
    assert reason == "kernels need jax-triton: install moejax[cuda12] or moejax[cuda13]"


def test_importing_the_bridge_imports_no_triton():
    program = "import sys, moejax.pallas.bridge; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
