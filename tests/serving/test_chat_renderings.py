"""Chat templates render what transformers renders: recorded by record_chat_renderings.py."""

import datetime
import hashlib
import json
import pathlib
import shutil
import types
from collections.abc import Mapping
from typing import Any

import pytest

from moejax.errors import RequestError
from moejax_serving import chat_sandbox
from moejax_serving.chat_template import RESERVED, ChatTemplate
from moejax_serving.tokenizer import Tokenizer

TESTS = pathlib.Path(__file__).parents[1]
DEMO = TESTS.parent / "serving" / "moejax_serving" / "demo" / "tokenizer_config.json"
CASES = json.loads((TESTS / "data" / "chat_cases.json").read_text("utf-8"))
# What transformers made of them, by tests/record_chat_renderings.py.
RECORDED = json.loads((TESTS / "data" / "chat_renderings.json").read_text("utf-8"))
SYSTEM = CASES["conversations"]["system"]


def one(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, CASES["special_tokens"])


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Fixed":
            return cls.fromisoformat(CASES["now"])

    monkeypatch.setattr(chat_sandbox, "datetime", types.SimpleNamespace(datetime=Fixed))


def attempt(template: ChatTemplate, case: Mapping[str, Any]) -> str:
    """The text of a conversation, or its refusal as it is recorded."""
    variables = {"add_generation_prompt": True, **case.get("options", {})}
    names = variables.keys() & {"add_generation_prompt", "continue_final_message"}
    own = {name: variables.pop(name) for name in names}
    tools = CASES["tools"].get(case.get("tools"))
    try:
        return template.render(case["messages"], variables, tools=tools, **own)
    except RequestError as error:
        # What transformers refuses before the template runs is a ValueError there.
        kind = type(error.__cause__).__name__ if error.__cause__ else "ValueError"
        return f"!TemplateError: {error.__cause__}" if kind == "TemplateError" else f"!{kind}"


def attempt_all(template: ChatTemplate) -> dict[str, str]:
    return {name: attempt(template, case) for name, case in CASES["conversations"].items()}


def summary(text: str, length: int) -> str:
    return f"{length} {hashlib.sha256(text.encode('utf-8')).hexdigest()}"


@pytest.mark.parametrize("name", RECORDED["own"])
def test_renders_what_transformers_rendered(name: str) -> None:
    if name == "built-in":
        source = json.loads(DEMO.read_text("utf-8"))["chat_template"]
    else:
        source = (TESTS / "data" / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    expected = {
        # A text that holds a mark is no prompt: here it is refused.
        case: "!ValueError" if text == "!Marked" else text
        for case, text in RECORDED["own"][name].items()
    }
    assert attempt_all(one(source)) == expected


def test_every_template_is_recorded() -> None:
    names = {path.stem for path in TESTS.glob("data/chat_templates/*.jinja")}
    assert RECORDED["own"].keys() == names | {"built-in"}


@pytest.mark.parametrize(
    ("source", "expected"), list(zip(CASES["snippets"], RECORDED["snippets"], strict=True))
)
def test_templates_can_use_what_transformers_offers(source: str, expected: str) -> None:
    assert attempt(one(source), SYSTEM) == expected


@pytest.mark.parametrize("name", RECORDED["shared"])
def test_renders_published_templates_as_transformers_does(
    shared_dir: pathlib.Path, name: str
) -> None:
    folder = shared_dir / "tokenizers"
    recorded = RECORDED["shared"][name]
    if name.endswith(".jinja"):
        template = one((folder / "chat_templates" / name).read_text("utf-8"))
    else:
        tokenizer = Tokenizer.from_folder(folder / name)
        assert tokenizer.chat_template is not None
        template = tokenizer.chat_template
    assert template.default_source is not None
    digest = hashlib.sha256(template.default_source.encode("utf-8")).hexdigest()
    assert digest == recorded["sha256"], "another template than the recorded one"
    texts = attempt_all(template)
    assert {case: texts[case] for case in recorded.get("texts", {})} == recorded.get("texts", {})
    assert recorded["renderings"] == {
        case: text if text.startswith("!") else summary(text, len(text))
        for case, text in texts.items()
    }
    if not name.endswith(".jinja"):
        assert RECORDED["tokens"][name] == {
            case: summary(json.dumps(ids), len(ids))
            for case, text in texts.items()
            if not text.startswith("!")
            for ids in [tokenizer.encode(text, add_special_tokens=False)]
        }


def test_most_published_templates_take_most_conversations() -> None:
    texts = [text for entry in RECORDED["shared"].values() for text in entry["renderings"].values()]
    assert len(RECORDED["shared"]) >= 55
    assert sum(not text.startswith("!") for text in texts) > 0.7 * len(texts)


def test_no_argument_of_transformers_reaches_a_template() -> None:
    arguments = set(RECORDED["arguments"]) - {"documents", "kwargs"}
    assert arguments | {"messages", "self"} == RESERVED


@pytest.mark.parametrize("name", CASES["folders"])
def test_templates_of_a_folder_are_found_as_transformers_finds_them(
    tmp_path: pathlib.Path, byte_folder: pathlib.Path, name: str
) -> None:
    shutil.copy(byte_folder / "tokenizer.json", tmp_path)
    for file, content in {"tokenizer_config.json": {}, **CASES["folders"][name]}.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())
    template = Tokenizer.from_folder(tmp_path).chat_template
    assert template is not None
    messages = SYSTEM["messages"]
    got = {
        "plain": attempt(template, {"messages": messages}),
        "tools": attempt(template, {"messages": messages, "tools": "none"}),
    }
    assert got == RECORDED["folders"][name]
