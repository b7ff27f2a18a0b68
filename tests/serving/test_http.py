"""The HTTP interface, over a fake engine: by raw requests and by OpenAI's own client."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
import openai
import pytest

from moejax.errors import CapacityError, RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http import create_app
from moejax_serving.http_errors import error_response
from moejax_serving.outputs import Logprob

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
Scenario = Callable[[httpx.AsyncClient, AsyncEngine], Awaitable[None]]


def run(core: Any, scenario: Scenario, *, max_queued_requests: int = 8, **options: Any) -> None:
    """Runs the scenario on a client of an application; one that hangs fails instead."""
    engine = AsyncEngine(core, max_queued_requests=max_queued_requests)
    options = {"served_model_names": ["m", "org/alias"], "default_sampling": {}} | options
    app = create_app(engine, **options)

    async def limited() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            asyncio.timeout(20),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await scenario(client, engine)

    try:
        asyncio.run(limited())
    finally:
        engine.shutdown()


def post(core: Any, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
    """Status and body of the answer to one request."""
    answers = []

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.post(path, json=body)
        answers.append((response.status_code, response.json()))

    run(core, scenario, **options)
    return answers[0]


def assert_is_error(
    answer: tuple[int, Any], status: int, text: str, param: str | None = None
) -> None:
    got, body = answer
    assert got == status, body
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert text in body["error"]["message"]
    assert body["error"]["param"] == param


# Health and models


def test_health_follows_the_engine(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        assert (await client.get("/health")).status_code == 200
        fake_engine.fail_in_step = RuntimeError("no memory")
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        answer = (response.status_code, response.json())
        assert_is_error(answer, 500, "the engine failed: RuntimeError: no memory")
        response = await client.get("/health")
        answer = (response.status_code, response.json())
        assert_is_error(answer, 503, "the engine is not running")

    run(fake_engine, scenario)


def test_models_are_listed_with_their_length(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        models = (await client.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [card["id"] for card in models["data"]] == ["m", "org/alias"]
        card = models["data"][1]
        assert card == {
            "id": "org/alias",
            "object": "model",
            "created": card["created"],
            "owned_by": "moejax",
            "root": "m",
            "parent": None,
            "max_model_len": 64,
            "permission": [],
        }
        assert (await client.get("/v1/models/org/alias")).json() == card

    run(fake_engine, scenario)


def test_the_schema_describes_the_bodies(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        schema = (await client.get("/openapi.json")).json()
        assert {COMPLETIONS, CHAT, "/health", "/v1/models"} <= schema["paths"].keys()
        assert "temperature" in schema["components"]["schemas"]["ChatBody"]["properties"]

    run(fake_engine, scenario)


# Completions


def test_a_text_is_completed(fake_engine: Any) -> None:
    status, body = post(fake_engine, COMPLETIONS, {"model": "org/alias", "prompt": "Say"})
    assert status == 200
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == "org/alias"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_max_tokens_is_16_unless_given(fake_engine: Any) -> None:
    post(fake_engine, COMPLETIONS, {"prompt": "Say"})
    _, body = post(fake_engine, COMPLETIONS, {"prompt": "Say", "max_tokens": 2})
    assert [params.max_tokens for _, params, _ in fake_engine.added] == [16, 2]
    assert body["choices"][0]["text"] == "He"
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_default_of_max_tokens_shrinks_to_what_is_left(fake_engine: Any) -> None:
    post(fake_engine, COMPLETIONS, {"prompt": [1] * 60})
    assert fake_engine.added[0][1].max_tokens == 4


@pytest.mark.shows("server", "`/v1/completions`: texts and token ids, alone and in lists")
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [("ab", 2)]),
        (["a", "bcd"], [("a", 1), ("bcd", 3)]),
        ([5, 6, 7], [(None, 3)]),
        ([[5], [6, 7]], [(None, 1), (None, 2)]),
    ],
)
def test_prompts_come_in_four_forms(
    fake_engine: Any, prompt: Any, expected: list[tuple[str | None, int]]
) -> None:
    status, body = post(fake_engine, COMPLETIONS, {"prompt": prompt})
    assert status == 200
    assert [(text, len(ids)) for ids, _, text in fake_engine.added] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(count for _, count in expected)


def test_sampling_parameters_reach_the_engine(fake_engine: Any) -> None:
    body = {
        "prompt": "x",
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -7,
        "stop": "end",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "max_tokens": 5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    assert post(fake_engine, COMPLETIONS, body)[0] == 200
    params = fake_engine.added[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 0, 0.1)
    assert (params.seed, params.stop_strings, params.stop_ids) == (-7, ("end",), (9,))
    assert (params.ignore_eos, params.max_tokens) == (True, 5)
    assert not params.skip_special_tokens and params.include_stop_str_in_output


def test_the_checkpoints_sampling_fills_what_a_request_leaves_out(fake_engine: Any) -> None:
    defaults = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        body = {**prompt, "temperature": 0, "top_k": None}
        assert post(fake_engine, path, body, default_sampling=defaults)[0] == 200
        params = fake_engine.added[-1][1]
        assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.95, 40)


def test_logprobs_have_the_legacy_shape(fake_engine: Any) -> None:
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 2}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    text = fake_engine.tokenizer.token_text
    assert logprobs == {
        "tokens": ["H", "e"],
        "token_logprobs": [-2.0, -2.0],
        "top_logprobs": [
            {"H": -2.0, text(70): -0.5, text(71): -1.0},
            {"e": -2.0, text(70): -0.5, text(71): -1.0},
        ],
        "text_offset": [0, 1],
    }


def test_an_infinite_logprob_becomes_a_number(fake_engine: Any) -> None:
    body = {"prompt": "x", "logprobs": 4, "max_tokens": 1}
    (top,) = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]["top_logprobs"]
    assert top[fake_engine.tokenizer.token_text(73)] == -9999.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_json_cannot_hold_is_the_lowest(fake_engine: Any, value: float) -> None:
    fake_engine._logprobs = lambda token_id, count: {token_id: Logprob(value, 1, "x")}
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 1}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and logprobs["top_logprobs"] == [{"x": -9999.0}]
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    (entry,) = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_tokens_of_one_name_keep_the_larger_logprob(fake_engine: Any) -> None:
    fake_engine._text = lambda token_id: "same"
    body = {"prompt": "x", "logprobs": 3, "max_tokens": 1}
    logprobs = post(fake_engine, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"same": -0.5}]
    assert logprobs["token_logprobs"] == [-2.0]


def test_a_server_without_tokenizer_takes_token_ids(fake_engine: Any) -> None:
    fake_engine.tokenizer = None
    answer = post(fake_engine, COMPLETIONS, {"prompt": "x"})
    assert_is_error(answer, 400, "the server has no tokenizer", "prompt")
    assert_is_error(post(fake_engine, CHAT, {"messages": USER}), 400, "tokenizer", "messages")
    body = {"prompt": [1, 2], "logprobs": 1}
    status, answered = post(fake_engine, COMPLETIONS, body)
    assert status == 200
    assert answered["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{fake_engine.reply[0]}"


# Chat


@pytest.mark.shows("server", "`/v1/chat/completions`")
def test_a_conversation_is_continued(fake_engine: Any) -> None:
    status, body = post(fake_engine, CHAT, {"model": "m", "messages": USER})
    assert status == 200
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    ((ids, params, text),) = fake_engine.added
    assert text == "<|user|>Hi<|end|><|assistant|>"
    assert params.max_tokens == 64 - len(ids)
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_the_prompt_for_an_answer_can_be_left_out(fake_engine: Any) -> None:
    post(fake_engine, CHAT, {"messages": USER, "add_generation_prompt": False})
    assert fake_engine.added[0][2] == "<|user|>Hi<|end|>"


def test_text_parts_become_one_text(fake_engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    post(fake_engine, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert fake_engine.added[0][2] == "<|user|>a\nb<|end|><|assistant|>"


def test_other_parts_are_refused_by_name(fake_engine: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    answer = post(fake_engine, CHAT, {"messages": [{"role": "user", "content": parts}]})
    place = "messages[0].content[1]"
    assert_is_error(answer, 400, f"{place} is of type 'image_url'", place)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_are_taken(fake_engine: Any, name: str) -> None:
    status, body = post(fake_engine, CHAT, {"messages": USER, name: 2})
    assert status == 200 and body["choices"][0]["message"]["content"] == "He"
    answer = post(fake_engine, CHAT, {"messages": USER, name: 64})
    assert_is_error(answer, 400, f"{name} is 64, but", name)
    answer = post(fake_engine, CHAT, {"messages": USER, name: 0})
    assert_is_error(answer, 400, f"{name} must be at least 1, got 0", name)


def test_logprobs_have_the_shape_of_chat(fake_engine: Any) -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    logprobs = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]
    text = fake_engine.tokenizer.token_text
    assert logprobs == {
        "content": [
            {
                "token": "H",
                "logprob": -2.0,
                "bytes": [72],
                "top_logprobs": [
                    {"token": text(70), "logprob": -0.5, "bytes": list(text(70).encode())},
                    {"token": text(71), "logprob": -1.0, "bytes": list(text(71).encode())},
                ],
            }
        ]
    }


def test_logprobs_alone_have_no_alternatives(fake_engine: Any) -> None:
    body = {"messages": USER, "logprobs": True, "max_tokens": 1}
    (entry,) = post(fake_engine, CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


def test_arguments_reach_the_template(fake_engine: Any) -> None:
    seen = []
    render = fake_engine.tokenizer.chat_template.render

    class Noting:
        def render(self, messages: Any, variables: Any, **options: Any) -> Any:
            seen.append((messages, variables))
            return render(messages, variables, **options)

    fake_engine.tokenizer.chat_template, kept = Noting(), fake_engine.tokenizer.chat_template
    try:
        message = {"role": "user", "content": "x", "name": "Ann", "refusal": None}
        body = {"messages": [message], "chat_template_kwargs": {"thinking": False}}
        assert post(fake_engine, CHAT, body)[0] == 200
    finally:
        fake_engine.tokenizer.chat_template = kept
    ((messages, variables),) = seen
    assert messages == [{"role": "user", "content": "x", "name": "Ann"}]
    assert variables == {"thinking": False}


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "self"])
def test_arguments_may_not_replace_the_conversation(fake_engine: Any, name: str) -> None:
    body = {"messages": USER, "chat_template_kwargs": {name: True}}
    answer = post(fake_engine, CHAT, body)
    assert_is_error(answer, 400, f"may not set {name}", "chat_template_kwargs")


def test_further_keys_of_a_message_may_be_nested_deep(fake_engine: Any) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "Hi", "name": deep}]}
    assert post(fake_engine, CHAT, body)[0] == 200


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}])
def test_a_message_without_content_is_named_by_its_place(fake_engine: Any, message: Any) -> None:
    answer = post(fake_engine, CHAT, {"messages": [*USER, message]})
    assert_is_error(answer, 400, "messages[1] has no content: a text or", "messages[1].content")


def test_a_model_without_template_says_so(fake_engine: Any) -> None:
    template, fake_engine.tokenizer.chat_template = fake_engine.tokenizer.chat_template, None
    try:
        answer = post(fake_engine, CHAT, {"messages": USER})
    finally:
        fake_engine.tokenizer.chat_template = template
    assert_is_error(answer, 400, "the model has no chat template", "messages")


# Errors


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (COMPLETIONS, {}, "prompt", "prompt: Field required"),
        (COMPLETIONS, {"prompt": 3}, "prompt", "prompt: Input should be a valid string, or:"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "the prompt is empty"),
        (
            COMPLETIONS,
            {"prompt": [1] * 64},
            "prompt",
            "has 64 tokens, and the model's context of 64",
        ),
        (
            COMPLETIONS,
            {"prompt": ["a"] * 9},
            "prompt",
            "9 prompts in one request; the server holds",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "max_tokens": 64},
            "max_tokens",
            "is 64, but 63 tokens are left",
        ),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "between 0 and"),
        (COMPLETIONS, {"prompt": "x", "top_k": 10**30}, "top_k", "top_k"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**70}, "seed", "seed must be between"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", 1]}, "stop", "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "free of empty strings"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 strings, got 17"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
        (CHAT, {"messages": []}, "messages", "messages is empty"),
        (CHAT, {"messages": "x"}, "messages", "messages: Input should be a valid list"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", "messages[0].role: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages", "messages[0].content"),
        (CHAT, {"messages": USER, "top_logprobs": 1}, "top_logprobs", "needs logprobs=true"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
        (CHAT, {"messages": USER, "logprobs": 1}, "logprobs", "valid boolean"),
    ],
)
def test_a_wrong_body_is_refused_by_field(
    fake_engine: Any, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    assert_is_error(post(fake_engine, path, body), 400, text, param)
    assert not fake_engine.added


@pytest.mark.shows("server", "what is not supported is refused by name, in OpenAI's error shape")
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (COMPLETIONS, "stream", True),
        (COMPLETIONS, "n", 2),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "echo", True),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "logit_bias", {"1": 2}),
        (COMPLETIONS, "presence_penalty", 0.5),
        (COMPLETIONS, "frequency_penalty", -0.5),
        (COMPLETIONS, "repetition_penalty", 1.2),
        (COMPLETIONS, "prompt_logprobs", 1),
        (CHAT, "stream", True),
        (CHAT, "n", 2),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "structured_outputs", {"regex": "x"}),
        (CHAT, "logit_bias", {"1": 2}),
        (CHAT, "presence_penalty", 1),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "chat_template", "{{ x }}"),
        (CHAT, "modalities", ["audio"]),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    fake_engine: Any, path: str, name: str, value: Any
) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    answer = post(fake_engine, path, {**body, name: value})
    assert_is_error(answer, 400, f"{name}=", name)
    assert "is not supported" in answer[1]["error"]["message"]


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
def test_an_unknown_model_is_not_found(fake_engine: Any, path: str) -> None:
    body = {"prompt": "x", "messages": USER, "model": "other"}
    answer = post(fake_engine, path, body)
    assert_is_error(answer, 404, "'other' is not served here; these are: m, org/alias", "model")
    assert answer[1]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_a_wrong_route_is_an_openai_error(
    fake_engine: Any, method: str, path: str, status: int
) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.request(method, path)
        param = "model" if path == "/v1/models/other" else None
        assert_is_error((response.status_code, response.json()), status, "", param)
        assert (status == 405) == ("allow" in response.headers)

    run(fake_engine, scenario)


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (
            b'{"prompt": ',
            "application/json",
            "the body is not JSON: Expecting value at character 11",
        ),
        (b"", "application/json", "the body must be a JSON object"),
        (b"[1]", "application/json", "the body must be a JSON object"),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (b'{"prompt": "\xff"}', "application/json", "not UTF-8: invalid start byte at byte 12"),
        (b'{"prompt": "\\ud800"}', "application/json", "half a surrogate pair"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", "temperature"),
        (b'{"prompt": "x", "top_k": "\\ud800"}', "application/json", "top_k: Input should be"),
        (b'{"prompt": "x", "\\ud800": 1}', "application/json", "the body: Input should be a valid"),
        (b"[" * 100_000, "application/json", "it is nested too deep"),
        (
            b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
            "application/json",
            "an integer of more than 4300 digits",
        ),
    ],
)
def test_a_body_that_is_no_json_is_a_wrong_request(
    fake_engine: Any, content: bytes, kind: str, text: str
) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        headers = {"Content-Type": kind}
        response = await client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert text in error["message"]

    run(fake_engine, scenario)


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_half_a_surrogate_pair_is_named_by_its_field(
    fake_engine: Any, path: str, param: str
) -> None:
    text = "a\ud800"
    body = json.dumps({"prompt": text, "messages": [{"role": "user", "content": text}]})

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.post(
            path, content=body, headers={"Content-Type": "application/json"}
        )
        answer = (response.status_code, response.json())
        assert_is_error(answer, 400, "half a surrogate pair", param)

    run(fake_engine, scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_cannot_fit_is_refused_without_reading_all_of_it(
    fake_engine: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    encode = type(fake_engine.tokenizer).encode

    def noting(self: Any, text: str, add_special_tokens: bool = True) -> Any:
        read.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(fake_engine.tokenizer), "encode", noting)
    text = "x" * 5_000_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    answer = post(fake_engine, path, body)
    param = "prompt" if path == COMPLETIONS else "messages"
    assert_is_error(answer, 400, "tokens already; max_model_len = 64", param)
    assert answer[1]["error"]["code"] == "context_length_exceeded"
    assert sum(read) < 10_000


def test_too_many_prompts_are_refused_before_they_are_encoded(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(fake_engine.tokenizer), "encode_prompt")
    answer = post(fake_engine, COMPLETIONS, {"prompt": ["a"] * 9})
    assert_is_error(answer, 400, "9 prompts in one request", "prompt")


def test_a_long_wrong_list_is_refused_quickly(fake_engine: Any) -> None:
    answer = post(fake_engine, COMPLETIONS, {"prompt": [*[1] * 500_000, "x"]})
    assert answer[0] == 400 and len(answer[1]["error"]["message"]) < 500


def test_an_error_may_quote_what_utf8_cannot_hold() -> None:
    assert json.loads(error_response(400, "a\ud800").body)["error"]["message"] == "a?"


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_large_body_is_refused(fake_engine: Any, is_declared: bool) -> None:
    content = json.dumps({"prompt": "x" * 2000}).encode()

    async def chunks() -> Any:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.post(
            COMPLETIONS,
            content=content if is_declared else chunks(),
            headers={"Content-Type": "application/json"},
        )
        answer = (response.status_code, response.json())
        assert_is_error(answer, 413, "the body is larger than 1000 bytes")

    run(fake_engine, scenario, max_body_bytes=1000)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("token id 999 is out of range", param="prompt"), 400, "prompt"),
        (CapacityError("9 pages are needed, 8 exist"), 400, None),
        (ValueError("bug"), 500, None),
    ],
)
def test_an_error_of_the_engine_reaches_the_client(
    fake_engine: Any, error: Exception, status: int, param: str | None
) -> None:
    fake_engine.fail_in_add = error
    answer = post(fake_engine, COMPLETIONS, {"prompt": ["x", "y"]})
    assert_is_error(answer, status, str(error), param)


def test_a_bug_in_the_server_is_an_openai_error(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("moejax_serving.completions.count_usage", fail)
    answer = post(fake_engine, COMPLETIONS, {"prompt": "x"})
    assert_is_error(answer, 500, "the server failed: ZeroDivisionError")


def test_a_full_queue_asks_to_try_again(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": ["x", "y"]}))
        while len(fake_engine.added) < 2:
            await asyncio.sleep(0.001)
        response = await client.post(COMPLETIONS, json={"prompt": "z"})
        answer = (response.status_code, response.json())
        assert_is_error(answer, 429, "the server holds 2 requests")
        assert int(response.headers["retry-after"]) >= 1
        first.cancel()

    run(fake_engine, scenario, max_queued_requests=2)


@pytest.mark.shows("server", "a client that goes away frees its place")
def test_a_client_that_goes_away_aborts_its_requests(fake_engine: Any) -> None:
    fake_engine.is_stuck = True
    engine = AsyncEngine(fake_engine)
    app = create_app(engine, ["m"], {})
    body = json.dumps({"prompt": ["x", "y"]}).encode()
    sent = []

    async def scenario() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 2),
        }
        task = asyncio.create_task(app(scope, receive, send))
        while len(fake_engine.added) < 2:
            await asyncio.sleep(0.001)
        gone.set()
        await task
        while len(fake_engine.aborted) < 2:
            await asyncio.sleep(0.001)
        assert engine.num_requests == 0

    try:
        asyncio.run(asyncio.wait_for(scenario(), 20))
    finally:
        engine.shutdown()
    assert sent[0]["status"] == 499


# OpenAI's own client


def test_the_openai_client_understands_everything(fake_engine: Any) -> None:
    async def scenario(_: httpx.AsyncClient, engine: AsyncEngine) -> None:
        transport = httpx2.ASGITransport(create_app(engine, ["org/alias"], {}))
        async with (
            httpx2.AsyncClient(transport=transport) as http_client,
            openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=http_client, max_retries=0
            ) as client,
        ):
            assert [model.id async for model in client.models.list()] == ["org/alias"]
            assert (await client.models.retrieve("org/alias")).owned_by == "moejax"
            completion = await client.completions.create(
                model="org/alias", prompt=["x", "y"], logprobs=1, extra_body={"min_p": 0.1}
            )
            assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
            assert completion.choices[0].logprobs is not None
            chat = await client.chat.completions.create(
                model="org/alias",
                messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                logprobs=True,
                top_logprobs=1,
                max_completion_tokens=5,
            )
            assert chat.choices[0].message.content == "Hello"
            assert chat.choices[0].finish_reason == "length"
            assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
            assert chat.usage is not None and chat.usage.completion_tokens == 5
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="other", prompt="x")
            assert missing.value.code == "model_not_found" and missing.value.param == "model"
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.completions.create(model="org/alias", prompt="x" * 64)
            assert wrong.value.code == "context_length_exceeded"

    run(fake_engine, scenario)
