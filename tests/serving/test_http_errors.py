"""Errors in the shape of OpenAI's, with their status."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from moejax.errors import CapacityError, RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http_errors import error_response
from serving.http_calls import CHAT, COMPLETIONS, USER, assert_is_error, post, run


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


def test_an_error_may_quote_what_utf8_cannot_hold() -> None:
    assert json.loads(error_response(400, "a\ud800").body)["error"]["message"] == "a?"


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
