"""Many requests at once on an engine that only one thread may touch.

The engine's thread does all calls: it takes what asyncio tasks have left in the inbox, adds and
aborts requests, and steps as long as there are unfinished ones. Each request has a queue on the
event loop of its task; the answers of a step reach a loop in one call. Every request is answered,
whatever happens to the engine, even if a step never ends.
"""

import asyncio
import contextlib
import dataclasses
import logging
import sys
import threading
import traceback
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer
from moejax_serving.watchdog import Watchdog

_log = logging.getLogger(__name__)

_SHUT_DOWN = "the server is shut down"


class QueueFullError(CapacityError):
    """The server holds as many requests as it may; a later try can succeed."""


class ShuttingDownError(MoejaxError):
    """The server ends: it takes no more requests, or did not wait for this one."""


class EngineDeadError(MoejaxError):
    """The engine failed; no request will be answered."""


@runtime_checkable
class EngineCore(Protocol):
    """What `AsyncEngine` needs of an engine. All methods are called from one thread."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if only token ids go in and out."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""

    @property
    def model_name(self) -> str:
        """The model's own name."""

    @property
    def default_sampling(self) -> Mapping[str, float | int]:
        """Sampling parameters for requests that leave them out."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        stream: bool = False,
    ) -> None:
        """Queues a request. Raises RequestError or CapacityError if it can never run."""

    def abort(self, request_id: str) -> None:
        """Forgets a request that was added and has not finished."""

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> list[RequestOutput]:
        """Does one step of the model.

        Returns what is new of each request that was added with `stream`, and the others' whole
        outputs when they have finished.
        """

    def close(self) -> None:
        """Drops all requests, and waits for what the device still does."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Caller:
    """A task that waits for a request."""

    request_id: str
    num_choices: int
    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[RequestOutput | MoejaxError]


@dataclasses.dataclass(frozen=True, slots=True)
class _Add:
    caller: _Caller
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None
    stream: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    caller: _Caller


