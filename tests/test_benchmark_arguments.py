"""Wrong arguments of benchmarks, and machines that cannot run them, give one clear line."""

import json
import pathlib
import subprocess
import sys
from types import ModuleType

import bench_attention
import bench_kernels
import bench_pages
import bench_step
import decode_speed
import device_tokens
import jax
import perplexity
import pytest
from random_model import random_config, with_layers
from stamp import run_script

from moejax.errors import ConfigError

CPU_ONLY = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it runs on a GPU")


def line_of(module: ModuleType, arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        run_script(module.main)
    assert isinstance(ended.value.code, str)
    assert "\n" not in ended.value.code
    return ended.value.code


@CPU_ONLY
@pytest.mark.parametrize(
    ("module", "arguments", "wanted"),
    [
        (decode_speed, "--kernel nosuch --layers 1", "kernel must be one of auto, reference"),
        (decode_speed, "--memory-budget foo", "'foo' is not a size"),
        (bench_step, "--bits 4", "bench_step.py needs a GPU"),
        (bench_kernels, "", "needs an NVIDIA GPU"),
        (bench_pages, "", "needs an NVIDIA GPU"),
        (bench_attention, "", "needs an NVIDIA GPU"),
        (device_tokens, "nosuch --text nosuch --record out", "No such file or directory: 'nosuch'"),
        (device_tokens, "nosuch --compare nosuch", "No such file or directory: 'nosuch'"),
        (perplexity, "nosuch nosuch", "nosuch"),
    ],
)
def test_a_machine_without_a_gpu(
    module: ModuleType, arguments: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wanted in line_of(module, arguments, monkeypatch)


@CPU_ONLY
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--kernel gluon", "kernel 'gluon' cannot be used: it needs an NVIDIA GPU"),
        ("--memory-budget 1MB", "the memory budget is"),
    ],
)
def test_what_the_engine_refuses(arguments: str, wanted: str) -> None:
    # In a process of its own: this one checks types, and the checkpoint only looks like one.
    command = [sys.executable, decode_speed.__file__, "--layers", "1", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("decode_speed.py: ")
    assert wanted in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"prompts": []})])
def test_a_file_that_no_device_wrote(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    line_of(device_tokens, f"nosuch --compare {path}", monkeypatch)


@pytest.mark.parametrize(
    ("module", "arguments", "wanted"),
    [
        (decode_speed, "--batch 0", "--batch and --prompt must be at least 1"),
        (decode_speed, "--prompt 0", "--batch and --prompt must be at least 1"),
        (decode_speed, "--output 4", "--output must be at least 8"),
        (decode_speed, "--bits 9", "invalid choice: 9"),
        (decode_speed, "--layers 0", "layers: 1 to 24, got 0"),
        (decode_speed, "--layers 25", "layers: 1 to 24, got 25"),
        (decode_speed, "--shape nosuch", "'nosuch' is not a published size"),
        (device_tokens, "m --record f --compare g", "give either"),
        (device_tokens, "m --text f", "give either"),
    ],
)
def test_arguments_that_cannot_be(
    module: ModuleType,
    arguments: str,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        run_script(module.main)
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


def test_layers_are_those_that_there_are() -> None:
    config = random_config("Mixtral-8x7B")
    assert len(with_layers(config, 3).layers) == 3
    for count in (0, -1, 33):
        with pytest.raises(ConfigError, match="layers: 1 to 32"):
            with_layers(config, count)
