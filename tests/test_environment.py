"""The environment that jax is imported in."""

import pathlib

import pytest

from moejax.environment import prepare_environment


@pytest.fixture
def gpu_root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia3").touch()
    return tmp_path


def test_without_a_gpu_jax_uses_the_cpu(tmp_path: pathlib.Path) -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, tmp_path)
    assert environ == {"JAX_PLATFORMS": "cpu"}


def test_the_control_device_alone_is_no_gpu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    environ: dict[str, str] = {}
    prepare_environment(environ, tmp_path)
    assert environ == {"JAX_PLATFORMS": "cpu"}


def test_on_a_gpu_most_of_its_memory_is_taken(gpu_root: pathlib.Path) -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, gpu_root)
    assert environ == {"XLA_CLIENT_MEM_FRACTION": "0.92"}


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_used(gpu_root: pathlib.Path, hidden: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": hidden}
    prepare_environment(environ, gpu_root)
    assert environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    "environ",
    [
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},  # jax refuses the other name beside it
    ],
)
def test_the_users_memory_fraction_stays(gpu_root: pathlib.Path, environ: dict[str, str]) -> None:
    before = dict(environ)
    prepare_environment(environ, gpu_root)
    assert environ == before


def test_the_users_platform_stays(tmp_path: pathlib.Path) -> None:
    environ = {"JAX_PLATFORMS": "cuda"}
    prepare_environment(environ, tmp_path)
    assert environ == {"JAX_PLATFORMS": "cuda"}
