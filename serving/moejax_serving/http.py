"""The HTTP interface: OpenAI's routes, as vLLM serves them."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import moejax
from moejax_serving.chat import chat, stream_chat
from moejax_serving.completions import complete, stream_completion
from moejax_serving.extras import check_extras
from moejax_serving.http_errors import BodyLimit, UnknownModelError, install_handlers
from moejax_serving.http_metrics import HttpMetrics
from moejax_serving.http_schema import ANSWER, ERRORS, HEALTH, METRICS
from moejax_serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from moejax_serving.service import Service
from moejax_serving.sse import EventStream, until_disconnect
from moejax_serving.tokenization import detokenize, tokenize, tokenizer_info

MAX_BODY_BYTES = 16 * 2**20


def create_app(service: Service, *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application.

    Args:
        service: has the engine that answers, once it is loaded; the caller ends it.
        max_body_bytes: larger request bodies are refused.
    """
    app = FastAPI(title="moejax", version=moejax.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(HttpMetrics, service=service)
    install_handlers(app)
    _add_process_routes(app, service)
    _add_model_routes(app, service)
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    return app


def _add_process_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=HEALTH)
    @app.get("/ping", responses=HEALTH)
    async def health() -> Response:
        state = service.state
        if state == "ready":
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": state}, status_code=503)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": moejax.__version__})

    @app.get("/metrics", responses=METRICS)
    async def metrics() -> Response:
        content, content_type = service.metrics.render()
        return Response(content, headers={"Content-Type": content_type})


def _add_model_routes(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "moejax",
            "root": service.served_model_names[0],
            "parent": None,
            "max_model_len": service.engine.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        cards = [card(name) for name in service.served_model_names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> Response:
        return JSONResponse(card(_choose_model(service, name)))


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    warned: set[str] = set()

    def check(body: GenerationBody) -> str:
        check_extras(body, warned)
        if body.stream_options is not None:
            check_extras(body.stream_options, warned)
        return _choose_model(service, body.model)

    @app.post("/v1/completions", responses=ANSWER)
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = check(body)
        if body.stream:
            return EventStream(stream_completion(service.engine, body, model))
        return await _answer(request, complete(service.engine, body, model))

    @app.post("/v1/chat/completions", responses=ANSWER)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        model = check(body)
        if body.stream:
            return EventStream(stream_chat(service.engine, body, model))
        return await _answer(request, chat(service.engine, body, model))


def _add_token_routes(app: FastAPI, service: Service) -> None:
    warned: set[str] = set()
    turn = asyncio.Semaphore()

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize_text(body: TokenizeBody) -> Response:
        check_extras(body, warned)
        _choose_model(service, body.model)
        return await _in_thread(turn, tokenize, service.engine, body)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize_ids(body: DetokenizeBody) -> Response:
        check_extras(body, warned)
        _choose_model(service, body.model)
        return await _in_thread(turn, detokenize, service.engine, body)

    @app.get("/tokenizer_info", responses=ERRORS)
    async def show_tokenizer() -> Response:
        return JSONResponse(tokenizer_info(service.engine))


def _choose_model(service: Service, name: str | None) -> str:
    """The name to answer under.

    Raises:
        UnknownModelError: it is not served here.
    """
    names = service.served_model_names
    if name is None:
        return names[0]
    if name not in names:
        raise UnknownModelError(
            f"the model {name[:100]!r} is not served here; these are: " + ", ".join(names),
            param="model",
        )
    return name


async def _answer(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The result of `work`, which is cancelled if the client goes away before."""
    content = await until_disconnect(request.receive, work)
    if content is None:
        return Response(status_code=499)  # nobody reads it
    return await asyncio.to_thread(JSONResponse, content)


async def _in_thread[*A](
    turn: asyncio.Semaphore, work: Callable[[*A], dict[str, Any]], *args: *A
) -> Response:
    """In turn: long texts must not take all the threads that prompts are read in."""
    async with turn:
        return await asyncio.to_thread(lambda: JSONResponse(work(*args)))
