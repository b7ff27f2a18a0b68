"""Records what transformers makes of conversations, as tests/data/chat_renderings.json.

    pip install transformers jinja2       # in an environment of its own
    python tests/record_chat_renderings.py [FOLDER]

What is recorded:
- `arguments`: names that are arguments of transformers' functions, so no template sees them;
- `own`: the text of every conversation of tests/data/chat_cases.json with every template of
  tests/data/chat_templates, and with the built-in model's;
- `snippets`: the text of one message with each short template of chat_cases.json;
- `folders`: the text without and with tools, where folders hold the templates in different ways;
- `shared`: of the templates of published models in FOLDER (by default ../shared/tokenizers beside
  the checkout), which are not ours to copy: their SHA-256, and of every conversation the length
  and the SHA-256 of the text; of a few the text, for people to read;
- `tokens`: for the tokenizers there, the number and the SHA-256 of the tokens.

A refusal is recorded as "!" and the kind of the error, with the words of `raise_exception`. Where
transformers leaves its own mark of an unfinished message in the text, "!Marked" is recorded.
Without FOLDER, what was recorded of it stays.
"""

import datetime
import hashlib
import inspect
import json
import logging
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import tokenizers
import transformers
from transformers.utils import chat_template_utils

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
DEMO = ROOT / "serving" / "moejax_serving" / "demo"
OUTPUT = DATA / "chat_renderings.json"
CASES: dict[str, Any] = json.loads((DATA / "chat_cases.json").read_text("utf-8"))
MESSAGES = CASES["conversations"]["system"]["messages"]
IN_FULL = {
    "GLM-4.6.jinja": ["call", "reasoning"],
    "openai-gpt-oss-120b.jinja": ["tools and system"],
    "qwen3": ["calls at once", "thinking off"],
    "mixtral-8x7b-v1": ["turns"],
}


class FixedDatetime(datetime.datetime):
    """Its now() is the one of the cases, which templates can show."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "FixedDatetime":
        return cls.fromisoformat(CASES["now"])


def main() -> None:
    chat_template_utils.datetime = FixedDatetime
    logging.disable(logging.WARNING)
    folder = pathlib.Path(sys.argv[1]) if sys.argv[1:] else ROOT.parent / "shared" / "tokenizers"
    data = json.loads(OUTPUT.read_text("utf-8")) if OUTPUT.exists() else {}
    blank = blank_tokenizer(**CASES["special_tokens"])
    sources = {path.stem: path.read_text("utf-8") for path in DATA.glob("chat_templates/*.jinja")}
    data["transformers"] = transformers.__version__
    data["jinja2"] = jinja2.__version__
    settings = json.loads((DEMO / "tokenizer_config.json").read_text("utf-8"))
    sources["built-in"] = settings["chat_template"]
    data["arguments"] = sorted(
        {
            *inspect.signature(blank.apply_chat_template).parameters,
            *inspect.signature(chat_template_utils.render_jinja_template).parameters,
        }
    )
    data["own"] = {name: record_all(blank, sources[name]) for name in sorted(sources)}
    data["snippets"] = [
        attempt(lambda source=source: render(blank, MESSAGES, source))
        for source in CASES["snippets"]
    ]
    data["folders"] = {name: record_folder(files) for name, files in CASES["folders"].items()}
    if folder.is_dir():
        data["shared"], data["tokens"] = record_shared(folder, blank)
    OUTPUT.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def blank_tokenizer(**special_tokens: str) -> transformers.PreTrainedTokenizerFast:
    """It knows the special tokens and no other."""
    vocabulary = {token: i for i, token in enumerate(special_tokens.values())}
    model = tokenizers.models.WordLevel({"<unk>": 0} | vocabulary, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def render(tokenizer: Any, messages: Any, template: str | None, **options: Any) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )


def record_all(tokenizer: Any, template: str | None) -> dict[str, str]:
    """The text of every conversation, by its name."""
    return {
        name: attempt(
            lambda case=case: render(
                tokenizer,
                case["messages"],
                template,
                tools=CASES["tools"].get(case.get("tools")),
                **{"add_generation_prompt": True, **case.get("options", {})},
            )
        )
        for name, case in CASES["conversations"].items()
    }


def attempt(do: Callable[[], str]) -> str:
    try:
        text = do()
        return "!Marked" if "CONTINUE_FINAL_MESSAGE_TAG" in text else text
    except Exception as error:  # templates fail in any way
        kind = type(error).__name__
        return f"!{kind}: {error}" if kind == "TemplateError" else f"!{kind}"


def record_folder(files: Mapping[str, Any]) -> dict[str, str]:
    """What a tokenizer's folder with these files, in words or as JSON, makes of the messages."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        blank_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files = {"tokenizer_config.json": {}, **files}
        for file, content in files.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            if file == "tokenizer_config.json":
                content = {**settings, **content}
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_bytes(text.encode("utf-8"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return {
            "plain": attempt(lambda: render(tokenizer, MESSAGES, None)),
            "tools": attempt(lambda: render(tokenizer, MESSAGES, None, tools=[])),
        }


def record_shared(folder: pathlib.Path, blank: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shared, tokens = {}, {}
    for path in sorted(folder.glob("chat_templates/*.jinja")):
        source = path.read_text("utf-8")
        shared[path.name] = describe(path.name, source, record_all(blank, source))
    for path in sorted(path.parent for path in folder.glob("*/tokenizer.json")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        texts = record_all(tokenizer, None)
        shared[path.name] = describe(path.name, tokenizer.chat_template, texts)
        tokens[path.name] = {
            name: summary(json.dumps(ids), len(ids))
            for name, text in texts.items()
            if not text.startswith("!")
            for ids in [tokenizer.encode(text, add_special_tokens=False)]
        }
    return shared, tokens


def describe(name: str, source: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """What may be kept of a template that is not ours."""
    entry: dict[str, Any] = {
        "sha256": hashlib.sha256(source.encode("utf-8")).hexdigest(),
        "renderings": {
            case: text if text.startswith("!") else summary(text, len(text))
            for case, text in texts.items()
        },
    }
    if name in IN_FULL:
        entry["texts"] = {case: texts[case] for case in IN_FULL[name]}
    return entry


def summary(text: str, length: int) -> str:
    return f"{length} {hashlib.sha256(text.encode('utf-8')).hexdigest()}"


if __name__ == "__main__":
    main()
