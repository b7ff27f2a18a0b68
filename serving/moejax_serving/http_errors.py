"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

import http
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.async_engine import EngineDeadError, QueueFullError
from moejax_serving.generation import ContextLengthError

_RETRY_AFTER_SECONDS = 1
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


class BodyLimit:
    """Refuses request bodies of more than `max_bytes`, declared or not, before they are kept."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, counting what is received."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(413, self._text())(scope, receive, send)
            return
        num_received = 0

        async def counting_receive() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                raise HTTPException(413, self._text())
            return message

        await self._app(scope, counting_receive, send)

    def _text(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A response with OpenAI's error body; its type follows from the status."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    error = {
        "message": message,
        "type": kind if status < 500 else "server_error",
        "param": param,
        "code": code or _CODES.get(status),
    }
    # A message may quote what JSON strings can hold and UTF-8 cannot: half a surrogate pair.
    content = {
        "error": {
            key: value and value.encode(errors="replace").decode() for key, value in error.items()
        }
    }
    return JSONResponse(content, status_code=status, headers=dict(headers or {}))


def install_handlers(app: FastAPI) -> None:
    """Makes every error of the application come out in that shape."""
    app.add_exception_handler(MoejaxError, _on_own_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_own_error(request: Request, error: Exception) -> JSONResponse:
    param = error.param if isinstance(error, RequestError) else None
    match error:
        case UnknownModelError():
            return error_response(404, str(error), param=param, code="model_not_found")
        case ContextLengthError():
            return error_response(400, str(error), param=param, code="context_length_exceeded")
        case RequestError():
            return error_response(400, str(error), param=param)
        case QueueFullError():
            headers = {"Retry-After": str(_RETRY_AFTER_SECONDS)}
            return error_response(429, str(error), code="queue_full", headers=headers)
        case CapacityError():
            return error_response(400, str(error), code="context_length_exceeded")
        case EngineDeadError():
            return error_response(500, str(error), code="engine_dead")
        case _:
            return error_response(500, str(error))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    param, message = _describe(error.errors())
    return error_response(400, message, param=param)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 400 and error.__cause__ is not None:  # the body was not understood
        message = f"the body is not JSON that can be read: {_explain(error.__cause__)}"
    elif message == http.HTTPStatus(error.status_code).phrase:
        message = f"{message}: {request.method} {request.url.path}"
    return error_response(error.status_code, message, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    return error_response(500, f"the server failed: {type(error).__name__}")


def _explain(cause: BaseException) -> str:
    match cause:
        case RecursionError():
            return "it is nested too deep"
        case UnicodeDecodeError():
            return f"it is not UTF-8: {cause.reason} at byte {cause.start}"
        case _ if "digits" in str(cause):
            return f"it holds an integer of more than {sys.get_int_max_str_digits()} digits"
        case _:
            return str(cause) or type(cause).__name__


def _describe(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """The first field at fault, and what is wrong with it.

    A field that may have several types has an error for each of them.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return None, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}"
    place = first["loc"][1:]
    if not place and first["type"] in ("missing", "model_attributes_type"):
        return None, "the body must be a JSON object, sent with Content-Type: application/json"
    if not place:
        return None, f"the body: {first['msg']}"
    field = str(place[0])
    reasons = dict.fromkeys(e["msg"] for e in errors if e["loc"][1:2] == place[:1])
    return field, f"{_spell(place)}: " + ", or: ".join(list(reasons)[:4])


def _spell(place: Sequence[str | int]) -> str:
    """('messages', 0, 'role') as messages[0].role, without pydantic's names of types."""
    text = str(place[0])
    for part in place[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            text += f".{part}"
    return text
