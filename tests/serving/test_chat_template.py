"""Chat templates: renderings equal to transformers', failures in words."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest

from moejax.errors import CheckpointError, RequestError
from moejax_serving.chat_template import RESERVED, ChatTemplate, flatten_messages

# Recorded from transformers 5.24: AutoTokenizer.apply_chat_template(messages, tokenize=False).
RECORDED = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "chat_renderings.json").read_text("utf-8")
)

FOLDERS = [
    "tokenizers/deepseek_v3",
    "tokenizers/mixtral-8x7b-v1",
    "tokenizers/qwen3",
    "tokenizers/smollm2",
    "models/demo",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather & <more>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}},
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one message": ([user("Hi")], {}),
    "no prompt": ([user("Hi"), assistant("Hello")], {"add_generation_prompt": False}),
    "system": ([{"role": "system", "content": "Be brief."}, user("a"), assistant("b")], {}),
    "same role twice": ([user("x"), user("y")], {}),
    "nothing": ([user("")], {}),
    "parts": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], {}),
    "reasoning": ([user("x"), assistant("y", reasoning_content="because"), user("z")], {}),
    "other reasoning": ([user("x"), assistant("y", reasoning="because"), user("z")], {}),
    "variable": ([user("x")], {"enable_thinking": False}),
    "tools": ([user("Weather?")], {"tools": [TOOL]}),
    "call": (
        [
            user("Weather?"),
            assistant(None, tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sun"},
            assistant("Sun."),
            user("Thanks"),
        ],
        {"tools": [TOOL]},
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_renders_what_transformers_rendered(name: str) -> None:
    entry = RECORDED[name]
    template = ChatTemplate({"default": entry["template"]}, entry["special_tokens"])
    for case in entry["cases"]:
        got = template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"])
        assert got == case["expected"]


def _render(template: ChatTemplate, messages: Any, options: Mapping[str, Any]) -> str:
    own = {name: options[name] for name in ("tools", "add_generation_prompt") if name in options}
    variables = {name: value for name, value in options.items() if name not in own}
    return template.render(messages, variables, **own)


def _render_both(
    template: ChatTemplate, reference: Any, source: str, case: str
) -> tuple[str | None, str | None]:
    """Our rendering and transformers', None for a refusal."""
    messages, options = CASES[case]
    options = {"add_generation_prompt": True, **options}
    try:
        expected = reference.apply_chat_template(
            messages, tokenize=False, chat_template=source, **options
        )
    except Exception:  # templates fail in any way
        expected = None
    try:
        return _render(template, messages, options), expected
    except RequestError:
        return None, expected


@pytest.mark.parametrize("name", FOLDERS)
def test_renders_what_transformers_renders(shared_dir: pathlib.Path, name: str) -> None:
    import transformers

    folder = shared_dir / name
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = ChatTemplate.from_folder(folder, config, reference.special_tokens_map)
    assert template is not None
    for case in CASES:
        got, expected = _render_both(template, reference, reference.chat_template, case)
        assert got == expected, case


def test_renders_every_known_template_as_transformers_does(shared_dir: pathlib.Path) -> None:
    import transformers

    folder = shared_dir / "tokenizers"
    reference = transformers.AutoTokenizer.from_pretrained(
        folder / "smollm2", local_files_only=True
    )
    paths = sorted((folder / "chat_templates").glob("*.jinja"))
    assert len(paths) >= 50
    num_rendered = 0
    for path in paths:
        source = path.read_text("utf-8")
        template = ChatTemplate({"default": source}, reference.special_tokens_map)
        for case in CASES:
            got, expected = _render_both(template, reference, source, case)
            assert got == expected, (path.name, case)
            num_rendered += got is not None
    assert num_rendered > 0.75 * len(paths) * len(CASES)


def render(source: str, **options: Any) -> str:
    template = ChatTemplate({"default": source}, {"eos_token": "</s>"})
    return _render(template, [user("a<b")], options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b"}'),
        ("{{ {'b': '\u00e9', 'a': 1} | tojson(indent=1) }}", '{\n "b": "\u00e9",\n "a": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ eos_token }}|{{ bos_token }}", "</s>|"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "a<b!"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }} {{ documents is none }} {{ missing is defined }}", "True True False"),
    ],
)
def test_templates_can_use_what_transformers_offers(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refused the messages: Roles must"),
        ("{{ 1 / 0 }}", "refused the messages: division by zero"),
        ("{{ missing.field }}", "refused the messages: 'missing' is undefined"),
        ("{% if %}", "chat template is broken"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refused the messages: access to attribute 'append'"),
    ],
)
def test_a_failure_is_a_wrong_request(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_variables_may_not_replace_the_conversation(name: str) -> None:
    template = ChatTemplate({"default": "x"}, {})
    with pytest.raises(RequestError, match=f"may not set {name}") as caught:
        template.render([user("x")], {name: "y"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["a b", "", "loop", "cls", "args", "environment"])
def test_a_variable_may_have_any_other_name(name: str) -> None:
    assert ChatTemplate({"default": "x"}, {}).render([user("x")], {name: "y"}) == "x"


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_messages([user(parts)]) == [user("a\nb")]


def test_a_call_needs_no_content() -> None:
    message = assistant(None, tool_calls=[CALL])
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


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        ChatTemplate({"default": "x"}, {}).render([])


def test_tools_choose_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"}, {})
    assert template.render([user("x")]) == "plain"
    assert template.render([user("x")], tools=[TOOL]) == "tools"


def test_several_templates_need_a_default() -> None:
    with pytest.raises(RequestError, match="none is the default: rag, tool_use"):
        ChatTemplate({"tool_use": "x", "rag": "y"}, {}).render([user("x")])


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({"chat_template.jinja": "file"}, {"chat_template": "config"}, "file"),
        (
            {"chat_template.json": '{"chat_template": "json"}'},
            {"chat_template": "config"},
            "config",
        ),
        ({"chat_template.json": '{"chat_template": "json"}'}, {}, "json"),
        ({}, {"chat_template": [{"name": "default", "template": "listed"}]}, "listed"),
    ],
)
def test_a_template_is_looked_for_in_order(
    tmp_path: pathlib.Path, files: Mapping[str, str], config: Mapping[str, Any], expected: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    template = ChatTemplate.from_folder(tmp_path, config, {})
    assert template is not None and template.render([user("x")]) == expected


def test_a_folder_may_have_no_template(tmp_path: pathlib.Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, {}, {}) is None


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_template_file_names_its_folder(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the chat template cannot be read"):
        ChatTemplate.from_folder(tmp_path, {}, {})
