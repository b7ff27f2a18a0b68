"""Calls of the HTTP application, and an engine that answers as it is told."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http import create_app
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.service import Service
from moejax_serving.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
NAMES = ("m", "org/alias")
Scenario = Callable[[httpx.AsyncClient, AsyncEngine], Awaitable[None]]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A body with a prompt of two tokens, or a conversation of one message."""
    return ({"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}) | fields


def run(core: Any, scenario: Scenario, *, max_queued_requests: int = 8, **options: Any) -> None:
    """Runs the scenario on a client of an application; one that hangs fails instead."""
    engine = AsyncEngine(core, max_queued_requests=max_queued_requests)
    try:
        call(Service.of(engine, NAMES), lambda client: scenario(client, engine), **options)
    finally:
        engine.shutdown()


def call(
    service: Service, scenario: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any
) -> None:
    """Runs the scenario on a client of a service's application."""

    async def limited() -> None:
        app = create_app(service, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            asyncio.timeout(20),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await scenario(client)

    asyncio.run(limited())


def post(core: Any, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
    """Status and body of the answer to one request."""
    answers = []

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.post(path, json=body)
        answers.append((response.status_code, response.json()))

    run(core, scenario, **options)
    return answers[0]


def get(core: Any, path: str) -> tuple[int, Any]:
    """Status and body of the answer to one request."""
    answers = []

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.get(path)
        answers.append((response.status_code, response.json()))

    run(core, scenario)
    return answers[0]


def stream(core: Any, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """The chunks of the answer to one request."""
    answers = []

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        response = await client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        answers.append(read_events(response.content))

    run(core, scenario, **options)
    return answers[0]


def read_events(content: bytes) -> list[Any]:
    """The data of events, which must be framed strictly and end with [DONE]."""
    assert content.endswith(b"\n\n") and content.isascii()
    events = content.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    *data, done = (event.removeprefix("data: ") for event in events)
    assert done == "[DONE]" and "[DONE]" not in data
    return [json.loads(item) for item in data]


def join_chunks(path: str, chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The choices that the chunks make, in the order of their indices."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            if path == CHAT and index not in found:
                assert choice["delta"] == {"role": "assistant", "content": ""}
            into = found.setdefault(
                index, {"text": "", "lists": {}, "finish_reason": None, "stop_reason": None}
            )
            assert into["finish_reason"] is None, "a choice went on after its end"
            into["text"] += (
                choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            )
            for name, items in (choice["logprobs"] or {}).items():
                into["lists"].setdefault(name, []).extend(items)
            into["finish_reason"] = choice["finish_reason"]
            into["stop_reason"] = choice.get("stop_reason")
    return [found[index] for index in sorted(found)]


def assert_is_error(
    answer: tuple[int, Any], status: int, text: str, param: str | None = None
) -> None:
    """Checks an answer for OpenAI's error shape."""
    got, body = answer
    assert got == status, body
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert text in body["error"]["message"]
    assert body["error"]["param"] == param


class ScriptedEngine:
    """Answers the i-th prompt of a request as the script says: whole, or in the given pieces."""

    model_name = "scripted"
    max_model_len = 64

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.default_sampling: dict[str, float | int] = {}
        self.whole: Sequence[RequestOutput] = []
        self.pieces: Sequence[Sequence[RequestOutput]] = []
        self._pending: list[tuple[str, list[RequestOutput]]] = []

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        stream: bool = False,
    ) -> None:
        index = int(request_id.rpartition("-")[2])
        outputs = self.pieces[index] if stream else [self.whole[index]]
        self._pending.append((request_id, list(outputs)))

    def abort(self, request_id: str) -> None:
        self._pending = [(name, outputs) for name, outputs in self._pending if name != request_id]

    def close(self) -> None:
        self._pending = []

    def has_unfinished(self) -> bool:
        return bool(self._pending)

    def step(self) -> list[RequestOutput]:
        found = [
            dataclasses.replace(outputs.pop(0), request_id=name) for name, outputs in self._pending
        ]
        self._pending = [(name, outputs) for name, outputs in self._pending if outputs]
        return found
