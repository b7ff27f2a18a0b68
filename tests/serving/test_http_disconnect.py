"""A client that goes away: its requests are aborted at once."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http import create_app
from moejax_serving.service import Service
from serving.http_calls import CHAT, COMPLETIONS, NAMES, body_of

Sent = list[dict[str, Any]]


def leave(
    core: Any,
    path: str,
    body: dict[str, Any],
    wait: Callable[[Sent], Awaitable[None]],
    *,
    send_seconds: float = 0,
) -> tuple[Sent, AsyncEngine]:
    """Sends a request, goes away once `wait` returns, and returns what came by then."""
    engine = AsyncEngine(core)
    app = create_app(Service.of(engine, NAMES))
    sent: Sent = []

    async def scenario() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await asyncio.sleep(send_seconds)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 2),
        }
        task = asyncio.create_task(app(scope, receive, send))
        await wait(sent)
        gone.set()
        await task
        assert engine.num_requests == 0

    try:
        asyncio.run(asyncio.wait_for(scenario(), 20))
    finally:
        engine.shutdown()
    return sent, engine


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.shows("server", "a client that goes away frees its place")
def test_a_client_that_goes_away_aborts_its_requests(fake_engine: Any) -> None:
    fake_engine.is_stuck = True

    async def wait(sent: Sent) -> None:
        await until(lambda: len(fake_engine.added) == 2)

    sent, _ = leave(fake_engine, COMPLETIONS, {"prompt": ["x", "y"]}, wait)
    assert sent[0]["status"] == 499


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_has_not_begun_is_aborted(fake_engine: Any, path: str, n: int) -> None:
    fake_engine.is_stuck = True

    async def wait(sent: Sent) -> None:
        await until(lambda: bool(fake_engine.added))

    sent, _ = leave(fake_engine, path, body_of(path, stream=True, n=n), wait)
    assert sent == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": ["x", "y", "z"]}),
        (CHAT, body_of(CHAT)),
    ],
)
def test_a_stream_that_runs_is_aborted(fake_engine: Any, path: str, body: dict[str, Any]) -> None:
    fake_engine.reply = [40] * 1000
    step = type(fake_engine).step

    def step_once() -> Any:
        fake_engine.is_stuck = True  # until the test has seen the first chunk, no step follows
        return step(fake_engine)

    fake_engine.step = step_once

    async def wait(sent: Sent) -> None:
        await until(lambda: len(sent) >= 2)

    sent, _ = leave(fake_engine, path, {**body, "stream": True, "max_tokens": 10}, wait)
    assert sent[0]["status"] == 200
    assert all(message.get("more_body", True) for message in sent)


def test_a_client_that_leaves_while_a_chunk_is_sent_aborts_its_stream(fake_engine: Any) -> None:
    fake_engine.reply = [40] * 40

    async def wait(sent: Sent) -> None:
        await until(lambda: len(sent) >= 2)

    body = {"prompt": "x", "stream": True, "max_tokens": 40}
    sent, _ = leave(fake_engine, COMPLETIONS, body, wait, send_seconds=3600)
    assert len(sent) == 2
