"""Compiled kernels on disk."""

import dataclasses
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

import aot
from moejax.pallas import bridge
from moejax.pallas.kernel_cache import FOLDER, read_or_make


@dataclasses.dataclass
class Result:
    binary: str
    shared: int | None


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, *parts: str) -> Result:
        def make() -> Result:
            self.calls += 1
            return Result(" for ".join(parts), None)

        return read_or_make(list(parts), make, Result)


@pytest.fixture
def needs_kernels() -> None:
    if (reason := bridge.find_obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture
def folder(tmp_path: pathlib.Path, needs_kernels: None) -> Iterator[pathlib.Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_what_was_compiled_once_is_read(folder: pathlib.Path) -> None:
    compiler = Compiler()
    first = compiler.run("kernel", "90")
    (path,) = files(folder)
    assert path.suffix == ".json"
    # Another process.
    assert compiler.run("kernel", "90") == first == Result("kernel for 90", None)
    assert compiler.calls == 1
    assert files(folder) == [path]


def test_all_that_decides_is_in_the_name(folder: pathlib.Path) -> None:
    compiler = Compiler()
    cases = [("kernel", "4", "90"), ("other", "4", "90"), ("kernel", "8", "90"), ("kernel4", "90")]
    for parts in cases * 2:
        assert compiler.run(*parts) == Result(" for ".join(parts), None)
    assert compiler.calls == len(files(folder)) == len(cases)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"binary": "x"}', '{"odd": 1}', "\0", "null", "[" * 100_000),
        *(
            '{"sha256": "", "kernel": {"binary": "x", "shared": null}}',
            '{"sha256": 1, "kernel": 2}',
        ),
    ],
    ids=lambda text: text[:12],
)
def test_a_broken_file_is_made_anew(
    folder: pathlib.Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler()
    compiler.run("kernel")
    (path,) = files(folder)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert compiler.run("kernel") == Result("kernel", None)
    assert str(path) in caplog.text
    assert compiler.calls == 2
    assert compiler.run("kernel") == Result("kernel", None)
    assert compiler.calls == 2


@pytest.mark.parametrize(("old", "new"), [("kernel", "kernal"), ("null", "7"), ("null", '"x"')])
def test_a_changed_file_is_made_anew(folder: pathlib.Path, old: str, new: str) -> None:
    compiler = Compiler()
    compiler.run("a kernel")
    (path,) = files(folder)
    path.write_text(path.read_text().replace(f"a {old}", f"a {new}").replace(f" {old}", f" {new}"))
    assert compiler.run("a kernel") == Result("a kernel", None)
    assert compiler.calls == 2


def test_files_are_as_readable_as_others(folder: pathlib.Path) -> None:
    Compiler().run("kernel")
    (path,) = files(folder)
    other = folder / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_folder_that_cannot_be_written_costs_a_line(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert Compiler().run("kernel") == Result("kernel", None)
    assert "is not written" in caplog.text


def test_without_a_folder_nothing_is_kept(needs_kernels: None) -> None:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compiler = Compiler()
        assert compiler.run("kernel") == compiler.run("kernel")
        assert compiler.calls == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


PROGRAM = """
import sys
import jax
import jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
import aot
from moejax.pallas import norms
shape = jax.ShapeDtypeStruct
x, w = shape((16, 256), jnp.bfloat16), shape((24, 256), jnp.bfloat16)
def program(*a):
    return norms.rms_norm(*a, epsilon=1e-5, rounds_late=False)
print(aot.compile_for(aot.h200_mesh(), program, x, w, shape((), jnp.int32)).as_text())
"""


def test_kernels_of_triton_are_kept_and_read(folder: pathlib.Path) -> None:
    if (reason := aot.find_obstacle()) is not None:
        pytest.skip(reason)
    found, times = [], []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder.parent)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        found.append(ended.stdout)
        (path,) = files(folder)
        times.append(path.stat().st_mtime_ns)
    assert times[0] == times[1], "it was compiled again"
    assert found[0] == found[1]
