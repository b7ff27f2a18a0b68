"""/metrics, and how HTTP requests are counted for it."""

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.metrics import Metrics
from moejax_serving.service import Service
from serving.http_calls import CHAT, COMPLETIONS, NAMES, USER, call, run


def count(text: str) -> dict[tuple[str, str, str], float]:
    """HTTP requests by handler, method and status."""
    return {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


def test_requests_are_counted_by_route_method_and_status(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        await client.get("/health")
        await client.get("/v1/models/m")
        await client.get("/v1/models/other")
        await client.get("/v1/models/org/alias")
        await client.get("/nothing/at/all")
        await client.get(COMPLETIONS)
        await client.post(COMPLETIONS, json={"prompt": "x"})
        await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        await client.post(CHAT, json={"messages": USER, "n": 0})
        await client.request("BREW", "/health")
        response = await client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        assert count(response.text) == {
            ("/health", "GET", "2xx"): 1,
            ("/v1/models/{name}", "GET", "2xx"): 2,
            ("/v1/models/{name}", "GET", "4xx"): 1,
            ("none", "GET", "4xx"): 1,
            (COMPLETIONS, "GET", "4xx"): 1,
            (COMPLETIONS, "POST", "2xx"): 2,
            (CHAT, "POST", "4xx"): 1,
            ("/health", "other", "4xx"): 1,
        }

    run(fake_engine, scenario)


def test_a_bug_counts_as_an_error_of_the_server(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("moejax_serving.completions.count_usage", fail)

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        await client.post(COMPLETIONS, json={"prompt": "x"})
        counts = count((await client.get("/metrics")).text)
        assert counts == {(COMPLETIONS, "POST", "5xx"): 1}

    run(fake_engine, scenario)


def test_a_body_that_is_too_large_is_counted_too(fake_engine: Any) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        await client.post(COMPLETIONS, content=json.dumps({"prompt": "x" * 2000}))
        counts = count((await client.get("/metrics")).text)
        assert counts == {("none", "POST", "4xx"): 1}

    run(fake_engine, scenario, max_body_bytes=1000)


def test_a_stream_is_timed_to_its_end(fake_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def observe(self: Metrics, handler: str, method: str, status: int, seconds: float) -> None:
        seen.append((handler, status, len(fake_engine.aborted), fake_engine.has_unfinished()))

    monkeypatch.setattr(Metrics, "observe_http", observe)

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})

    run(fake_engine, scenario)
    assert seen == [(COMPLETIONS, 200, 0, False)]


def test_metrics_are_there_before_the_model() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.get("/metrics")).status_code == 200

    call(Service(Metrics("m"), NAMES), scenario)
