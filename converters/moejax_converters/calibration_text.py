"""A text as the token sequences of a calibration."""

from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int32

from moejax.errors import CheckpointError

# A line with this alone parts documents, in the texts of our test models and of many others.
_SEPARATOR = "<|endoftext|>"
# Enough characters for a token, in any language that a tokenizer was made for.
_CHARACTERS_PER_TOKEN = 16
# The bytes of a character at most: a tokenizer may have tokens for bytes only.
_TOKENS_PER_CHARACTER = 4


def calibration_sequences(
    text: Path, folder: Path, *, count: int, length: int, vocab_size: int | None = None
) -> Int32[np.ndarray, "count length"]:
    """Windows of `length` tokens, spread evenly over a text.

    Args:
        text: a file in UTF-8, or a `.npy` file with whole numbers `[sequences, tokens]`, which are
            taken as they are, the first `count` of them, `length` tokens each.
        folder: where `tokenizer.json` lies; no special tokens are added.
        count, length: how many tokens make up the calibration.
        vocab_size: of the model; None: any token is taken.

    Raises:
        CheckpointError: no such file, no tokenizer, fewer tokens than `count * length`, or a token
            that the model does not have.
    """
    try:
        is_file = not text.exists() or text.is_file()
    except OSError as error:
        raise CheckpointError(f"{text}: {error.strerror}") from error
    if not is_file:
        raise CheckpointError(f"{text}: not a file")
    is_text = text.suffix != ".npy"
    found = (_tokenized if is_text else _stored)(text, folder, count, length)
    if vocab_size is not None and (most := int(found.max())) >= vocab_size:
        raise CheckpointError(f"{text}: has the token {most}, the model has {vocab_size}")
    return found


def _tokenized(
    text: Path, folder: Path, count: int, length: int
) -> Int32[np.ndarray, "count length"]:
    try:
        words = text.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{text}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{text}: not UTF-8 ({error.reason} at {error.start})") from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is needed to calibrate with a text: a .npy file of token ids needs none"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path}: {error}") from error
    if count * length > _TOKENS_PER_CHARACTER * len(words):
        raise CheckpointError(
            f"{text}: too short to be cut into {count} sequences of {length} tokens "
            f"(it has {len(words)} characters)"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = _windows(words, count, length)
    found = [
        encoding.ids[:length]
        for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False)
    ]
    if any(len(ids) < length for ids in found):
        short = min(len(ids) for ids in found)
        raise CheckpointError(
            f"{text}: too short to be cut into {count} sequences of {length} tokens "
            f"(one of the {count} parts has {short})"
        )
    return np.array(found, np.int32)


def _windows(words: str, count: int, length: int) -> list[str]:
    """The beginnings of `count` equal parts of a text, each from a word's start on."""
    size = len(words) // count
    pieces = []
    for number in range(count):
        part = words[number * size : (number + 1) * size]
        if number and " " in part:
            part = part[part.index(" ") + 1 :]
        pieces.append(part.replace(_SEPARATOR + "\n", "")[: length * _CHARACTERS_PER_TOKEN])
    return pieces


def _stored(path: Path, folder: Path, count: int, length: int) -> Int32[np.ndarray, "count length"]:
    try:
        with path.open("rb") as file:
            ids: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # also what Python's tokenizer and parser raise for a header
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        raise CheckpointError(f"{path}: not an array of NumPy: {reason}") from error
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise CheckpointError(f"{path}: {ids.dtype} {list(ids.shape)}, needed whole numbers [n, t]")
    if ids.shape[0] < count or ids.shape[1] < length:
        raise CheckpointError(
            f"{path}: {list(ids.shape)} token ids, needed {count} sequences of {length}"
        )
    if np.any((ids < 0) | (ids >= 2**31)):
        raise CheckpointError(f"{path}: token ids are 0 or more, and below 2^31")
    return ids[:count, :length].astype(np.int32)
