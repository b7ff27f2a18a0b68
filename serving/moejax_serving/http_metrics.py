"""How many HTTP requests there are, and how long they take."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax_serving.service import Service

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


class HttpMetrics:
    """Counts each request under its route's template, when its response has ended."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 499  # the client went away before anything was sent

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            status = 500
            raise
        finally:
            # What a client can invent must not become a label: each value stays in memory.
            handler = getattr(scope.get("route"), "path_format", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            seconds = time.perf_counter() - began
            self._service.metrics.observe_http(handler, method, status, seconds)
