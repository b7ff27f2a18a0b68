"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

import dataclasses
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
from moejax_serving.async_engine import EngineDeadError, QueueFullError, ShuttingDownError
from moejax_serving.generation import ContextLengthError
from moejax_serving.service import NotReadyError

_RETRY_AFTER = {"Retry-After": "1"}  # in seconds
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """How an error is told to a client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object; its type follows from the status."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": kind if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code or _CODES.get(self.status),
        }
        # A message may quote what JSON strings can hold and UTF-8 cannot: half a surrogate pair.
        return {
            "error": {
                key: value and value.encode(errors="replace").decode()
                for key, value in error.items()
            }
        }


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


def describe(error: Exception) -> ErrorAnswer:
    """How an error is told. What is not our own is a bug, and its text is not shown."""
    text = str(error)
    match error:
        case UnknownModelError():
            return ErrorAnswer(404, text, error.param, "model_not_found")
        case ContextLengthError():
            return ErrorAnswer(400, text, error.param, "context_length_exceeded")
        case RequestError():
            return ErrorAnswer(400, text, error.param)
        case QueueFullError():
            return ErrorAnswer(429, text, code="queue_full", headers=_RETRY_AFTER)
        case CapacityError():
            return ErrorAnswer(400, text, code="context_length_exceeded")
        case NotReadyError():
            return ErrorAnswer(503, text, code="loading", headers=_RETRY_AFTER)
        case ShuttingDownError():
            return ErrorAnswer(503, text, code="shutting_down", headers=_RETRY_AFTER)
        case EngineDeadError():
            return ErrorAnswer(500, text, code="engine_dead")
        case MoejaxError():
            return ErrorAnswer(500, text)
        case _:
            return ErrorAnswer(500, f"the server failed: {type(error).__name__}")


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A response with OpenAI's error body."""
    return _respond(ErrorAnswer(status, message, param, code, headers or {}))


def install_handlers(app: FastAPI) -> None:
    """Makes every error of the application come out in that shape."""
    app.add_exception_handler(MoejaxError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)


def _respond(answer: ErrorAnswer) -> JSONResponse:
    return JSONResponse(answer.body, status_code=answer.status, headers=dict(answer.headers))


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return _respond(describe(error))


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
        message = f"{message}: {request.method} {request.url.path[:200]}"
    return error_response(error.status_code, message, headers=error.headers)


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
