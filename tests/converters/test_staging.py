"""A folder appears whole or not at all."""

import errno
import os

import pytest

from moejax.errors import CheckpointError
from moejax_converters.staging import staged


def test_the_folder_appears_when_the_body_has_ended(tmp_path):
    with staged(tmp_path / "new" / "out") as folder:
        (folder / "file").touch()
        assert not (tmp_path / "new" / "out").exists()
    assert os.listdir(tmp_path / "new") == ["out"]
    assert os.listdir(tmp_path / "new" / "out") == ["file"]


def test_a_body_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out") as folder:
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", ["folder", "file", "dangling link"])
def test_refuses_what_exists(make, tmp_path):
    target = tmp_path / "out"
    {
        "folder": target.mkdir,
        "file": target.touch,
        "dangling link": lambda: target.symlink_to("nowhere"),
    }[make]()
    with pytest.raises(CheckpointError, match="out exists: it is not overwritten"), staged(target):
        raise AssertionError("unreachable")


def test_refuses_what_came_into_being_meanwhile(tmp_path):
    with pytest.raises(CheckpointError, match="another process made it"), staged(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_one_line(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"^cannot write .*out: No space left on device$"),
        staged(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*file/out: (Not a|File exists)"),
        staged(tmp_path / "file" / "out"),
    ):
        raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 300, "the name has 300 bytes, at most 213"),
        ("a" * 230, "the name has 230 bytes, at most 213"),
        ("a\0b", "the name holds a NUL"),
        ("\ud800", "the name is not UTF-8"),
    ],
    ids=["300", "230", "NUL", "surrogate"],
)
def test_a_name_that_no_folder_can_have_is_one_line(name, message, tmp_path):
    with pytest.raises(CheckpointError, match=f"^cannot write .*: {message}$"):
        with staged(tmp_path / name):
            raise AssertionError("unreachable")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a" * 213, "ä" * 106])
def test_the_longest_name_is_written(name, tmp_path):
    with staged(tmp_path / name):
        pass
    assert os.listdir(tmp_path) == [name]


def test_what_a_killed_process_left_is_removed(tmp_path):
    abandoned = tmp_path / ".out.partial-1"
    (abandoned / "dense").mkdir(parents=True)
    os.utime(abandoned, (0, 0))
    with staged(tmp_path / "out"):
        assert not abandoned.exists()


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    with staged(tmp_path / "out") as first:
        os.utime(first, (0, 0))
        with pytest.raises(RuntimeError, match="stop"), staged(tmp_path / "out"):
            assert first.exists()
            raise RuntimeError("stop")
        (tmp_path / ".out.partial-new").mkdir()
        with pytest.raises(RuntimeError, match="stop"), staged(tmp_path / "out"):
            assert (tmp_path / ".out.partial-new").exists(), "it is not locked yet"
            raise RuntimeError("stop")