class AsyncEngine:
    """Runs an engine in a thread of its own and lets asyncio tasks wait for requests."""

    def __init__(
        self,
        engine: EngineCore,
        *,
        max_queued_requests: int = 512,
        step_timeout: float | None = 300.0,
    ) -> None:
        """Starts the threads.

        Args:
            engine: from now on, used by one of them alone.
            max_queued_requests: how many requests may wait or run; more are refused. One that asks
                for n choices counts n times.
            step_timeout: seconds after which a step is taken to hang: the engine is given up.
        """
        self.max_queued_requests = max_queued_requests
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.model_name = engine.model_name
        self.default_sampling = engine.default_sampling
        self._engine = engine
        self._added: dict[str, _Caller] = {}  # what the engine holds; used by its thread alone
        self._wake = threading.Condition()  # guards what follows
        self._inbox: list[_Add | _Abort] = []
        self._callers: dict[str, _Caller] = {}
        self._num_queued = 0
        self._idle_calls: list[Callable[[], None]] = []
        self._is_draining = False
        self._death: str | None = None
        self._step_timeout = threading.TIMEOUT_MAX if step_timeout is None else step_timeout
        self._watchdog = Watchdog(self._step_timeout, self._give_up)
        self._thread = threading.Thread(target=self._run, name="moejax-engine", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be answered."""
        return self._death is None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the engine ended by itself; `is_healthy` is false after `shutdown` too."""
        return self._death not in (None, _SHUT_DOWN)

    @property
    def num_requests(self) -> int:
        """How many requests wait or run."""
        return len(self._callers)

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
            ShuttingDownError: the server ends.
            EngineDeadError: the engine failed.
        """
        with self._call(prompt_token_ids, params, request_id, prompt, stream=False) as caller:
            return _value(await caller.answers.get())

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new after each step; the last output has `finished` set.

        The request is added when the first output is asked for, and aborted when the generator is
        closed. What the caller has not taken yet is kept for it.

        Raises:
            As `generate`; a refusal comes in place of the first output.
        """
        with self._call(prompt_token_ids, params, request_id, prompt, stream=True) as caller:
            is_finished = False
            while not is_finished:
                output = _value(await caller.answers.get())
                is_finished = output.finished
                yield output

    def drain(self) -> None:
        """Refuses new requests from now on; those that were admitted go on."""
        with self._wake:
            self._is_draining = True

    async def wait_until_idle(self) -> None:
        """Returns as soon as no request is unfinished."""
        loop = asyncio.get_running_loop()
        idle = asyncio.Event()

        def call() -> None:
            _call_in(loop, idle.set)

        with self._wake:
            if not self._callers:
                return
            self._idle_calls.append(call)
        try:
            await idle.wait()
        finally:
            with self._wake:
                self._idle_calls.remove(call)

    def stop(self) -> None:
        """Fails what is unfinished, at once. The thread ends when its step does."""
        self._die(_SHUT_DOWN)

    def shutdown(self, timeout: float = 10.0) -> bool:
        """As `stop`, and waits for the thread; returns whether it has ended."""
        self.stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("the engine is still in a step after %g s", timeout)
        return not self._thread.is_alive()

    @contextlib.contextmanager
    def _call(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        prompt: str | None,
        *,
        stream: bool,
    ) -> Iterator[_Caller]:
        """Adds a request; aborts it at the end, unless it has been answered."""
        caller = _Caller(
            request_id or f"req-{uuid.uuid4().hex}",
            params.n,
            asyncio.get_running_loop(),
            asyncio.Queue(),
        )
        with self._wake:
            self._admit(caller)
            self._callers[caller.request_id] = caller
            self._num_queued += caller.num_choices
            self._inbox.append(_Add(caller, prompt_token_ids, params, prompt, stream))
            self._wake.notify()
        try:
            yield caller
        finally:
            with self._wake:
                if self._forget(caller):
                    self._inbox.append(_Abort(caller))
                    self._wake.notify()

    def _admit(self, caller: _Caller) -> None:
        if self._death is not None:
            raise _death_error(self._death)
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down and takes no more requests")
        if caller.request_id in self._callers:
            raise RequestError(f"request id {caller.request_id!r} is in use", param="request_id")
        if caller.num_choices > self.max_queued_requests:
            raise RequestError(
                f"n is {caller.num_choices}; the server holds at most {self.max_queued_requests} "
                "requests",
                param="n",
            )
        if self._num_queued + caller.num_choices > self.max_queued_requests:
            raise QueueFullError(
                f"the server holds {self._num_queued} requests, and {caller.num_choices} more is "
                f"too much (max_queued_requests={self.max_queued_requests}): try again later"
            )

    def _forget(self, caller: _Caller) -> bool:
        """Gives the place of an unanswered request free. False: it was answered before."""
        with self._wake:
            if self._callers.get(caller.request_id) is not caller:
                return False
            del self._callers[caller.request_id]
            self._num_queued -= caller.num_choices
            if not self._callers:
                for call in self._idle_calls:
                    call()
            return True

    def _fail(self, caller: _Caller, error: MoejaxError) -> None:
        if self._forget(caller):
            _call_in(caller.loop, caller.answers.put_nowait, error)

    def _die(self, death: str) -> None:
        with self._wake:
            self._death = self._death or death
            self._inbox.clear()
            callers = list(self._callers.values())
            self._wake.notify()
        self._watchdog.close()
        for caller in callers:
            self._fail(caller, _death_error(self._death))

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        death = _SHUT_DOWN
        try:
            while (commands := self._wait()) is not None:
                for command in commands:
                    self._obey(command)
                if self._engine.has_unfinished():
                    self._hand_out(self._engine.step())
            self._engine.close()
        except BaseException as error:  # a thread has nobody to raise to
            _log.critical("the engine failed", exc_info=True)
            death = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            self._die(death)

    def _wait(self) -> list[_Add | _Abort] | None:
        """The commands that have come; blocks while there is nothing to do. None: the end."""
        is_idle = not self._engine.has_unfinished()
        with self._wake:
            if is_idle:
                self._watchdog.end()
                self._wake.wait_for(lambda: self._inbox or self._death is not None)
            self._watchdog.begin()
            commands, self._inbox = self._inbox, []
            return None if self._death is not None else commands

    def _obey(self, command: _Add | _Abort) -> None:
        caller = command.caller
        request_id = caller.request_id
        if isinstance(command, _Abort):
            if self._added.get(request_id) is caller:
                del self._added[request_id]
                self._engine.abort(request_id)
            return
        if self._callers.get(request_id) is not caller:  # gone before the engine knew of it
            return
        try:
            self._engine.add_request(
                request_id,
                command.prompt_token_ids,
                command.params,
                command.prompt,
                stream=command.stream,
            )
            self._added[request_id] = caller
        except MoejaxError as error:
            self._fail(caller, error)
        except Exception as error:  # one odd request should not end the others
            _log.exception("request %s was not added", request_id)
            self._fail(caller, MoejaxError(f"the request failed: {error!r}"))

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        """Gives each caller its output, with one call of each event loop."""
        answers: dict[asyncio.AbstractEventLoop, list[tuple[_Caller, RequestOutput]]] = {}
        with self._wake:
            for output in outputs:
                caller = self._added.get(output.request_id)
                if caller is None:
                    continue
                is_awaited = self._callers.get(output.request_id) is caller
                if output.finished:
                    del self._added[output.request_id]
                    self._forget(caller)
                if is_awaited:
                    answers.setdefault(caller.loop, []).append((caller, output))
        for loop, pairs in answers.items():
            _call_in(loop, _put_all, pairs)

    def _give_up(self) -> None:
        """Called by the watchdog."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "it has just ended"
        text = f"a step has taken more than {self._step_timeout:g} s"
        _log.critical("%s; the engine's thread:\n%s", text, stack)
        self._die(text)


def _value(answer: RequestOutput | MoejaxError) -> RequestOutput:
    if isinstance(answer, MoejaxError):
        raise answer
    return answer


def _death_error(death: str) -> MoejaxError:
    return ShuttingDownError(death) if death == _SHUT_DOWN else EngineDeadError(death)


def _put_all(pairs: Sequence[tuple[_Caller, RequestOutput]]) -> None:
    for caller, output in pairs:
        caller.answers.put_nowait(output)


def _call_in[*Ts](
    loop: asyncio.AbstractEventLoop, call: Callable[[*Ts], object], *args: *Ts
) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        _log.debug("the event loop of a request is closed")
