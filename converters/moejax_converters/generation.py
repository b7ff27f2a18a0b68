"""What a folder says beside its weights: settings of generation, and files of the tokenizer."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from moejax.checkpoint.generation import SAMPLING, TOKENS
from moejax.errors import CheckpointError
from moejax_converters.source import Source, read_json

_log = logging.getLogger(__name__)

# What transformers would honour and moejax does not → the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "force_words_ids": ([],),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.json",
    "chat_template*.jinja",
    "additional_chat_templates",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "tiktoken.model",
)


def generation_settings(source: Source, vocab_size: int) -> dict[str, Any]:
    """Settings for `moejax.json`: `eos_token_ids` of both files, the rest as far as given.

    A model of several modalities may have its tokens in the `text_config` of its config.json.
    """
    path = source.folder / "generation_config.json"
    data = read_json(path) if os.path.lexists(path) else {}
    config, text = source.folder / "config.json", source.config.get("text_config")
    places = [(f"{path}: ", data), (f"{config}: ", source.config)]
    if isinstance(text, dict):
        places.append((f"{config}: text_config.", text))
    settings: dict[str, Any] = {"eos_token_ids": []}
    for where, values in places:
        for eos in _token_ids(where, values, "eos_token_id", vocab_size):
            if eos not in settings["eos_token_ids"]:
                settings["eos_token_ids"].append(eos)
        for name in TOKENS:
            for token in _token_ids(where, values, name, vocab_size)[:1]:
                settings.setdefault(name, token)
    for name, allowed in SAMPLING.items():
        if (value := data.get(name)) is None:
            continue
        if fault := allowed.fault(value):
            raise CheckpointError(f"{path}: {name} {fault}")
        settings[name] = allowed.kind(value)
    match data.get("do_sample"):
        case None | True:
            pass
        case False:
            settings["temperature"] = 0.0  # For transformers, that is what it means.
        case value:
            raise CheckpointError(f"{path}: do_sample is {value!r}, needed true or false")
    _warn_of_the_rest(path, data)
    return settings


def _warn_of_the_rest(path: Path, data: dict[str, Any]) -> None:
    ignored = [
        f"{name} {data[name]!r}"
        for name, neutral in _NEUTRAL.items()
        if data.get(name) is not None and data[name] not in neutral
    ]
    if ignored:
        _log.warning("%s: not supported and ignored: %s", path, ", ".join(ignored))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer, as far as there are any."""
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            for file in _files(path):
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                _copy(file, copy)


def _files(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _copy(file: Path, copy: Path) -> None:
    """Contents only: files of a source are often read-only. A fault of the source names it."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: needed a file of the tokenizer, found something else")
    try:
        reading = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    with reading, copy.open("wb") as writing:
        shutil.copyfileobj(reading, writing)


def _token_ids(where: str, values: dict[str, Any], name: str, vocab_size: int) -> list[int]:
    """The tokens of a setting that are in the vocabulary. `where` stands before its name."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"{where}{name} is {value!r}, needed a token id or a list of them")
    if name == "eos_token_id" and any(token < 0 for token in ids):
        raise CheckpointError(f"{where}{name} is {value!r}, needed ids of at least 0")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        # As in transformers, where such a token is never met. A padding of -1 means none.
        _log.warning(
            "%s%s %s is ignored: the vocabulary has %d tokens", where, name, outside, vocab_size
        )
    return [token for token in ids if token not in outside]
