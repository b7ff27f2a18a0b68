"""Chat templates: what they are given, what they cannot do, and failures in words."""

import copy
import dataclasses
import enum
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pydantic
import pytest
from hypothesis import given

from moejax.errors import CheckpointError, RequestError
from moejax_serving.chat_template import RESERVED, ChatTemplate, TextParts, flatten_messages
from serving.http_calls import CHAT, USER, assert_is_error, post

READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def one(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"eos_token": "</s>"})


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_variables_may_not_replace_the_conversation(name: str) -> None:
    with pytest.raises(RequestError, match=f"may not set {name}") as caught:
        one("x").render([user("x")], {name: "y"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["a b", "", "loop", "cls", "args", "environment"])
def test_a_variable_may_have_any_other_name(name: str) -> None:
    assert one("x").render([user("x")], {name: "y"}) == "x"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refused the messages: Roles must"),
        ("{{ 1 / 0 }}", "refused the messages: division by zero"),
        ("{{ missing.field }}", "refused the messages: 'missing' is undefined"),
        ("{{ raise_exception('') }}", "refused the messages: TemplateError"),
        ("{% if %}", "chat template is broken: Expected an expression"),
        ("{% break %}", "chat template is broken: 'break' outside loop"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refused the messages: access to attribute 'append'"),
        ("{% set n = namespace(__init__=1) %}", "a namespace cannot hold '__init__': names may"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "refused the messages: it goes round its loops more than 1000000 times",
        ),
    ],
)
def test_a_failure_is_a_wrong_request(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        one(source).render([user("a<b")])
    assert caught.value.param == "messages"


def test_the_words_of_a_refusal_are_an_answer_of_status_400(fake_engine: Any) -> None:
    tokenizer = copy.copy(fake_engine.tokenizer)
    tokenizer.chat_template = one("{{ raise_exception('Only one message, not ' ~ eos_token) }}")
    fake_engine.tokenizer = tokenizer
    answer = post(fake_engine, CHAT, {"messages": USER})
    assert_is_error(answer, 400, "refused the messages: Only one message, not </s>", "messages")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
REASONING = ("reasoning_content", "thinking", "reasoning")
keys = st.sampled_from(["role", "content", *REASONING, "x"])
json_messages = st.lists(st.dictionaries(keys, json_values, max_size=5), min_size=1, max_size=3)


@given(json_messages, st.dictionaries(st.sampled_from("abc"), json_values))
def test_a_template_reads_what_it_is_given_and_cannot_change_it(
    messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    before = copy.deepcopy((messages, variables))
    source = "[{{ messages | tojson }}, [{{ a | default(7) | tojson }}, {{ documents | tojson }}]]"
    got, others = json.loads(one(source).render(messages, variables))
    assert (messages, variables) == before
    assert others == [variables.get("a", 7), None]
    for shown, message in zip(got, messages, strict=True):
        expected = {key: value for key, value in message.items() if value is not None}
        names = [name for name in REASONING if name in expected]
        if names:
            reasoning = expected[names[0]]
            expected = {"thinking": reasoning, **expected, "reasoning_content": reasoning}
        assert list(shown.items()) == list(expected.items())


class Role(str, enum.Enum):  # noqa: UP042 - a StrEnum would have str's own methods
    USER = "user"


@dataclasses.dataclass
class Call:
    name: str
    count: int


class Function(pydantic.BaseModel):
    name: str
    arguments: dict[str, int]


def test_objects_become_plain() -> None:
    message = {"role": Role.USER, "calls": (Call("f", 1), Function(name="g", arguments={"x": 2}))}
    text = one("{{ messages | tojson }}{{ messages[0].role }}").render([message])
    calls = '[{"name": "f", "count": 1}, {"name": "g", "arguments": {"x": 2}}]'
    assert text == f'[{{"role": "user", "calls": {calls}}}]user'
    text = one("{{ messages[0].calls[0].name.upper() }}").render([message])
    assert text == "F"


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("arguments", "param", "text"),
    [
        ({"variables": {"x": pathlib.Path("x")}}, "chat_template_kwargs", "got a PosixPath"),
        ({"variables": {"x": [{"y": {1}}]}}, "chat_template_kwargs", "got a set"),
        ({"variables": {"x": LOOP}}, "chat_template_kwargs", "is nested too deep"),
        ({"variables": {"documents": "x"}}, "documents", "must be a list of objects, got 'x'"),
        ({"variables": {"documents": ["x"]}}, "documents", r"documents\[0\] must be an object"),
        ({"tools": [len]}, "tools", "can read JSON's types only, got a builtin_function"),
        ({"tools": [{}, "x"]}, "tools", r"tools\[1\] must be an object, got 'x'"),
        ({"messages": ["x"]}, "messages", r"messages\[0\] must be an object, got 'x'"),
        ({"messages": [user(b"x")]}, "messages", "can read JSON's types only, got a bytes"),
        ({"messages": []}, "messages", "messages is empty"),
    ],
)
def test_what_no_template_could_read_is_refused(
    arguments: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        one("x").render(**{"messages": [user("x")], **arguments})
    assert caught.value.param == param


SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@given(st.text(), st.text())
def test_a_continued_message_ends_with_its_text(first: str, last: str) -> None:
    messages = [user(first), assistant(last)]
    text = one(SIMPLE).render(messages, add_generation_prompt=False, continue_final_message=True)
    whole = one(SIMPLE).render(messages, add_generation_prompt=False)
    assert text.endswith(last) and text + "</>" == whole


@pytest.mark.parametrize(
    ("source", "last", "field", "text"),
    [
        (SIMPLE, {"role": "assistant"}, True, "the last message has no text in 'content'"),
        (SIMPLE, assistant(5), True, "the last message has no text in 'content'"),
        (SIMPLE, assistant([{"type": "x"}]), True, "the last message has no text in 'content'"),
        (SIMPLE, assistant("x", y="z"), "y", "template does not read 'y'"),
        (SIMPLE, assistant("x", reasoning="z"), "reasoning", "does not read 'reasoning'"),
        ("{{ messages[0].content }}", assistant("x"), True, "does not show it once and as it is"),
        (SIMPLE * 2, assistant("x"), True, "does not show it once and as it is"),
        ("{{ (messages | last).content | upper }}", assistant("x"), True, "once and as it is"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    source: str, last: dict[str, Any], field: bool | str, text: str
) -> None:
    with pytest.raises(RequestError, match=f"cannot be continued: .*{text}") as caught:
        one(source).render(
            [user("a"), last], add_generation_prompt=False, continue_final_message=field
        )
    assert caught.value.param == "continue_final_message"


@given(st.lists(st.text(), min_size=2, max_size=4), st.booleans())
def test_a_template_that_reads_parts_joins_them_itself(texts: list[str], prompt: bool) -> None:
    given_parts = [{"type": "text", "text": text} for text in texts]
    messages = flatten_messages([user("x"), user(given_parts)])
    text = one(READS_PARTS).render(messages, add_generation_prompt=prompt)
    assert text == f"x;{''.join(texts)};"
    text = one("{% for m in messages %}{{ m.content + ';' }}{% endfor %}").render(messages)
    assert text == "x;" + "\n".join(texts) + ";"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",  # shows a list as Python writes it
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content if messages[0].content is string else '(unknown)' }}",
        "{{ messages[0].content.strip() }}",  # fails with a list
    ],
)
def test_a_template_that_reads_no_parts_gets_one_text(source: str) -> None:
    messages = [user(TextParts([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))]
    assert one(source).render(messages) == "a\nb"


def test_one_part_or_none_is_a_text() -> None:
    assert flatten_messages([user([{"type": "text", "text": "a"}])]) == [user("a")]
    assert flatten_messages([user([])]) == [user("")]


def test_a_call_needs_no_content() -> None:
    message = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    assert flatten_messages((message,)) == [message]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, "messages must be a list of messages, got None"),
        ("Hi", "messages must be a list of messages, got 'Hi'"),
        (["Hi"], r"messages\[0\] must be {'role': ..., 'content': ...}, got 'Hi'"),
        ([{"content": "x"}], r"messages\[0\].role must be a text, got None"),
        ([user("x"), user(None)], r"messages\[1\] has no content"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([user(5)], r"messages\[0\].content must be a text or a list of text parts, got 5"),
        ([user(["a"])], r"messages\[0\].content\[0\] must be .*'type': 'text'.*, got 'a'"),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\] has no text"),
        ([user([{"type": "text", "text": 5}])], r"content\[0\].text must be a text, got 5"),
        ([user([{"type": "image"}])], "is of type 'image': only parts of type 'text'"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(messages: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        flatten_messages(messages)


def write(folder: pathlib.Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())


def test_the_template_of_a_processor_is_the_last_resort(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {"chat_template.json": {"chat_template": "json"}})
    template = ChatTemplate.from_folder(tmp_path, {}, {})
    assert template is not None and template.render([user("x")]) == "json"


def test_several_templates_need_a_default() -> None:
    with pytest.raises(RequestError, match="none is the default: rag, tool_use"):
        ChatTemplate({"tool_use": "x", "rag": "y"}, {}).render([user("x")])


def test_a_folder_may_have_no_template(tmp_path: pathlib.Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, {}, {}) is None


@pytest.mark.parametrize(
    ("files", "config", "text"),
    [
        ({"chat_template.json": "{"}, {}, "the chat template cannot be read"),
        ({"chat_template.json": "[]"}, {}, "the chat template cannot be read"),
        ({}, {"chat_template": [{"name": "default"}]}, "the chat template cannot be read"),
        ({}, {"chat_template": 5}, "the chat template 'default' must be a text, got 5"),
        ({}, {"chat_template": {"rag": None}}, "the chat template 'rag' must be a text, got None"),
    ],
)
def test_a_broken_template_names_its_folder(
    tmp_path: pathlib.Path, files: Mapping[str, str], config: Mapping[str, Any], text: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: {text}"):
        ChatTemplate.from_folder(tmp_path, config, {})


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_that_is_no_text_names_its_folder(tmp_path: pathlib.Path, name: str) -> None:
    write(tmp_path, {name: ""})
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the chat template cannot be read"):
        ChatTemplate.from_folder(tmp_path, {}, {})
