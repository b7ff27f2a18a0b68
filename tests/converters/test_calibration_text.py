"""A text as sequences of tokens: windows spread over it, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from moejax.errors import CheckpointError
from moejax_converters.calibration_text import calibration_sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words w0 to w999; it would add a token 1000, cut after 5, and fill up."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = {f"w{n}": n for n in range(1000)} | {"<s>": 1000, "?": 1001}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1000)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text_of(words: int) -> str:
    return " ".join(f"w{n:d}" for n in range(words))


def test_windows_are_spread_evenly_over_the_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text_of(1000))
    found = calibration_sequences(path, folder, count=4, length=20)
    assert found.shape == (4, 20) and found.dtype == np.int32
    # Words that follow each other, of the text alone; whole ones only.
    assert (np.diff(found, axis=1) == 1).all()
    starts = found[:, 0].tolist()
    assert starts[0] == 0
    # Equal parts of the characters: words have 4, but for the first hundred with blanks.
    size = len(path.read_text()) // 4
    for number, start in enumerate(starts):
        assert 0 <= path.read_text().index(f"w{start}") - number * size <= 5


def test_the_whole_text_may_be_used(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text_of(30))
    found = calibration_sequences(path, folder, count=1, length=30)
    assert found.tolist() == [list(range(30))]


def test_what_parts_documents_is_no_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("w1 w2\n<|endoftext|>\nw3 w4\n")
    assert calibration_sequences(path, folder, count=1, length=4).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("count", "length"), [(1, 31), (4, 8), (40, 2), (1000, 2)])
def test_a_text_that_is_too_short_is_refused(
    count: int, length: int, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text_of(30))
    message = rf"^{path}: too short to be cut into {count} sequences of {length} tokens "
    with pytest.raises(CheckpointError, match=message):
        calibration_sequences(path, folder, count=count, length=length)


def refused(path: Path, folder: Path, count: int = 2, length: int = 3) -> str:
    with pytest.raises(CheckpointError) as error:
        calibration_sequences(path, folder, count=count, length=length)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_text_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    assert refused(path, folder) == f"{path}: No such file or directory"
    assert refused(tmp_path, folder) == f"{tmp_path}: not a file"
    path.write_bytes(b"w1 w2 \xff")
    assert refused(path, folder) == f"{path}: not UTF-8 (invalid start byte at 6)"


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text_of(30))
    assert refused(path, tmp_path).startswith(f"{tmp_path / 'tokenizer.json'} is needed to")
    (tmp_path / "tokenizer.json").write_text("{")
    assert refused(path, tmp_path).startswith(f"{tmp_path / 'tokenizer.json'}: ")


# Token ids.


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_token_ids_are_taken_as_they_are(dtype: Any, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 60000, (5, 9)).astype(dtype)
    np.save(tmp_path / "ids.npy", ids)
    # Without any tokenizer.
    found = calibration_sequences(tmp_path / "ids.npy", tmp_path, count=3, length=7)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, ids[:3, :7])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(9, np.int32), "int32 [9], needed whole numbers [n, t]"),
        (np.zeros((2, 2, 3), np.int32), "int32 [2, 2, 3], needed whole numbers [n, t]"),
        (np.zeros((2, 3)), "float64 [2, 3], needed whole numbers [n, t]"),
        (np.zeros((2, 3), bool), "bool [2, 3], needed whole numbers [n, t]"),
        (np.zeros((1, 3), np.int32), "[1, 3] token ids, needed 2 sequences of 3"),
        (np.zeros((2, 2), np.int32), "[2, 2] token ids, needed 2 sequences of 3"),
        (np.full((2, 3), -1), "token ids are 0 or more, and below 2^31"),
        (np.full((2, 3), 2**31), "token ids are 0 or more, and below 2^31"),
        (np.full((2, 3), 2**64 - 1, np.uint64), "token ids are 0 or more, and below 2^31"),
    ],
)
def test_what_is_no_token_ids_is_refused(ids: np.ndarray, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, ids)
    assert refused(path, tmp_path) == f"{path}: {message}"


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }"
    long = b"\x93NUMPY\x01\x00" + (20000).to_bytes(2, "little") + header.ljust(20000)
    for content in (b"", b"w1 w2 w3", b"\x93NUMPY\x01\x00", long):
        path.write_bytes(content)
        assert refused(path, tmp_path).startswith(f"{path}: not an array of NumPy: ")
    np.save(path, np.array([["a"]], object), allow_pickle=True)
    assert refused(path, tmp_path).startswith(f"{path}: not an array of NumPy: Object arrays")
    with path.open("wb") as file:
        np.savez(file, ids=np.zeros((2, 3), np.int32))
    assert refused(path, tmp_path).startswith(f"{path}: not an array of NumPy: ")
    missing = tmp_path / "none.npy"
    assert refused(missing, tmp_path) == f"{missing}: No such file or directory"


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04junkjunkjunk", b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 117 + b"\n"],
)
def test_a_file_that_is_no_array_is_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        calibration_sequences(path, tmp_path, count=1, length=2)
    assert str(error.value).startswith(f"{path}: not an array of NumPy: ")
    assert "\n" not in str(error.value)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[1, 128]]))
    with pytest.raises(CheckpointError, match="has the token 128, the model has 128"):
        calibration_sequences(tmp_path / "ids.npy", tmp_path, count=1, length=2, vocab_size=128)


def test_more_sequences_than_a_text_has_characters_are_refused_at_once(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "text.txt").write_text("a b c d")
    with pytest.raises(
        CheckpointError, match=r"1000000000000 sequences of 2 tokens \(it has 7 characters\)"
    ):
        calibration_sequences(tmp_path / "text.txt", folder, count=10**12, length=2)
