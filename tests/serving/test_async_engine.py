"""AsyncEngine: every request is answered, whatever happens."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.async_engine import AsyncEngine, EngineDeadError, QueueFullError
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=2)


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
        assert not engine.is_healthy and engine.num_requests == 0
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
        with pytest.raises(EngineDeadError, match="the server is shut down"):
            await task
        with pytest.raises(EngineDeadError, match="the server is shut down"):
            await engine.generate([1], PARAMS)
        assert not engine.is_healthy

    run(fake_engine, scenario)


def test_shutdown_does_not_wait_for_a_step_that_hangs(fake_engine: Any) -> None:
    release = threading.Event()

    def hanging_step() -> list[RequestOutput]:
        release.wait(20)
        return []

    fake_engine.step = hanging_step

    async def scenario(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1], PARAMS))
        await until(lambda: bool(fake_engine.added))
        await asyncio.to_thread(engine.shutdown, 0.05)
        with pytest.raises(EngineDeadError, match="the server is shut down"):
            await task
        release.set()

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
        loop.stop()
        future = next(iter(engine._futures.values()))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        fake_engine.is_stuck = False
        with engine._wake:
            engine._wake.notify()

        async def scenario() -> None:
            assert (await engine.generate([2], PARAMS)).finished

        asyncio.run(scenario())
        assert not future.done()
        del task


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
