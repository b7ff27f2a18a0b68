"""AsyncEngine: every request is answered, whatever happens."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.async_engine import (
    AsyncEngine,
    EngineDeadError,
    QueueFullError,
    ShuttingDownError,
)
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=2)
ALL = SamplingParams(max_tokens=64)


@contextlib.contextmanager
def running(core: Any, **options: Any) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(core, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


def run(core: Any, scenario: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    """Runs the scenario on an engine; one that hangs fails instead."""
    with running(core, **options) as engine:

        async def limited() -> None:
            async with asyncio.timeout(20):
                await scenario(engine)

        asyncio.run(limited())


async def read(engine: AsyncEngine, request_id: str | None = None) -> list[RequestOutput]:
    """All that a stream gives."""
    return [output async for output in engine.stream([1, 2], ALL, request_id)]


def hold_steps(core: Any) -> threading.Event:
    """Steps wait for the event that is returned; `core.is_held` tells that one does."""
    release, step = threading.Event(), core.step
    core.is_held = threading.Event()

    def held_step() -> Any:
        core.is_held.set()
        release.wait(20)
        return step()

    core.step = held_step
    return release


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_answers_a_request(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        output = await engine.generate([1, 2], PARAMS, "mine", "text")
        assert isinstance(output, RequestOutput)
        assert output.request_id == "mine"
        assert output.outputs[0].text == "He"
        assert engine.num_requests == 0 and engine.is_healthy

    run(fake_engine, scenario)
    assert fake_engine.added == [([1, 2], PARAMS, "text")]


def test_many_requests_run_together(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = await asyncio.gather(*(engine.generate([i], PARAMS) for i in range(300)))
        assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(300)]

    run(fake_engine, scenario)
    assert fake_engine.most_at_once > 1


def test_one_thread_makes_all_calls(fake_engine: Any) -> None:
    names = set()
    step = fake_engine.step

    def noting_step() -> Any:
        names.add(threading.current_thread().name)
        return step()

    fake_engine.step = noting_step

    async def scenario(engine: AsyncEngine) -> None:
        await asyncio.gather(*(engine.generate([1], PARAMS) for _ in range(10)))

    run(fake_engine, scenario)
    assert names == {"moejax-engine"}


def test_a_cancelled_request_is_aborted(fake_engine: Any) -> None:
    fake_engine.is_stuck = True

    async def scenario(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1], PARAMS, "gone"))
        await until(lambda: bool(fake_engine.added))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_requests == 0
        await until(lambda: fake_engine.aborted == ["gone"])
        fake_engine.is_stuck = False
        assert (await engine.generate([2], PARAMS, "gone")).prompt_token_ids == [2]

    run(fake_engine, scenario)


def test_a_request_that_ended_is_not_aborted(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await engine.generate([1], PARAMS)
        tasks = [asyncio.create_task(engine.generate([1], PARAMS)) for _ in range(50)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.0003 * (number % 5))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The fake engine raises on an unknown id, which would end the engine.
        assert (await engine.generate([2], PARAMS)).finished

    run(fake_engine, scenario)


@pytest.mark.parametrize(
    "error", [RequestError("bad", param="prompt"), CapacityError("too long: 9 > 8")]
)
def test_a_refused_request_gets_the_reason(fake_engine: Any, error: MoejaxError) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.fail_in_add = error
        with pytest.raises(type(error)) as caught:
            await engine.generate([1], PARAMS)
        assert caught.value is error
        fake_engine.fail_in_add = None
        assert (await engine.generate([1], PARAMS)).finished

    run(fake_engine, scenario)


def test_a_bug_in_adding_ends_one_request_only(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.fail_in_add = KeyError("x")
        with pytest.raises(MoejaxError, match=r"the request failed: KeyError\('x'\)"):
            await engine.generate([1], PARAMS)
        fake_engine.fail_in_add = None
        assert (await engine.generate([1], PARAMS)).finished and engine.is_healthy

    run(fake_engine, scenario)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), SystemExit(3)])
def test_a_failing_step_ends_every_request(fake_engine: Any, error: BaseException) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        tasks = [asyncio.create_task(engine.generate([1], PARAMS)) for _ in range(5)]
        await until(lambda: len(fake_engine.added) == 5)
        fake_engine.fail_in_step = error
        fake_engine.is_stuck = False
        last = engine.generate([1], PARAMS)  # wakes the thread
        results = await asyncio.gather(*tasks, last, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert f"the engine failed: {type(error).__name__}: {error}" in str(results[0])
        assert not engine.is_healthy and engine.has_failed and engine.num_requests == 0
        with pytest.raises(EngineDeadError, match="the engine failed"):
            await engine.generate([1], PARAMS)

    run(fake_engine, scenario)


def test_too_many_requests_are_refused_with_the_numbers(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        tasks = [asyncio.create_task(engine.generate([1], PARAMS)) for _ in range(3)]
        await until(lambda: len(fake_engine.added) == 3)
        with pytest.raises(QueueFullError, match=r"holds 3 requests.*max_queued_requests=3"):
            await engine.generate([1], PARAMS)
        tasks.pop().cancel()
        await asyncio.sleep(0)
        fake_engine.is_stuck = False
        await engine.generate([1], PARAMS)
        await asyncio.gather(*tasks)

    run(fake_engine, scenario, max_queued_requests=3)


def test_an_id_can_be_in_use_once(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        task = asyncio.create_task(engine.generate([1], PARAMS, "a"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            await engine.generate([1], PARAMS, "a")
        task.cancel()

    run(fake_engine, scenario)


def test_shutdown_answers_what_is_unfinished(fake_engine: Any) -> None:
    fake_engine.is_stuck = True

    async def scenario(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1], PARAMS))
        await until(lambda: bool(fake_engine.added))
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(ShuttingDownError, match="the server is shut down"):
            await task
        with pytest.raises(ShuttingDownError, match="the server is shut down"):
            await engine.generate([1], PARAMS)
        assert not engine.is_healthy and not engine.has_failed

    run(fake_engine, scenario)


def test_shutdown_does_not_wait_for_a_step_that_hangs(fake_engine: Any) -> None:
    release = hold_steps(fake_engine)

    async def scenario(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1], PARAMS))
        await until(lambda: bool(fake_engine.added))
        assert not await asyncio.to_thread(engine.shutdown, 0.05)
        with pytest.raises(ShuttingDownError, match="the server is shut down"):
            await task
        release.set()
        assert await asyncio.to_thread(engine.shutdown)

    run(fake_engine, scenario)


def test_shutdown_can_be_repeated(fake_engine: Any) -> None:
    engine = AsyncEngine(fake_engine)
    engine.shutdown()
    engine.shutdown()
    assert not engine.is_healthy


def test_a_closed_event_loop_does_not_end_the_engine(fake_engine: Any) -> None:
    fake_engine.is_stuck = True
    with running(fake_engine) as engine:
        loop = asyncio.new_event_loop()
        task = loop.create_task(engine.generate([1], PARAMS))
        loop.run_until_complete(asyncio.sleep(0.01))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        fake_engine.is_stuck = False
        with engine._wake:
            engine._wake.notify()

        async def scenario() -> None:
            assert (await engine.generate([2], PARAMS)).finished

        asyncio.run(scenario())
        assert not task.done()
        with pytest.raises(RuntimeError, match="Event loop is closed"):
            task.get_coro().close()  # type: ignore[union-attr]


def test_an_idle_engine_waits_without_spinning(fake_engine: Any) -> None:
    calls = 0
    has_unfinished = fake_engine.has_unfinished

    def counting() -> bool:
        nonlocal calls
        calls += 1
        return bool(has_unfinished())

    fake_engine.has_unfinished = counting
    with running(fake_engine):
        time.sleep(0.05)
    assert calls < 5


# Streams


def test_a_stream_gives_what_is_new_after_each_step(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = await read(engine, "mine")
        assert [output.request_id for output in outputs] == ["mine"] * 6
        assert [output.outputs[0].text for output in outputs] == [*"Hello", ""]
        assert [output.finished for output in outputs] == [False] * 5 + [True]
        assert engine.num_requests == 0

    run(fake_engine, scenario)


def test_three_hundred_streams_run_at_once_with_one_call_of_the_loop_for_each_step(
    fake_engine: Any,
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        tasks = [asyncio.create_task(read(engine)) for _ in range(300)]
        await until(lambda: len(fake_engine.added) == 300)
        loop = asyncio.get_running_loop()
        call_soon, calls = loop.call_soon_threadsafe, []

        def counting(*given: Any, **options: Any) -> Any:
            calls.append(given)
            return call_soon(*given, **options)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        fake_engine.is_stuck = False
        last = asyncio.create_task(read(engine))  # wakes the thread
        for outputs in await asyncio.gather(*tasks, last):
            assert "".join(output.outputs[0].text for output in outputs) == "Hello"
        assert fake_engine.most_at_once == 301
        assert len(calls) == 6

    run(fake_engine, scenario)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        slow = engine.stream([1], ALL)
        first = await anext(slow)
        for _ in range(10):
            await read(engine)
        assert engine.num_requests == 0
        rest = [output async for output in slow]
        assert "".join(output.outputs[0].text for output in [first, *rest]) == "Hello"

    run(fake_engine, scenario)


def test_closing_a_stream_aborts_its_request(fake_engine: Any) -> None:
    fake_engine.reply = [72] * 10**6
    forever = SamplingParams(max_tokens=10**6)

    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.stream([1], forever, "gone")
        assert not (await anext(stream)).finished
        await stream.aclose()
        assert engine.num_requests == 0
        await until(lambda: fake_engine.aborted == ["gone"])
        assert await engine.generate([2], PARAMS)

    run(fake_engine, scenario)


def test_cancelling_the_reader_of_a_stream_aborts_its_request(fake_engine: Any) -> None:
    fake_engine.is_stuck = True

    async def scenario(engine: AsyncEngine) -> None:
        task = asyncio.create_task(read(engine, "gone"))
        await until(lambda: bool(fake_engine.added))
        task.cancel()
        await until(lambda: fake_engine.aborted == ["gone"])
        assert engine.num_requests == 0

    run(fake_engine, scenario)


def test_a_request_that_goes_before_the_engine_knows_of_it_is_never_added(fake_engine: Any) -> None:
    release = hold_steps(fake_engine)

    async def scenario(engine: AsyncEngine) -> None:
        first = asyncio.create_task(engine.generate([1], PARAMS))
        await until(fake_engine.is_held.is_set)
        second = asyncio.create_task(engine.generate([2], PARAMS))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        release.set()
        await first
        await engine.generate([3], PARAMS)
        assert [prompt for prompt, _, _ in fake_engine.added] == [[1], [3]]
        assert fake_engine.aborted == []

    run(fake_engine, scenario)


def test_an_id_that_is_used_again_gets_no_output_of_the_request_before(fake_engine: Any) -> None:
    held, release = threading.Event(), threading.Event()
    step = fake_engine.step

    def waiting_step() -> Any:
        outputs = step()
        held.set()
        release.wait(20)
        return outputs

    fake_engine.step = waiting_step

    async def scenario(engine: AsyncEngine) -> None:
        one = SamplingParams(max_tokens=1)
        first = asyncio.create_task(engine.generate([1], one, "a"))
        await until(held.is_set)
        first.cancel()
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.generate([2], one, "a"))
        await asyncio.sleep(0)
        release.set()
        assert (await second).prompt_token_ids == [2]

    run(fake_engine, scenario)


def test_a_refusal_comes_in_place_of_the_first_output_of_a_stream(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.fail_in_add = RequestError("bad", param="prompt")
        with pytest.raises(RequestError, match="bad"):
            await anext(engine.stream([1], ALL))

    run(fake_engine, scenario)


def test_a_failing_step_ends_a_stream_after_what_it_gave_before(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.stream([1], ALL)
        step = fake_engine.step

        def failing_step() -> Any:
            outputs = step()
            if outputs[0].finished:
                raise RuntimeError("no memory")
            return outputs

        fake_engine.step = failing_step
        text = ""
        with pytest.raises(EngineDeadError, match="the engine failed: RuntimeError: no memory"):
            async for output in stream:
                text += output.outputs[0].text
        assert text == "Hello"

    run(fake_engine, scenario)


# The queue and several choices


def test_each_choice_of_a_request_counts(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fake_engine.is_stuck = True
        three = SamplingParams(max_tokens=2, n=3)
        task = asyncio.create_task(engine.generate([1], three))
        await until(lambda: bool(fake_engine.added))
        with pytest.raises(QueueFullError, match=r"holds 3 requests, and 3 more is too much"):
            await engine.generate([1], three)
        fake_engine.is_stuck = False
        await engine.generate([1], PARAMS)
        assert len((await task).outputs) == 3
        assert len((await engine.generate([1], three)).outputs) == 3

    run(fake_engine, scenario, max_queued_requests=4)


def test_more_choices_than_the_queue_holds_are_a_wrong_request(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="n is 5; the server holds at most 4") as caught:
            await engine.generate([1], SamplingParams(n=5))
        assert caught.value.param == "n"

    run(fake_engine, scenario, max_queued_requests=4)


# Draining


def test_draining_refuses_new_requests_and_finishes_those_it_has(fake_engine: Any) -> None:
    release = hold_steps(fake_engine)

    async def scenario(engine: AsyncEngine) -> None:
        running = [asyncio.create_task(read(engine)) for _ in range(3)]
        await asyncio.sleep(0)
        engine.drain()
        with pytest.raises(ShuttingDownError, match="takes no more requests"):
            await engine.generate([1], PARAMS)
        with pytest.raises(ShuttingDownError, match="takes no more requests"):
            await anext(engine.stream([1], PARAMS))
        idle = asyncio.create_task(engine.wait_until_idle())
        await asyncio.sleep(0.01)
        assert not idle.done() and engine.is_healthy
        release.set()
        await idle
        assert engine.num_requests == 0
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*running))

    run(fake_engine, scenario)


def test_an_engine_without_requests_is_idle_at_once(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await engine.wait_until_idle()
        await engine.generate([1], PARAMS)
        await engine.wait_until_idle()

    run(fake_engine, scenario)


def test_it_becomes_idle_when_the_last_caller_goes_or_the_engine_fails(fake_engine: Any) -> None:
    fake_engine.is_stuck = True

    async def scenario(engine: AsyncEngine) -> None:
        for end in (lambda task: task.cancel(), lambda task: engine.stop()):
            task = asyncio.create_task(engine.generate([1], PARAMS))
            await asyncio.sleep(0)
            idle = asyncio.create_task(engine.wait_until_idle())
            await asyncio.sleep(0.01)
            assert not idle.done()
            end(task)
            await idle
            await asyncio.gather(task, return_exceptions=True)

    run(fake_engine, scenario)


# Steps that hang


def test_a_step_that_hangs_ends_every_request(
    fake_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    release = hold_steps(fake_engine)

    async def scenario(engine: AsyncEngine) -> None:
        tasks = [engine.generate([1], PARAMS), engine.generate([2], PARAMS), read(engine)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert str(result) == "a step has taken more than 0.2 s"
        assert not engine.is_healthy and engine.has_failed and engine.num_requests == 0
        with pytest.raises(EngineDeadError, match="more than 0.2 s"):
            await engine.generate([1], PARAMS)
        (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
        assert "in held_step" in record.getMessage()
        assert "release.wait(20)" in record.getMessage()
        release.set()
        await until(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineDeadError, match="more than 0.2 s"):
            await engine.generate([1], PARAMS)

    run(fake_engine, scenario, step_timeout=0.2)


def test_many_short_steps_and_a_rest_are_no_hang(fake_engine: Any) -> None:
    fake_engine.reply = [40] * 14
    step = fake_engine.step

    def short_step() -> Any:
        time.sleep(0.05)
        return step()

    fake_engine.step = short_step

    async def scenario(engine: AsyncEngine) -> None:
        assert (await read(engine))[-1].finished
        await asyncio.sleep(0.7)
        assert (await engine.generate([1], PARAMS)).finished
        assert engine.is_healthy

    run(fake_engine, scenario, step_timeout=0.6)


def test_without_a_limit_a_step_may_take_any_time(fake_engine: Any) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert (await engine.generate([1], PARAMS)).finished and engine.is_healthy

    run(fake_engine, scenario, step_timeout=None)
