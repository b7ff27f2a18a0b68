"""Chat templates: from a list of messages to the text that the model was trained on.

A template is Jinja code that comes with a checkpoint, so it runs in a sandbox. What it may use is
what Hugging Face's transformers offers: `messages`, `tools`, `documents`, `add_generation_prompt`,
the special tokens by name, `raise_exception`, `strftime_now`, a `tojson` filter that leaves
characters as they are, `break` and `continue`, and a `generation` tag.
"""

import datetime
import functools
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from moejax.errors import CheckpointError, RequestError
from moejax_serving.sampling_params import show

RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "self",
        # What transformers' apply_chat_template takes for itself.
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that a caller's template arguments may not use: no template would see them."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one checkpoint, by name; most have one, called 'default'."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`, such as bos_token, are variables that every template can read."""
        self._sources = dict(sources)
        self.default_source = self._sources.get("default")
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        tokenizer_config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> "ChatTemplate | None":
        """Reads chat_template.jinja, else tokenizer_config.json's, else chat_template.json."""
        sources = _read_sources(folder, tokenizer_config)
        return cls(sources, special_tokens) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = types.MappingProxyType({}),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of the conversation. `variables` are whatever else the template can read.

        Raises:
            RequestError: the template refused the conversation, or failed.
        """
        if not messages:
            raise RequestError("messages is empty: one message is needed", param="messages")
        if taken := sorted(RESERVED & variables.keys()):
            raise RequestError(
                f"the template arguments may not set {', '.join(taken)}",
                param="chat_template_kwargs",
            )
        source = self._choose(with_tools=tools is not None)
        values = {"documents": None, **self._special_tokens, **variables}
        try:
            return _compile(source).render(
                {
                    **values,
                    "messages": [_prepare(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is broken: {error}", param="messages"
            ) from error
        except Exception as error:  # the template's code can fail in any way
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the model's chat template refused the messages: {reason}", param="messages"
            ) from error

    def _choose(self, *, with_tools: bool) -> str:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._sources:
                return self._sources[name]
        raise RequestError(
            "the model has several chat templates and none is the default: "
            + ", ".join(sorted(self._sources)),
            param="messages",
        )


def flatten_messages(messages: Any, where: str = "messages") -> list[dict[str, Any]]:
    """The messages with their text in one string each, as most templates expect it.

    Args:
        messages: what a caller gave.
        where: how it is called in the text of an error.

    Raises:
        RequestError: it is no list of messages, or a message holds what is not supported.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"{where} must be a list of messages, got {show(messages)}", param="messages"
        )
    return [_flatten(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _flatten(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} must be {{'role': ..., 'content': ...}}, got {show(message)}",
            param="messages",
        )
    if not isinstance(message.get("role"), str):
        raise RequestError(
            f"{where}.role must be a text, got {show(message.get('role'))}", param="messages"
        )
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(
            f"{where} has no content: a text or a list of text parts is needed",
            param=f"{where}.content",
        )
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where}.content must be a text or a list of text parts, got {show(content)}",
            param=f"{where}.content",
        )
    texts = [_read_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(
            f"{where} must be {{'type': 'text', 'text': ...}}, got {show(part)}", param=where
        )
    if part["type"] != "text":
        raise RequestError(
            f"{where} is of type {part['type'][:40]!r}: only parts of type 'text' are supported",
            param=where,
        )
    if part.get("text") is None:
        raise RequestError(f"{where} has no text", param=where)
    if not isinstance(part["text"], str):
        raise RequestError(f"{where}.text must be a text, got {show(part['text'])}", param=where)
    return part["text"]


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks an assistant's text; it changes nothing here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _read_sources(folder: pathlib.Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    try:
        if (path := folder / "chat_template.jinja").is_file():
            return {"default": path.read_text(encoding="utf-8")}
        found = tokenizer_config.get("chat_template")
        if not found and (path := folder / "chat_template.json").is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}
        return {"default": found} if found else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: the chat template cannot be read: {error!r}") from error


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that hold None, which most templates would print; reasoning by each name."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING if name in prepared), None)
    if reasoning is not None:
        prepared.setdefault("thinking", reasoning)
        prepared["reasoning_content"] = reasoning
    return prepared


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
