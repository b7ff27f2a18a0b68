"""Many requests at once on an engine that only one thread may touch.

The engine's thread does all calls: it takes what asyncio tasks have left in the inbox, adds and
aborts requests, and steps as long as there are unfinished ones. Each request has a future on the
event loop of its task, and every future is settled, whatever happens to the engine.
"""

import asyncio
import dataclasses
import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SHUT_DOWN = "the server is shut down"


class QueueFullError(CapacityError):
    """The server holds as many requests as it may; a later try can succeed."""


class EngineDeadError(MoejaxError):
    """The engine failed or was shut down; no request will be answered."""


@runtime_checkable
class EngineCore(Protocol):
    """What `AsyncEngine` needs of an engine. All methods are called from one thread."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if only token ids go in and out."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queues a request. Raises RequestError or CapacityError if it can never run."""

    def abort(self, request_id: str) -> None:
        """Forgets a request that was added and has not finished."""

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> list[RequestOutput]:
        """Does one step of the model; returns the requests that finished in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class AsyncEngine:
    """Runs an engine in a thread of its own and lets asyncio tasks wait for requests."""

    def __init__(self, engine: EngineCore, *, max_queued_requests: int = 512) -> None:
        """Starts the thread.

        Args:
            engine: from now on, used by that thread alone.
            max_queued_requests: how many requests may wait or run; more are refused.
        """
        self.max_queued_requests = max_queued_requests
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._wake = threading.Condition()  # guards what follows
        self._inbox: list[_Add | _Abort] = []
        self._futures: dict[str, asyncio.Future[RequestOutput]] = {}
        self._is_stopping = False
        self._death: str | None = None
        self._known: set[str] = set()  # what the engine holds; used by its thread alone
        self._thread = threading.Thread(target=self._run, name="moejax-engine", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests can be answered."""
        return self._death is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """How many requests wait or run."""
        return len(self._futures)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> RequestOutput:
        """Waits for the whole answer. Cancelling the task aborts the request.

        Raises:
            RequestError: the request is wrong.
            CapacityError: the request can never fit.
            QueueFullError: there are `max_queued_requests` requests already.
            EngineDeadError: the engine failed, or is shut down.
        """
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        future: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._admit(request_id)
            self._futures[request_id] = future
            self._inbox.append(_Add(request_id, prompt_token_ids, params, prompt))
            self._wake.notify()
        try:
            return await future
        finally:
            with self._wake:
                if self._futures.get(request_id) is future:  # cancelled before the engine answered
                    del self._futures[request_id]
                    self._inbox.append(_Abort(request_id))
                    self._wake.notify()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Fails what is unfinished and waits for the thread to end its step."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("the engine is still in a step after %g s", timeout)
            self._die(_SHUT_DOWN)

    def _admit(self, request_id: str) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if request_id in self._futures:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        if len(self._futures) >= self.max_queued_requests:
            raise QueueFullError(
                f"the server holds {len(self._futures)} requests, the most it may "
                f"(max_queued_requests={self.max_queued_requests}): try again later"
            )

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        death = _SHUT_DOWN
        try:
            while (commands := self._wait()) is not None:
                for command in commands:
                    self._obey(command)
                if self._engine.has_unfinished():
                    for output in self._engine.step():
                        self._known.discard(output.request_id)
                        self._settle(output.request_id, output)
        except BaseException as error:  # a thread has nobody to raise to
            _log.critical("the engine failed", exc_info=True)
            death = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            self._die(death)

    def _wait(self) -> list[_Add | _Abort] | None:
        """The commands that have come; blocks while there is nothing to do. None: stop."""
        is_idle = not self._engine.has_unfinished()
        with self._wake:
            if is_idle:
                self._wake.wait_for(lambda: self._inbox or self._is_stopping)
            commands, self._inbox = self._inbox, []
            return None if self._is_stopping else commands

    def _obey(self, command: _Add | _Abort) -> None:
        request_id = command.request_id
        if isinstance(command, _Abort):
            if request_id in self._known:
                self._known.discard(request_id)
                self._engine.abort(request_id)
            return
        try:
            self._engine.add_request(
                request_id, command.prompt_token_ids, command.params, command.prompt
            )
            self._known.add(request_id)
        except MoejaxError as error:
            self._settle(request_id, error)
        except Exception as error:  # one odd request should not end the others
            _log.exception("request %s was not added", request_id)
            self._settle(request_id, MoejaxError(f"the request failed: {error!r}"))

    def _settle(self, request_id: str, result: RequestOutput | MoejaxError) -> None:
        with self._wake:
            future = self._futures.pop(request_id, None)
        if future is not None:  # None: the caller has gone
            _hand_over(future, result)

    def _die(self, death: str) -> None:
        with self._wake:
            self._death = self._death or death
            futures = list(self._futures.values())
            self._futures.clear()
            self._inbox.clear()
        for future in futures:
            _hand_over(future, EngineDeadError(self._death))


def _hand_over(future: asyncio.Future[RequestOutput], result: RequestOutput | MoejaxError) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(result, MoejaxError):
            future.set_exception(result)
        else:
            future.set_result(result)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        _log.debug("the event loop of a request is closed")
