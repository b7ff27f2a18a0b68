"""Which kernels are chosen, and how products are cut."""

import json

import pytest

from moejax.arena.geometry import LinearShape, Runs
from moejax.errors import ConfigError
from moejax.pallas import dispatch
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.dispatch import (
    CHOICES,
    REFERENCE,
    Kernels,
    choose_kernels,
    choose_tilings,
    default_tiling,
    tile_tokens,
    tuned_tilings,
    tuning_key,
)
from moejax.pallas.product import Tiling
from moejax_serving.config import KERNELS, EngineConfig

H200 = {"platform": "gpu", "device_kind": "NVIDIA H200", "capability": 90}
CPU = {"platform": "cpu", "device_kind": "cpu", "capability": 0}


def runs(parts: int, rows: int, columns: int) -> Runs:
    shape = LinearShape(parts=parts, rows=rows, columns=columns)
    return Runs(shape=shape, dtype="bfloat16", page_bytes=1 << 16, quantization=None)


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


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "size"),
    [
        (1, 4, 60, 8),
        (32, 4, 60, 8),
        (64, 8, 128, 8),
        (64, 4, 60, 8),
        (128, 4, 60, 16),
        (512, 4, 60, 32),
        (8, 2, 8, 8),
        (64, 2, 8, 32),
        (4096, 8, 128, 32),
    ],
)
def test_a_tile_holds_what_an_expert_has_on_average(
    tokens: int, k: int, experts: int, size: int
) -> None:
    assert tile_tokens(tokens, k, experts) == size


def test_few_programs_share_rows_among_warps() -> None:
    down = runs(1, 2048, 1408)
    assert default_tiling(1, down, 8, 60, 4) == Tiling(tokens=8, row_warps=4, k_warps=4)
    assert default_tiling(1, down, 8, 60, 60) == Tiling(tokens=8, row_warps=4, k_warps=1)


def test_a_measured_tiling_is_taken(monkeypatch, tmp_path) -> None:
    linears = runs(2, 1408, 2048), runs(1, 2048, 1408)
    key = tuning_key(1, linears[1], 8, 4)
    assert key == "down 2048x1408 tokens 8 experts 4"
    (tmp_path / "Some_GPU.json").write_text(json.dumps({key: [8, 2, 4]}))
    monkeypatch.setattr(dispatch, "_TUNED", tmp_path)
    tuned_tilings.cache_clear()
    found = choose_tilings(1, 4, 60, linears, "Some GPU")
    assert found[1] == Tiling(tokens=8, row_warps=2, k_warps=4)
    assert found[0] == default_tiling(0, linears[0], 8, 60, 4)
    assert choose_tilings(1, 4, 60, linears, "Other GPU")[1] != found[1]
    tuned_tilings.cache_clear()


def test_what_was_measured_is_well_formed() -> None:
    for path in dispatch._TUNED.glob("*.json"):
        for key, tiling in tuned_tilings(path.stem.replace("_", " ")).items():
            assert f"tokens {tiling.tokens} " in key
            assert tiling.row_warps in (2, 4) and tiling.k_warps in (1, 2, 4)
