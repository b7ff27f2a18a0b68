"""Chat templates: from a list of messages to the text that the model was trained on.

A template is Jinja code that comes with a checkpoint, so it runs in a sandbox. What it can read is
what Hugging Face's transformers gives it: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by name, and what the caller adds.
"""

import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from moejax.errors import CheckpointError, RequestError
from moejax_serving.chat_sandbox import compile_template, to_plain
from moejax_serving.sampling_params import show

RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "sanitize_control_tokens",
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

# Marks where an unfinished message ends. A template that keeps spaces keeps the last one here.
_END = "END_OF_THE_UNFINISHED_MESSAGE "


class TextParts(list[Mapping[str, Any]]):
    """What one message says in several texts.

    A template that reads lists of parts gets them, and joins them as it does; any other template
    gets them as lines of one text.
    """

    def join(self) -> str:
        """The lines of one text."""
        return "\n".join(part["text"] for part in self)


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
        """Reads chat_template.jinja and additional_chat_templates/NAME.jinja; if there are none,
        what tokenizer_config.json holds; if it holds none, chat_template.json.

        Raises:
            CheckpointError: a file cannot be read, or holds something else than templates.
        """
        sources = _read_sources(folder, tokenizer_config)
        extra = _read_extra_tokens(tokenizer_config)
        return cls(sources, {**extra, **special_tokens}) if sources else None

    def render(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any] = types.MappingProxyType({}),
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
    ) -> str:
        """The text of the conversation.

        Args:
            messages: mappings; what they hold is up to the template. Keys with None are left
                out, reasoning is found under each of its names, and `TextParts` may be joined.
            variables: whatever else the template can read.
            tools: schemas of functions. A list, even an empty one, chooses the template 'tool_use'.
            add_generation_prompt: end where the assistant begins.
            continue_final_message: end within the last message, after its content, or after the
                key named here.

        Raises:
            RequestError: the template refused the conversation, or failed; or an argument is wrong.
        """
        if not messages:
            raise RequestError("messages is empty: one message is needed", param="messages")
        if taken := sorted(RESERVED & variables.keys()):
            raise RequestError(
                f"the template arguments may not set {', '.join(taken)}",
                param="chat_template_kwargs",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        messages = self._settle_parts(
            messages,
            variables,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        source = self._choose(with_tools=tools is not None)
        chat = [_prepare(message) for message in _read_objects("messages", messages)]
        values = {
            "documents": None,
            **self._special_tokens,
            **_read_plain("chat_template_kwargs", variables),
            "messages": chat,
            "tools": None if tools is None else _read_objects("tools", tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if values["documents"] is not None:
            values["documents"] = _read_objects("documents", values["documents"])
        if not continue_final_message:
            return _render(source, values)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        text = _mark_end(chat[-1], field, source)
        return _cut_at_end(_render(source, values), text)

    def _settle_parts(
        self, messages: Sequence[Any], variables: Mapping[str, Any], **options: Any
    ) -> Sequence[Any]:
        """The messages with all `TextParts` as plain lists, or all as texts."""
        found = {
            index: content
            for index, message in enumerate(messages)
            if isinstance(message, Mapping)
            and isinstance(content := message.get("content"), TextParts)
        }
        if not found:
            return messages
        texts = {index: parts.join() for index, parts in found.items()}
        as_text = _replace_contents(messages, texts)
        one_part = {index: [{"type": "text", "text": text}] for index, text in texts.items()}
        try:
            # A template reads parts if a text in a list comes out as that text alone does.
            as_list = self.render(_replace_contents(messages, one_part), variables, **options)
            reads_parts = as_list == self.render(as_text, variables, **options)
        except RequestError:
            reads_parts = False
        if not reads_parts:
            return as_text
        return _replace_contents(messages, {index: list(found[index]) for index in found})

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
    """The messages, each with one text, or with `TextParts` if it has several.

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
    for index, part in enumerate(content):
        _check_part(part, f"{where}.content[{index}]")
    parts = TextParts(content)
    return {**message, "content": parts if len(parts) > 1 else parts.join()}


def _check_part(part: Any, where: str) -> None:
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


def _replace_contents(messages: Sequence[Any], contents: Mapping[int, Any]) -> list[Any]:
    return [
        {**message, "content": contents[index]} if index in contents else message
        for index, message in enumerate(messages)
    ]


def _read_sources(folder: pathlib.Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    try:
        paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {path.name.removesuffix(".jinja"): path for path in paths}
        if (path := folder / "chat_template.jinja").is_file():
            files.setdefault("default", path)
        if files:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        found = tokenizer_config.get("chat_template")
        if not found and (path := folder / "chat_template.json").is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: the chat template cannot be read: {error!r}") from error
    if not found:
        return {}
    sources = dict(found) if isinstance(found, Mapping) else {"default": found}
    for name, source in sources.items():
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder}: the chat template {name!r} must be a text, got {show(source)}"
            )
    return sources


def _read_extra_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens with names of their own, such as image_token, that templates can read."""
    extra = tokenizer_config.get("extra_special_tokens")
    if not isinstance(extra, Mapping):
        return {}
    contents = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in extra.items()
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _render(source: str, values: Mapping[str, Any]) -> str:
    try:
        return compile_template(source).render(values)
    except (jinja2.TemplateSyntaxError, SyntaxError) as error:
        raise RequestError(
            f"the model's chat template is broken: {error}", param="messages"
        ) from error
    except Exception as error:  # the template's code can fail in any way
        reason = str(error) or type(error).__name__
        raise RequestError(
            f"the model's chat template refused the messages: {reason}", param="messages"
        ) from error


def _read_objects(param: str, values: Any) -> list[dict[str, Any]]:
    """A list of objects in plain types, as templates expect it."""
    plain = _read_plain(param, values)
    if not isinstance(plain, list | tuple):
        raise RequestError(f"{param} must be a list of objects, got {show(values)}", param=param)
    for index, value in enumerate(plain):
        if not isinstance(value, dict):
            raise RequestError(
                f"{param}[{index}] must be an object, got {show(value)}", param=param
            )
    return list(plain)


def _read_plain(param: str, value: Any) -> Any:
    try:
        return to_plain(value)
    except TypeError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deep", param=param) from error


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that hold None, which most templates would print; reasoning by each name."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING if name in prepared), None)
    if reasoning is None:
        return prepared
    return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any], field: str, source: str) -> str:
    """Puts `_END` behind the text of a message, and returns that text as it was.

    Raises:
        RequestError: there is no text, or no template would show it.
    """
    found = message.get(field)
    names = [field]
    if field in _REASONING:
        names = [name for name in _REASONING if message.get(name) == found]
    if found is not None and not any(name in source for name in names):
        raise _cannot_continue(f"the model's chat template does not read {field!r}")
    if isinstance(found, str):
        message.update(dict.fromkeys(names, found + _END))
        return found
    for part in reversed(found if isinstance(found, list | tuple) else ()):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _END
            return text
    raise _cannot_continue(f"the last message has no text in {field!r}")


def _cut_at_end(rendered: str, text: str) -> str:
    """The rendered conversation up to the end of the unfinished message, which is `text`.

    Raises:
        RequestError: its end cannot be found, or was rendered at other places, too.
    """
    mark = _END.strip()
    if rendered.count(mark) != 1 or text.strip() not in rendered:
        raise _cannot_continue("the model's chat template does not show it once and as it is")
    end = rendered.index(mark)
    return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()


def _cannot_continue(reason: str) -> RequestError:
    return RequestError(
        f"the final message cannot be continued: {reason}", param="continue_final_message"
    )
