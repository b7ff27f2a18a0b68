"""Keys beyond those that are honoured: refused by name, harmless or unknown."""

import logging
from typing import Any

import httpx
import pytest

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.extras import REFUSED
from serving.http_calls import (
    CHAT,
    COMPLETIONS,
    USER,
    assert_is_error,
    body_of,
    post,
    run,
    stream,
)


@pytest.mark.shows("server", "what is not supported is refused by name, in OpenAI's error shape")
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "structured_outputs", {"regex": "x"}),
        (COMPLETIONS, "response_format", {"type": "json_object"}),
        (COMPLETIONS, "bad_words", ["x"]),
        (COMPLETIONS, "allowed_token_ids", [1]),
        (COMPLETIONS, "logits_processors", ["x"]),
        (COMPLETIONS, "prompt_embeds", "x"),
        (COMPLETIONS, "truncate_prompt_tokens", 5),
        (COMPLETIONS, "length_penalty", 2),
        (COMPLETIONS, "early_stopping", True),
        (COMPLETIONS, "spaces_between_special_tokens", False),
        (COMPLETIONS, "return_token_ids", True),
        (COMPLETIONS, "max_completion_tokens", 5),
        (COMPLETIONS, "top_logprobs", 2),
        (COMPLETIONS, "priority", 1),
        (COMPLETIONS, "cache_salt", "x"),
        (COMPLETIONS, "kv_transfer_params", {}),
        (CHAT, "echo", True),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "function_call", {"name": "f"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        (CHAT, "structured_outputs", {"regex": "x"}),
        (CHAT, "guided_json", {}),
        (CHAT, "guided_regex", "x"),
        (CHAT, "guided_choice", ["x"]),
        (CHAT, "guided_grammar", "x"),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "verbosity", "low"),
        (CHAT, "chat_template", "{{ x }}"),
        (CHAT, "continue_final_message", True),
        (CHAT, "documents", [{"text": "x"}]),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "prediction", {"type": "content", "content": "x"}),
        (CHAT, "web_search_options", {}),
        (CHAT, "mm_processor_kwargs", {"x": 1}),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    fake_engine: Any, path: str, name: str, value: Any
) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    for is_stream in (False, True):
        answer = post(fake_engine, path, {**body, "stream": is_stream, name: value})
        assert_is_error(answer, 400, f"{name}=", name)
        assert "is not supported" in answer[1]["error"]["message"]


def test_every_refused_parameter_is_in_the_table_above() -> None:
    marks = getattr(test_what_is_not_honoured_is_refused_by_name, "pytestmark", [])
    (table,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    assert {name for _, name, _ in table} == REFUSED.keys()


def test_neutral_values_are_taken(fake_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    neutral: dict[str, Any] = {
        "stream": False,
        "stream_options": None,
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "prompt_logprobs": None,
        "return_tokens_as_token_ids": False,
        "min_tokens": 0,
        "user": "me",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
    }
    assert post(fake_engine, COMPLETIONS, {"prompt": "x", "echo": False, **neutral})[0] == 200
    assert post(fake_engine, CHAT, {"messages": USER, **neutral})[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unknown_key_is_ignored_with_one_warning(
    fake_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
            response = await client.post(path, json={**body, "shoe_size": 43})
            assert response.status_code == 200

    run(fake_engine, scenario)
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert texts == ["a request holds 'shoe_size', which is unknown and ignored"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_stream_option_is_ignored_with_one_warning(
    fake_engine: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream(fake_engine, path, body_of(path, stream_options={"shoe_size": 43}))
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert texts == ["a request holds 'shoe_size', which is unknown and ignored"]
