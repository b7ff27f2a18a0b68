"""Which kernels are chosen."""

import pytest

from moejax.errors import ConfigError
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.dispatch import (
    CHOICES,
    REFERENCE,
    Kernels,
    choose_kernels,
)
from moejax_serving.config import KERNELS, EngineConfig

H200 = {"platform": "gpu", "device_kind": "NVIDIA H200", "capability": 90}
CPU = {"platform": "cpu", "device_kind": "cpu", "capability": 0}


@pytest.fixture
def needs_kernels() -> None:
    if (reason := find_obstacle()) is not None:
        pytest.skip(reason)


def test_the_server_takes_what_there_is() -> None:
    assert KERNELS == CHOICES
    with pytest.raises(ConfigError, match="kernel must be one of auto, .*, got 'cuda'"):
        EngineConfig(kernel="cuda")


@pytest.mark.usefixtures("needs_kernels")
def test_a_gpu_computes_by_the_fastest_kernels_for_its_dtype() -> None:
    wanted = Kernels(products="gluon", attention="triton", device_kind="NVIDIA H200")
    assert choose_kernels(**H200, dtype="bfloat16") == wanted
    assert choose_kernels(**H200, dtype="float32").products == "triton"
    assert choose_kernels(**H200 | {"capability": 80}, dtype="float32").shared_bytes == 166912
    assert choose_kernels(**H200 | {"capability": 89}, dtype="float32").shared_bytes == 101376
    assert choose_kernels(**H200, dtype="bfloat16", wanted="triton").products == "triton"


@pytest.mark.parametrize("device", [CPU, H200 | {"capability": 75}])
def test_other_devices_run_the_reference(device: dict) -> None:
    found = choose_kernels(**device, dtype="bfloat16")
    assert (found.products, found.attention) == ("reference", "reference")


def test_the_reference_runs_where_it_is_asked_for() -> None:
    assert choose_kernels(**H200, dtype="bfloat16", wanted="reference").products == "reference"
    assert REFERENCE.line() == "kernels: products reference, attention reference"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            CPU | {"wanted": "gluon"},
            "kernel 'gluon' cannot be used: it needs an NVIDIA GPU, .* cpu",
        ),
        (CPU | {"wanted": "triton"}, "kernel 'triton' cannot be used: it needs an NVIDIA GPU"),
        (H200 | {"capability": 75, "wanted": "triton"}, "needs compute capability 8.0, .* has 7.5"),
        (H200 | {"wanted": "cuda"}, "kernel 'cuda' is not known: auto, reference, triton, gluon"),
    ],
)
def test_what_is_named_and_does_not_work_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_kernels(**options, dtype="bfloat16")


@pytest.mark.usefixtures("needs_kernels")
def test_gluon_refuses_float32() -> None:
    with pytest.raises(ConfigError, match="computes in bfloat16, and the engine in float32"):
        choose_kernels(**H200, dtype="float32", wanted="gluon")
