"""Service: what state the server is in, and whether there is an engine."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from moejax_serving.async_engine import AsyncEngine, EngineDeadError, ShuttingDownError
from moejax_serving.metrics import Metrics
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.service import NotReadyError, Service


@pytest.fixture
def engine(fake_engine: Any) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(fake_engine)
    yield engine
    engine.shutdown()


def test_it_is_loading_until_it_has_an_engine(engine: AsyncEngine) -> None:
    metrics = Metrics("m")
    service = Service(metrics, ["m", "alias"])
    assert service.state == "loading"
    with pytest.raises(NotReadyError, match="the model is still being loaded"):
        _ = service.engine
    service.set_ready(engine)
    assert service.state == "ready" and service.engine is engine
    assert service.metrics is metrics and service.served_model_names == ("m", "alias")


def test_one_that_is_ready_has_metrics_of_its_first_name(engine: AsyncEngine) -> None:
    service = Service.of(engine, ["org/m", "alias"])
    assert service.state == "ready" and service.engine is engine
    assert b'model_name="org/m"' in service.metrics.render()[0]


def test_draining_keeps_the_engine_and_drains_it(engine: AsyncEngine) -> None:
    service = Service.of(engine, ["m"])
    service.drain()
    assert service.state == "draining" and service.engine is engine
    with pytest.raises(ShuttingDownError):
        asyncio.run(engine.generate([1], SamplingParams()))


def test_draining_while_loading_leaves_nothing_to_wait_for(engine: AsyncEngine) -> None:
    service = Service(Metrics("m"), ["m"])
    service.drain()
    assert service.state == "draining"
    with pytest.raises(ShuttingDownError, match="the server is shutting down"):
        _ = service.engine
    service.set_ready(engine)
    assert service.state == "draining"
    with pytest.raises(ShuttingDownError):
        asyncio.run(engine.generate([1], SamplingParams()))


def test_an_engine_that_failed_makes_it_dead(fake_engine: Any, engine: AsyncEngine) -> None:
    service = Service.of(engine, ["m"])
    fake_engine.fail_in_step = RuntimeError("no memory")
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.generate([1], SamplingParams()))
    assert service.state == "dead"
    service.drain()
    assert service.state == "dead"


def test_an_engine_that_was_stopped_did_not_fail(engine: AsyncEngine) -> None:
    service = Service.of(engine, ["m"])
    service.drain()
    engine.shutdown()
    assert service.state == "draining"
