"""Files of JSON that others wrote."""

from pathlib import Path

import pytest

from moejax.checkpoint import strict_json
from moejax.errors import CheckpointError


def test_a_file_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_json, "_MAX_BYTES", 8)
    path = tmp_path / "file.json"
    path.write_text("[1, 2]  ")
    assert strict_json.read(path) == [1, 2]
    path.write_text("[1, 2]   ")
    with pytest.raises(CheckpointError, match="9 bytes are too many for a file of JSON$"):
        strict_json.read(path)


def test_a_device_without_an_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_MAX_BYTES", 1 << 16)
    with pytest.raises(CheckpointError, match="^/dev/zero: too long for a file of JSON$"):
        strict_json.read(Path("/dev/zero"))
