"""The server process: its port, the loading of the model meanwhile, and its end."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.errors import ConfigError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.service import Service

_REFUSAL_SECONDS = 0.2  # after the signal, for requests that are on their way: they get a 503
# Once nothing is computed any more, clients have this long to take the next part of an answer.
_RESPONSE_SECONDS = 10.0
_HURRIED_SECONDS = 1.0  # and all of it, after a second signal
_BACKLOG = 2048  # connections that wait; uvicorn's own number
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Takes a port; `serve` begins to listen.

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
        listener.listen(_BACKLOG)  # a port that is taken shows only now, where two start at once
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def base_url(listener: socket.socket) -> str:
    """The URL under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How the server came to its end."""

    status: int
    """For the process to exit with."""
    is_clean: bool
    """False: a thread is still in the midst of a computation, which nothing can cut short."""


def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    *,
    load: Callable[[], AsyncEngine],
    on_ready: Callable[[AsyncEngine], None],
    shutdown_timeout: float | None = None,
) -> Ending:
    """Answers at once, loads the model meanwhile, and ends on SIGINT or SIGTERM.

    Args:
        app: answers HTTP requests.
        service: what the application sees; it becomes ready here.
        listener: from `bind`; closed at the end.
        load: makes the engine, in a thread.
        on_ready: called when requests can be answered.
        shutdown_timeout: seconds that running requests may take after the signal; None: as long
            as they do. A second signal ends them at once.

    Raises:
        Whatever `load` raised.
    """
    server = _Server(app, service, load, on_ready, shutdown_timeout)
    # uvicorn handles signals while it runs; these handlers hold before and after that.
    before = {number: signal.signal(number, server.handle_exit) for number in _SIGNALS}
    try:
        server.run(sockets=[listener])
        return server.ending()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        load: Callable[[], AsyncEngine],
        on_ready: Callable[[AsyncEngine], None],
        shutdown_timeout: float | None,
    ) -> None:
        super().__init__(
            uvicorn.Config(self._watch(app), log_config=None, access_log=False, lifespan="off")
        )
        self._service = service
        self._on_ready = on_ready
        self._shutdown_timeout = shutdown_timeout
        self._load = load
        self._loader = threading.Thread(target=self._run_load, name="moejax-loader", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: AsyncEngine | None = None
        self._failure: BaseException | None = None
        self._signal: int | None = None
        self._hurry = asyncio.Event()
        self._last_sent = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for an end, the second for a quick one."""
        if self._signal is None:
            self._signal = sig
            self.should_exit = True
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hurry.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then begins to load."""
        await super().startup(sockets)
        for listener in sockets or []:
            _log.info("listening at %s; the model is being loaded", base_url(listener))
        self._loop = asyncio.get_running_loop()
        self._loader.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends first requests, then connections; until then new ones are told that it drains."""
        self._service.drain()
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([hurry], timeout=_REFUSAL_SECONDS)
        if self._engine is not None:
            await self._end_requests(self._engine, hurry)
        cut = asyncio.create_task(self._cut_connections(hurry))
        try:
            # Closes idle connections, which so far could ask and be refused, and waits until all
            # others are closed: each is after its response.
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            hurry.cancel()

    def ending(self) -> Ending:
        """How it ended; called when it has."""
        if self._failure is not None:
            raise self._failure
        if self._engine is None:
            status = 130 if self._signal == signal.SIGINT else 0
            return Ending(status, is_clean=not self._loader.is_alive())
        has_failed = self._engine.has_failed
        has_ended = self._engine.shutdown(1.0 if has_failed or self._hurry.is_set() else 10.0)
        return Ending(1 if has_failed else 0, is_clean=has_ended)

    async def _end_requests(self, engine: AsyncEngine, hurry: asyncio.Task[bool]) -> None:
        """Lets requests finish in the time that they have."""
        if engine.num_requests:
            _log.info(
                "unfinished requests: %d; a second signal ends them at once", engine.num_requests
            )
        idle = asyncio.create_task(engine.wait_until_idle())
        await asyncio.wait(
            [idle, hurry], timeout=self._shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        idle.cancel()
        if engine.num_requests:
            _log.warning("requests that are ended unfinished: %d", engine.num_requests)
            engine.stop()

    async def _cut_connections(self, hurry: asyncio.Task[bool]) -> None:
        """Waits until no client takes any part of an answer, and cuts off those that are left."""
        self._last_sent = time.monotonic()
        while not hurry.done() and (left := self._time_left()) > 0:
            await asyncio.wait([hurry], timeout=left)
        if hurry.done():
            await asyncio.sleep(_HURRIED_SECONDS)
        connections = list(self.server_state.connections)
        _log.warning("connections cut, whose clients take no answer: %d", len(connections))
        for connection in connections:
            connection.transport.abort()
        self.force_exit = True

    def _time_left(self) -> float:
        return self._last_sent + _RESPONSE_SECONDS - time.monotonic()

    def _watch(self, app: ASGIApp) -> ASGIApp:
        """The application; it notes when parts of answers are taken.

        A request that is cancelled when the server ends is no failure of the application.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def noting_send(message: Message) -> None:
                await send(message)
                self._last_sent = time.monotonic()

            with contextlib.suppress(asyncio.CancelledError):
                await app(scope, receive, noting_send)

        return run

    def _run_load(self) -> None:
        assert self._loop is not None
        try:
            engine = self._load()
        except BaseException as error:  # raised again in the main thread
            self._call(self._fail, error)
        else:
            self._call(self._become_ready, engine)

    def _call[T](self, call: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(call, argument)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.should_exit = True

    def _become_ready(self, engine: AsyncEngine) -> None:
        if self.should_exit:
            engine.stop()
            return
        self._engine = engine
        self._service.set_ready(engine)
        self._on_ready(engine)
