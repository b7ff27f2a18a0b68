"""Bodies of requests: what is wrong is refused by field."""

import json
from typing import Any

import httpx
import pytest

from moejax_serving.async_engine import AsyncEngine
from serving.http_calls import (
    CHAT,
    COMPLETIONS,
    USER,
    assert_is_error,
    post,
    run,
)


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
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "and 20, got 21"),
        (
            COMPLETIONS,
            {"prompt": "x", "prompt_logprobs": 0, "stream": True},
            "prompt_logprobs",
            "needs stream=false",
        ),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "between 1 and 128, got 0"),
        (COMPLETIONS, {"prompt": "x", "n": 9}, "n", "n = 9 for each of 1 prompts"),
        (COMPLETIONS, {"prompt": ["x"] * 5, "n": 2}, "n", "n = 2 for each of 5 prompts"),
        (
            COMPLETIONS,
            {"prompt": "x", "max_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "at most max_tokens = 2, got 3",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "max_tokens": 0, "min_tokens": 1, "echo": True},
            "min_tokens",
            "at most max_tokens = 0, got 1",
        ),
        (COMPLETIONS, {"prompt": "x", "min_tokens": -1}, "min_tokens", "got -1"),
        (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "-2 and 2"),
        (COMPLETIONS, {"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", "-2 and 2"),
        (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "got 0"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "mapping of token"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "and 100, got 101"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "2"}}, "logit_bias", "a number, got"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": [1]}, "logit_bias", "valid dictionary"),
        (COMPLETIONS, {"prompt": "x", "stream": 1}, "stream", "valid boolean"),
        (
            COMPLETIONS,
            {"prompt": "x", "stream_options": {}},
            "stream_options",
            "stream_options needs stream=true",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options",
            "stream_options.include_usage: Input should be a valid boolean",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "is not supported",
        ),
        (CHAT, {"messages": USER, "n": 9}, "n", "n = 9 for each of 1 prompts"),
        (CHAT, {"messages": USER, "stream_options": {}}, "stream_options", "needs stream=true"),
        (
            CHAT,
            {"messages": USER, "stream": True, "prompt_logprobs": 1},
            "prompt_logprobs",
            "needs stream=false",
        ),
        (
            CHAT,
            {"messages": USER, "max_completion_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "at most max_tokens = 2, got 3",
        ),
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


def test_a_long_wrong_mapping_is_refused_quickly(fake_engine: Any) -> None:
    body = {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(500_000)), "x")}
    assert_is_error(
        post(fake_engine, COMPLETIONS, body), 400, "at most 1024 tokens, got 500000", "logit_bias"
    )


def test_a_long_wrong_list_is_refused_quickly(fake_engine: Any) -> None:
    answer = post(fake_engine, COMPLETIONS, {"prompt": [*[1] * 500_000, "x"]})
    assert answer[0] == 400 and len(answer[1]["error"]["message"]) < 500


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
