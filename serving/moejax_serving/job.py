"""The prompts of one HTTP request, run together on the engine."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from moejax.errors import MoejaxError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one prompt, and its text if it came as text."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What the engine is asked for: as many answers to each prompt as its parameters say."""

    request_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    is_echo_only: bool = False
    """One token is generated, since the engine must, and dropped."""


async def generate_all(engine: AsyncEngine, job: Job) -> list[RequestOutput]:
    """The outputs of all prompts, or the first error: then the other prompts are aborted."""
    tasks = [
        asyncio.ensure_future(engine.generate(prompt.token_ids, params, request_id, prompt.text))
        for request_id, prompt, params in _split(job)
    ]
    try:
        outputs = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [_check(job, output) for output in outputs]


async def stream_all(
    engine: AsyncEngine, job: Job
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What is new, with the index of its prompt, as it comes. To close it aborts what still runs.

    Raises:
        MoejaxError: one of the prompts failed.
    """
    streams = [
        engine.stream(prompt.token_ids, params, request_id, prompt.text)
        for request_id, prompt, params in _split(job)
    ]
    merged = _number(streams[0]) if len(streams) == 1 else _merge(streams)
    async with contextlib.aclosing(merged) as outputs:
        async for index, output in outputs:
            yield index, _check(job, output)


def usage(num_prompt: int, num_generated: int, num_cached: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object; `num_cached` of the prompt tokens were in the prefix cache."""
    found: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    if num_cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return found


def count_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of whole outputs. A prompt counts once, however many answers it has."""
    cached = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
        sum(cached) if cached else None,
    )


def _split(job: Job) -> list[tuple[str, Prompt, SamplingParams]]:
    """The engine's requests: each has an id of its own."""
    pairs = zip(job.prompts, job.params, strict=True)
    return [(f"{job.request_id}-{i}", prompt, params) for i, (prompt, params) in enumerate(pairs)]


def _check(job: Job, output: RequestOutput) -> RequestOutput:
    for choice in output.outputs:
        if choice.finish_reason not in (None, "stop", "length"):
            raise MoejaxError(
                f"the engine ended the request early: finish reason {choice.finish_reason}"
            )
    return _drop_generated(output) if job.is_echo_only else output


def _drop_generated(output: RequestOutput) -> RequestOutput:
    choices = [
        dataclasses.replace(
            choice,
            text="",
            token_ids=[],
            logprobs=None if choice.logprobs is None else [],
            finish_reason=None if choice.finish_reason is None else "length",
            stop_reason=None,
        )
        for choice in output.outputs
    ]
    return dataclasses.replace(output, outputs=choices)


async def _number(
    stream: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with contextlib.aclosing(stream) as outputs:
        async for output in outputs:
            yield 0, output


async def _merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_running = len(streams)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
