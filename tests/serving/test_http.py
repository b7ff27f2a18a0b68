"""The application: health, models, version, and what /openapi.json says."""

import asyncio
from typing import Any

import httpx
import pytest

import moejax
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.metrics import Metrics
from moejax_serving.service import Service
from serving.http_calls import CHAT, COMPLETIONS, NAMES, assert_is_error, body_of, call, get, run

HEALTH = ["/health", "/ping"]


def loading() -> Service:
    return Service(Metrics("m"), NAMES)


async def read(client: httpx.AsyncClient, path: str) -> tuple[int, Any]:
    response = await client.get(path)
    return response.status_code, response.json()


@pytest.mark.shows("server", "`/health` says ready, loading, draining or dead")
@pytest.mark.parametrize("path", HEALTH)
def test_health_follows_the_server_from_loading_to_draining(fake_engine: Any, path: str) -> None:
    service = loading()

    async def scenario(client: httpx.AsyncClient) -> None:
        assert await read(client, path) == (503, {"status": "loading"})
        engine = AsyncEngine(fake_engine)
        service.set_ready(engine)
        try:
            assert await read(client, path) == (200, {"status": "ok"})
            service.drain()
            assert await read(client, path) == (503, {"status": "draining"})
        finally:
            await asyncio.to_thread(engine.shutdown)

    call(service, scenario)


@pytest.mark.parametrize("path", HEALTH)
def test_health_tells_that_the_engine_is_dead(fake_engine: Any, path: str) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        assert await read(client, path) == (200, {"status": "ok"})
        fake_engine.fail_in_step = RuntimeError("no memory")
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        answer = (response.status_code, response.json())
        assert_is_error(answer, 500, "the engine failed: RuntimeError: no memory")
        assert await read(client, path) == (503, {"status": "dead"})

    run(fake_engine, scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_while_it_loads_the_server_asks_to_try_again(path: str, is_stream: bool) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        response = await client.post(path, json=body_of(path, stream=is_stream))
        answer = (response.status_code, response.json())
        assert_is_error(answer, 503, "the model is still being loaded")
        assert int(response.headers["retry-after"]) >= 1

    call(loading(), scenario)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/tokenizer_info"])
def test_what_is_known_of_the_model_waits_for_it_too(path: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        response = await client.get(path)
        answer = (response.status_code, response.json())
        assert_is_error(answer, 503, "the model is still being loaded")

    call(loading(), scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_server_that_ends_takes_no_more_requests(
    fake_engine: Any, path: str, is_stream: bool
) -> None:
    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        engine.drain()
        response = await client.post(path, json=body_of(path, stream=is_stream))
        answer = (response.status_code, response.json())
        assert_is_error(answer, 503, "the server is shutting down")
        assert answer[1]["error"]["code"] == "shutting_down"
        assert int(response.headers["retry-after"]) >= 1

    run(fake_engine, scenario)


def test_the_version_is_shown(fake_engine: Any) -> None:
    assert get(fake_engine, "/version") == (200, {"version": moejax.__version__})


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


# The schema


@pytest.fixture
def schema(fake_engine: Any) -> Any:
    return get(fake_engine, "/openapi.json")[1]


def test_the_schema_has_every_route(schema: Any) -> None:
    assert {(path, *operations) for path, operations in schema["paths"].items()} == {
        ("/health", "get"),
        ("/ping", "get"),
        ("/version", "get"),
        ("/metrics", "get"),
        ("/v1/models", "get"),
        ("/v1/models/{name}", "get"),
        (COMPLETIONS, "post"),
        (CHAT, "post"),
        ("/tokenize", "post"),
        ("/detokenize", "post"),
        ("/tokenizer_info", "get"),
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_schema_says_that_answers_may_be_events(schema: Any, path: str) -> None:
    responses = schema["paths"][path]["post"]["responses"]
    assert responses.keys() == {"200", "4XX", "5XX"}
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}


def limits(schema: Any, body: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """By name of the field: values that the schema allows at its borders, and some beyond."""
    found = {}
    for name, field in schema["components"]["schemas"][body]["properties"].items():
        is_int = {"type": "integer"} in field.get("anyOf", [])
        ends = [field[key] for key in ("minimum", "maximum") if key in field]
        steps = [
            (field[key], step) for key, step in (("minimum", -1), ("maximum", 1)) if key in field
        ]
        beyond = [end + step for end, step in steps if abs(end) < 2**60]  # else they are one float
        beyond += [field[key] for key in ("exclusiveMinimum",) if key in field]
        if ends or beyond:
            kind = int if is_int else float
            found[name] = ([kind(end) for end in ends], [kind(value) for value in beyond])
    return found


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "CompletionBody"), (CHAT, "ChatBody")])
def test_the_limits_in_the_schema_are_those_that_hold(
    fake_engine: Any, schema: Any, path: str, name: str
) -> None:
    cases = [
        (field, value, is_allowed)
        for field, (allowed, refused) in limits(schema, name).items()
        for values, is_allowed in ((allowed, True), (refused, False))
        for value in values
    ]
    assert len(cases) > 30

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for field, value, is_allowed in cases:
            body = body_of(path, echo=True) if path == COMPLETIONS else body_of(path, logprobs=True)
            response = await client.post(path, json={**body, field: value})
            text = f"{field}={value}: {response.text}"
            if not is_allowed:
                assert response.status_code == 400, text
                assert response.json()["error"]["param"] == field, text
            elif response.status_code != 200:  # only another field may forbid it
                assert field in ("min_tokens", "seed"), text
                assert "max_tokens" in response.text, text

    run(fake_engine, scenario, max_queued_requests=128)


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "CompletionBody"), (CHAT, "ChatBody")])
def test_the_schema_lists_the_values_of_what_is_not_done(
    fake_engine: Any, schema: Any, path: str, name: str
) -> None:
    properties = schema["components"]["schemas"][name]["properties"]
    listed = {field: entry["enum"] for field, entry in properties.items() if "enum" in entry}
    assert {"tools", "suffix", "echo", "best_of"} - set(listed) <= {"echo"}

    async def scenario(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for field, values in listed.items():
            for value in values:
                response = await client.post(path, json=body_of(path, **{field: value}))
                assert response.status_code == 200, response.text
            response = await client.post(path, json=body_of(path, **{field: "other"}))
            assert_is_error((response.status_code, response.json()), 400, f"{field}=", field)

    run(fake_engine, scenario)
