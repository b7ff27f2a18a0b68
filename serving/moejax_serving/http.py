"""The HTTP interface: OpenAI's routes, as vLLM serves them."""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from moejax_serving.async_engine import AsyncEngine
from moejax_serving.chat import chat
from moejax_serving.completions import complete
from moejax_serving.http_errors import (
    BodyLimit,
    UnknownModelError,
    error_response,
    install_handlers,
)
from moejax_serving.protocol import ChatBody, CompletionBody, GenerationBody, check_extras

MAX_BODY_BYTES = 16 * 2**20


def create_app(
    engine: AsyncEngine,
    served_model_names: Sequence[str],
    default_sampling: Mapping[str, float | int],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application.

    Args:
        engine: answers the requests; the caller shuts it down.
        served_model_names: names that requests may use; the first is the one shown.
        default_sampling: temperature, top_p, top_k and min_p for requests without them.
        max_body_bytes: larger request bodies are refused.
    """
    app = FastAPI(title="moejax", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    install_handlers(app)
    started = int(time.time())
    warned: set[str] = set()

    def check(body: GenerationBody) -> str:
        model = served_model_names[0] if body.model is None else body.model
        check_model(model)
        check_extras(body, warned)
        return model

    def check_model(model: str) -> None:
        if model not in served_model_names:
            raise UnknownModelError(
                f"the model {model[:100]!r} is not served here; these are: "
                + ", ".join(served_model_names),
                param="model",
            )

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "moejax",
            "root": served_model_names[0],
            "parent": None,
            "max_model_len": engine.max_model_len,
            "permission": [],
        }

    @app.get("/health")
    async def health() -> Response:
        if not engine.is_healthy:
            return error_response(503, "the engine is not running", code="engine_dead")
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in served_model_names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(name)
        return JSONResponse(card(name))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = check(body)
        return await _answer(request, complete(engine, body, default_sampling, model))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        model = check(body)
        return await _answer(request, chat(engine, body, default_sampling, model))

    return app


async def _answer(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The result of `work`, which is cancelled if the client goes away before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return JSONResponse(task.result())
        return Response(status_code=499)  # nobody reads it
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
