"""Text to tokens and back, by the `tokenizers` library from the files of a checkpoint."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from moejax.errors import CapacityError, CheckpointError, RequestError
from moejax_serving.chat_template import ChatTemplate

_CHARACTERS_PER_TOKEN = 8  # of a prompt that is encoded in one go
_LONG = 4096  # characters or tokens from which on other threads must not have to wait
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an unfinished UTF-8 sequence decodes to


class Tokenizer:
    """The tokenizer of one checkpoint. It is not changed after loading, so threads may share it.

    The post-processor in tokenizer.json alone decides whether a text gets a first or a last special
    token, as in transformers 5: `add_bos_token` in tokenizer_config.json is not read.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` maps names, such as eos_token, to strings in the vocabulary."""
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._anchor: list[int] = backend.encode("a", add_special_tokens=False).ids
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Loads tokenizer.json, tokenizer_config.json and what else there is.

        Raises:
            CheckpointError: a file is missing or broken.
        """
        folder = pathlib.Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older checkpoints keep the names apart
            config |= _read_json(folder / "special_tokens_map.json", optional=True)
        try:
            backend = tokenizers.Tokenizer.from_file(str(_require(folder / "tokenizer.json")))
            backend.no_truncation()
            backend.no_padding()
            special_tokens = _add_special_tokens(backend, config)
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises plain Exceptions
            raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}") from error
        template = ChatTemplate.from_folder(folder, config, special_tokens)
        return cls(backend, special_tokens, template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a sequence, as text."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a sequence, as text."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills up batches in training, as text."""
        return self.special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return self.token_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return self.token_id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self.token_id(self.pad_token)

    def token_id(self, token: str | None) -> int | None:
        """The id of a token of the vocabulary, None if there is no such token."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; the text of a special token becomes that token."""
        try:
            if len(text) < _LONG:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            # Unlike `encode`, which takes seconds for a million characters, this frees the GIL.
            (found,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return found.ids
        except TypeError as error:
            raise RequestError("the text holds half a surrogate pair: not Unicode") from error

    def encode_prompt(
        self, text: str, max_model_len: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text, unless its beginning alone is longer than `max_model_len`.

        To encode all of a long text may take a minute, so it is tried piece by piece. The cuts add
        a few tokens: a quarter more than fit is too long for certain.

        Raises:
            CapacityError: the text cannot fit.
        """
        size = _CHARACTERS_PER_TOKEN * max_model_len + 4096
        num_tokens = 0
        for end in range(size, len(text), size):
            num_tokens += len(self.encode(text[end - size : end], add_special_tokens=False))
            if num_tokens > max_model_len + max_model_len // 4 + 256:
                raise CapacityError(
                    f"the prompt has {len(text)} characters, and its first {end} make "
                    f"{num_tokens} tokens already; max_model_len = {max_model_len}"
                )
        return self.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; a cut character becomes U+FFFD."""
        if len(ids) < _LONG:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands inside a sequence: with its leading space."""
        text = self._token_texts.get(token_id)
        if text is None:
            # Some decoders drop the space at the start of a text: so decode it after an 'a'.
            start = self.decode(self._anchor, skip_special_tokens=False)
            whole = self.decode([*self._anchor, token_id], skip_special_tokens=False)
            text = self._token_texts[token_id] = whole.removeprefix(start)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> "Detokenizer":
        """Decodes tokens one at a time; the prompt before them says if their first space counts."""
        return Detokenizer(
            self._backend, prompt_token_ids, anchor=self._anchor, skip=skip_special_tokens
        )

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """The tokens of a conversation, or its text if `tokenize` is False.

        Raises:
            RequestError: the checkpoint has no template, or its template refused the messages.
        """
        text = self.render_chat(
            messages, kwargs, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation; `variables` are whatever else the template can read.

        Raises:
            RequestError: the checkpoint has no template, or its template refused the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template: use completions, "
                "or put a chat_template.jinja into the model's folder",
                param="messages",
            )
        return self.chat_template.render(
            messages, variables, tools=tools, add_generation_prompt=add_generation_prompt
        )


class Detokenizer:
    """Turns the tokens of one sequence into text as they come, never half a character."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        anchor: Sequence[int],
        skip: bool,
    ) -> None:
        """`anchor` are tokens of plain text, `skip` says whether special tokens are left out."""
        self._backend = backend
        self._anchor = list(anchor)
        self._skip = skip
        self._held: list[int] = []
        # A few tokens before the text say whether its first space counts. A prompt may end within
        # a character: those tokens belong to the text.
        end = len(prompt_token_ids)
        while end > 0 and end > len(prompt_token_ids) - 4 and self._is_cut(prompt_token_ids[:end]):
            end -= 1
        self._stream = DecodeStream(list(prompt_token_ids[max(end - 6, 0) : end]), skip)
        for token_id in prompt_token_ids[end:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # the bytes before this token read differently now that it follows
            text = self._restart()
        if text is None:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """The text that was held back: unfinished characters as U+FFFD."""
        text = self._backend.decode(self._held, skip_special_tokens=self._skip)
        self._held.clear()
        return text

    def _restart(self) -> str | None:
        self._stream = DecodeStream(list(self._anchor), self._skip)
        texts = [self._stream.step(self._backend, token_id) for token_id in self._held]
        found = [text for text in texts if text is not None]
        return "".join(found) if found else None

    def _is_cut(self, token_ids: Sequence[int]) -> bool:
        return self._backend.decode(token_ids[-6:], skip_special_tokens=False).endswith(
            _REPLACEMENT
        )


def require_tokenizer(folder: pathlib.Path) -> None:
    """Raises CheckpointError if a folder does not hold what `Tokenizer.from_folder` needs."""
    if folder.is_dir():  # otherwise there is more to say than that
        for name in ("tokenizer_config.json", "tokenizer.json"):
            _require(folder / name)


def _require(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no {path.name}: with skip_tokenizer_init (--skip-tokenizer-init) "
            "a model takes and gives token ids only"
        )
    return path


def _read_json(path: pathlib.Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(_require(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _add_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Adds the tokens of the settings that tokenizer.json lacks, and returns the named ones."""
    listed = config.get("added_tokens_decoder", {})
    named = {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = [
        *(_added_token(listed[key], special=False) for key in sorted(listed, key=int)),
        *(_added_token(value, special=True) for value in special),
    ]
    backend.add_tokens([token for token in added if token.content not in known])
    return {name: _added_token(value, special=True).content for name, value in named.items()}


def _added_token(value: str | Mapping[str, Any], *, special: bool) -> tokenizers.AddedToken:
    entry = {"content": value} if isinstance(value, str) else value
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return tokenizers.AddedToken(
        entry["content"],
        special=special or entry.get("special", False),
        **{flag: entry[flag] for flag in flags if flag in entry},
    )
