"""Answers as events, over both routes."""

import asyncio
from typing import Any

import httpx
import pytest

from moejax.errors import CapacityError, RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer
from serving.http_calls import (
    CHAT,
    COMPLETIONS,
    ScriptedEngine,
    assert_is_error,
    body_of,
    join_chunks,
    post,
    run,
    stream,
)

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def output(text: str, token_ids: list[int], reason: Any, logprobs: Any = None) -> RequestOutput:
    choice = CompletionOutput(0, text, token_ids, logprobs=logprobs, finish_reason=reason)
    return RequestOutput("", None, [1, 2], None, [choice], reason is not None)


@pytest.mark.shows("server", "streams of server-sent events, for both routes")
def test_a_completion_comes_in_chunks(fake_engine: Any) -> None:
    chunks = stream(fake_engine, COMPLETIONS, {"prompt": "Hi", "max_tokens": 3})
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("cmpl-")
    for chunk in chunks:
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}
        assert (chunk["object"], chunk["model"]) == ("text_completion", "m")
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
        ]
        for text, reason in (("H", None), ("e", None), ("l", "length"))
    ]


def test_a_chat_begins_with_its_role_and_ends_with_its_reason(fake_engine: Any) -> None:
    chunks = stream(fake_engine, CHAT, body_of(CHAT, max_tokens=2))
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    for chunk in chunks:
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "m")
    shared = {"index": 0, "logprobs": None}
    assert [chunk["choices"] for chunk in chunks] == [
        [{**shared, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{**shared, "delta": {"content": "H"}, "finish_reason": None}],
        [
            {
                **shared,
                "delta": {"content": "e"},
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
    ]


@BOTH
def test_the_end_without_text_is_a_chunk(fake_engine: Any, path: str) -> None:
    chunks = stream(fake_engine, path, body_of(path))
    (choice,) = chunks[-1]["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice.get("text", "") == "" and choice.get("delta", {}) == {}


@BOTH
@pytest.mark.parametrize("options", [USAGE, {}, {"include_usage": None}])
def test_usage_comes_once_in_a_last_chunk_without_choices(
    fake_engine: Any, path: str, options: dict[str, Any]
) -> None:
    fake_engine.num_cached_tokens = 1
    whole = post(fake_engine, path, body_of(path, n=2))[1]
    *chunks, last = stream(fake_engine, path, body_of(path, n=2, stream_options=options))
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert last.keys() == chunks[0].keys()


@BOTH
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_usage_is_left_out_unless_asked_for(
    fake_engine: Any, path: str, options: dict[str, Any] | None
) -> None:
    chunks = stream(fake_engine, path, body_of(path, stream_options=options))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@BOTH
@pytest.mark.parametrize("has_last", [True, False])
def test_usage_grows_from_chunk_to_chunk_if_asked_for(
    fake_engine: Any, path: str, has_last: bool
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": has_last}
    chunks = stream(fake_engine, path, body_of(path, n=2, stream_options=options))
    if has_last:
        assert chunks.pop()["usage"]["completion_tokens"] == 12
    assert all(chunk["choices"] for chunk in chunks)
    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
    expected = [1, 2, 3, 4, 5, 6] if path == COMPLETIONS else [0, 1, 2, 3, 4, 5, 6]
    assert counts == {0: expected, 1: expected}


@pytest.mark.parametrize(
    ("fields", "num_chunks"),
    [({}, 2), ({"logprobs": 0}, 3), ({"stream_options": CONTINUOUS}, 4)],
    ids=["plain", "logprobs", "usage"],
)
def test_a_token_without_text_is_a_chunk_only_if_the_chunk_tells_something(
    byte_tokenizer: Tokenizer, fields: dict[str, Any], num_chunks: int
) -> None:
    core = ScriptedEngine(byte_tokenizer)
    asked = "logprobs" in fields
    pieces = [("a", [1], None), ("", [2], None), ("", [], None), ("b", [3], "stop")]
    core.pieces = [
        [
            output(text, ids, reason, [{i: Logprob(-1.0, 1)} for i in ids] if asked else None)
            for text, ids, reason in pieces
        ]
    ]
    assert len(stream(core, COMPLETIONS, {"prompt": [50], **fields})) == num_chunks


def test_offsets_count_on_from_chunk_to_chunk(fake_engine: Any) -> None:
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 3}
    shapes = [c["choices"][0]["logprobs"] for c in stream(fake_engine, COMPLETIONS, body)]
    assert [shape["text_offset"] for shape in shapes] == [[0, 1, 2], [3], [4]]
    assert shapes[0]["token_logprobs"] == [None, -2.0, -2.0]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_without_tokens_to_generate_is_one_chunk(fake_engine: Any, logprobs: Any) -> None:
    body = {"prompt": "Hi", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    chunk, last = stream(fake_engine, COMPLETIONS, {**body, "stream_options": USAGE})
    (choice,) = chunk["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert (choice["logprobs"] is None) == (logprobs is None)
    assert last["usage"]["completion_tokens"] == 0


@BOTH
def test_characters_that_some_clients_take_for_the_end_of_a_line_are_escaped(
    byte_tokenizer: Tokenizer, path: str
) -> None:
    text = "a\u2028b\u0085c\nd"
    core = ScriptedEngine(byte_tokenizer)
    core.pieces = [[output(text, [5], "stop")]]
    chunks = stream(core, path, body_of(path))
    assert join_chunks(path, chunks)[0]["text"] == text


# Errors


@BOTH
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("token id 999 is out of range", param="prompt"), 400, "prompt"),
        (CapacityError("9 pages are needed, 8 exist"), 400, None),
        (ValueError("bug"), 500, None),
    ],
)
def test_an_error_before_the_first_chunk_has_its_status(
    fake_engine: Any, path: str, error: Exception, status: int, param: str | None
) -> None:
    fake_engine.fail_in_add = error
    answer = post(fake_engine, path, body_of(path, stream=True, n=2))
    assert_is_error(answer, status, str(error), param)


@BOTH
def test_logits_that_are_no_numbers_are_an_error_from_the_first_token_on(
    fake_engine: Any, path: str
) -> None:
    fake_engine.finish_reason = "error"
    answer = post(fake_engine, path, body_of(path, stream=True, max_tokens=1))
    assert_is_error(answer, 500, "finish reason error")


def test_a_full_queue_is_told_before_any_prompt_has_begun(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        task = asyncio.create_task(engine.generate([1], SamplingParams()))
        while not fake_engine.added:
            await asyncio.sleep(0.001)
        body = {"prompt": ["x", "y"], "stream": True}
        response = await client.post(COMPLETIONS, json=body)
        assert_is_error((response.status_code, response.json()), 429, "the server holds")
        assert int(response.headers["retry-after"]) >= 1
        task.cancel()

    run(fake_engine, scenario, max_queued_requests=2)


@BOTH
@pytest.mark.parametrize(
    ("failure", "text", "code"),
    [
        ("error", "finish reason error", None),
        ("death", "the engine failed: RuntimeError: no memory", "engine_dead"),
        ("bug", "the server failed: ZeroDivisionError", None),
    ],
)
def test_an_error_after_the_first_chunk_is_an_event(
    fake_engine: Any,
    path: str,
    failure: str,
    text: str,
    code: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = type(fake_engine).step

    if failure == "error":
        fake_engine.finish_reason = "error"
    elif failure == "bug":
        counted: list[Any] = []

        def count(self: Any, at: int, output: Any) -> None:
            counted.append(output)
            if len(counted) > 1:
                raise ZeroDivisionError("oops")

        monkeypatch.setattr("moejax_serving.streaming.ChunkWriter.count", count)
    else:

        def step_then_die() -> Any:
            found = step(fake_engine)
            fake_engine.fail_in_step = RuntimeError("no memory")
            return found

        fake_engine.step = step_then_die
    chunks = stream(fake_engine, path, body_of(path, max_tokens=3, stream_options=USAGE))
    assert chunks[0]["choices"]
    assert chunks[-1].keys() == {"error"}
    assert text in chunks[-1]["error"]["message"]
    assert (chunks[-1]["error"]["type"], chunks[-1]["error"]["code"]) == ("server_error", code)
    assert not any(chunk.get("usage") for chunk in chunks)
