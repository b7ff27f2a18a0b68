"""Compiled programs: how many there were, and where they are kept."""

import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from moejax_serving.compiles import keep_programs, num_compiles

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def make_program() -> Callable[[Any], Any]:
    """A new function each time, and always the same program."""

    def triple(x: Any) -> Any:
        return 3 * x

    return jax.jit(triple)


def ones(size: int) -> np.ndarray:
    return np.ones(size, np.float32)


def test_a_program_counts_when_it_is_compiled_and_not_when_it_runs_again() -> None:
    program, before = make_program(), num_compiles()
    program(ones(3))
    assert num_compiles() == before + 1
    program(ones(3))
    assert num_compiles() == before + 1
    program(ones(4))
    assert num_compiles() == before + 2


def test_a_program_that_is_read_from_the_cache_counts() -> None:
    make_program()(ones(5))
    before = num_compiles()
    make_program()(ones(5))
    assert num_compiles() == before + 1


@pytest.fixture
def no_folder() -> Iterator[None]:
    """jax keeps programs nowhere; what was set comes back afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in zip(SETTINGS, (None, 1.0, 0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_that_jax_has_already_is_left_alone(
    no_folder: None, tmp_path: pathlib.Path
) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    keep_programs(tmp_path / "ours")
    found = [getattr(jax.config, name) for name in SETTINGS]
    assert found == [str(tmp_path / "own"), 1.0, 0]
    assert not (tmp_path / "ours").exists()


def test_otherwise_all_programs_are_kept_in_the_folder(
    no_folder: None, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "cache" / "programs"
    for _ in range(2):  # as two engines of one process do
        keep_programs(folder)
        assert [getattr(jax.config, name) for name in SETTINGS] == [str(folder), 0, -1]
        assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_a_warning(
    no_folder: None, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        keep_programs(tmp_path / "file" / "programs")
    assert jax.config.jax_compilation_cache_dir is None
    (message,) = caplog.messages
    assert message.startswith("compiled programs are not kept: ")
    assert str(tmp_path / "file") in message
