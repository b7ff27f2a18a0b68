"""What a folder says beside its weights: settings of generation, and files of the tokenizer."""

import shutil
from pathlib import Path
from typing import Any

from moejax.errors import CheckpointError
from moejax_converters.source import Source, read_json

_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
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
)


def generation_settings(source: Source) -> dict[str, Any]:
    """Settings for `moejax.json`: `eos_token_ids` of both files, the rest as far as given."""
    path = source.folder / "generation_config.json"
    data = read_json(path) if path.exists() else {}
    settings: dict[str, Any] = {"eos_token_ids": []}
    for file, values in ((path, data), (source.folder / "config.json", source.config)):
        for eos in _token_ids(file, values, "eos_token_id"):
            if eos not in settings["eos_token_ids"]:
                settings["eos_token_ids"].append(eos)
        for name in ("bos_token_id", "pad_token_id"):
            for token in _token_ids(file, values, name)[:1]:
                settings.setdefault(name, token)
    for name, kind in _SAMPLING.items():
        if data.get(name) is not None:
            try:
                settings[name] = kind(data[name])
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{path}: {name} is {data[name]!r}") from error
    return settings


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer, as far as there are any."""
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                # Contents only: files of a source are often read-only.
                shutil.copyfile(file, copy)


def _token_ids(path: Path, values: dict[str, Any], name: str) -> list[int]:
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"{path}: {name} is {value!r}, needed a token id or a list of them")
    return ids
