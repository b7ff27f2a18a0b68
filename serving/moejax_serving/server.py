"""The server process: the port it listens on, and its end."""

import asyncio
import signal
import socket

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.errors import ConfigError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.http_errors import error_response

_DRAIN_SECONDS = 10.0  # how long answers may take to finish after SIGINT or SIGTERM
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Takes a port, so that the model is not loaded in vain; `serve` begins to listen.

    Raises:
        ConfigError: the address is not ours, or the port is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host} is not an address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def base_url(listener: socket.socket) -> str:
    """The URL under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, engine: AsyncEngine, listener: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM; then those that run may finish for a while."""
    server = _Server(app, engine)
    # uvicorn's own handlers hold while it runs, then it repeats the signal that ended it: but to
    # end was what it was asked for, and no failure.
    before = {number: signal.signal(number, server.handle_exit) for number in _SIGNALS}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """Fails what the engine has not finished after a while, so that its clients get an answer."""

    def __init__(self, app: FastAPI, engine: AsyncEngine) -> None:
        # Should an answer not be taken, uvicorn cuts the connection a little later.
        grace = int(_DRAIN_SECONDS) + 2
        super().__init__(
            uvicorn.Config(
                _end_quietly(app),
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=grace,
            )
        )
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for what is being answered."""
        drain = asyncio.create_task(self._drain())
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

    async def _drain(self) -> None:
        await asyncio.sleep(_DRAIN_SECONDS)
        await asyncio.to_thread(self._engine.shutdown)


def _end_quietly(app: ASGIApp) -> ASGIApp:
    """The application; a request that is cancelled when the server ends is no failure of it."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noting_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if not has_started:
                await error_response(503, "the server is shut down")(scope, receive, send)

    return run
