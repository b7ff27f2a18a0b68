"""What /openapi.json says of responses; FastAPI reads the bodies of requests from their classes."""

from typing import Any

_NULLABLE_STRING = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            },
        }
    },
}
_COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": "object"},
    },
}


def _content(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _status(*states: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"enum": list(states)}},
    }


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request is wrong.",
        "content": _content("application/json", _ERROR),
    },
    "5XX": {
        "description": "The server failed or is not ready.",
        "content": _content("application/json", _ERROR),
    },
}
"""The responses of a route that can fail."""

ANSWER: dict[int | str, dict[str, Any]] = ERRORS | {
    200: {
        "description": "The answer; with stream=true, chunks of it as events, then [DONE].",
        "content": _content("application/json", _COMPLETION)
        | _content("text/event-stream", {"type": "string"}),
    }
}
"""The responses of a route that generates."""

HEALTH: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Requests are answered.",
        "content": _content("application/json", _status("ok")),
    },
    503: {
        "description": "They are not, for now or, if dead, for ever.",
        "content": _content("application/json", _status("loading", "draining", "dead")),
    },
}
"""The responses of /health."""

METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Series in Prometheus' text format.",
        "content": _content("text/plain", {"type": "string"}),
    }
}
"""The responses of /metrics."""
