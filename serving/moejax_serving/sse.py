"""Server-sent events, and answers that end when the client goes away."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moejax.errors import MoejaxError
from moejax_serving.http_errors import describe

_log = logging.getLogger(__name__)

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold text back


class EventStream(StreamingResponse):
    """A response of events. An error before the first one is raised, so that it has its status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers=_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events and [DONE]; when the client goes away, the events are closed."""
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            event: str | None = await anext(events, None)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while event is not None:
                await send(_body(event))
                try:
                    event = await anext(events, None)
                except Exception as error:  # the status is sent: only an event can tell
                    await send(_body(write_event(_describe_late(error))))
                    break
            await send(_body(write_event("[DONE]"), more=False))


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; if the client goes away before, `work` is cancelled: None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def write_event(data: str) -> str:
    """One event; `data` has one line."""
    return f"data: {data}\n\n"


def _body(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def _describe_late(error: Exception) -> str:
    if not isinstance(error, MoejaxError):
        _log.error("a stream failed", exc_info=error)
    return json.dumps(describe(error).body)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
