"""POST /v1/completions: prompts in, texts out."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from moejax.errors import RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.generation import (
    build_params,
    check_num_choices,
    check_stream,
    encode_prompt,
    fit_max_tokens,
)
from moejax_serving.job import Job, Prompt, count_usage, generate_all, stream_all
from moejax_serving.logprob_shapes import Entries, shape_legacy, shape_prompt
from moejax_serving.outputs import CompletionOutput, RequestOutput
from moejax_serving.protocol import CompletionBody
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.streaming import ChunkWriter
from moejax_serving.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16


async def complete(engine: AsyncEngine, body: CompletionBody, model: str) -> dict[str, Any]:
    """Answers a completion request under the name `model`."""
    job = await asyncio.to_thread(_prepare, engine, body)
    head = _head(job, model)
    outputs = await generate_all(engine, job)
    # With log-probabilities of long prompts there is a lot to build: not on the event loop.
    return await asyncio.to_thread(_build_answer, engine.tokenizer, body, job, outputs, head)


async def stream_completion(
    engine: AsyncEngine, body: CompletionBody, model: str
) -> AsyncGenerator[str, None]:
    """The same answer as events, each choice in as many chunks as it takes."""
    job = await asyncio.to_thread(_prepare, engine, body)
    writer = ChunkWriter(_head(job, model), job, body.stream_options)
    echoed: dict[int, list[Entries | None]] = {}  # by prompt
    offsets: dict[int, int] = {}  # by choice
    async with contextlib.aclosing(stream_all(engine, job)) as outputs:
        async for at, output in outputs:
            writer.count(at, output)
            echoed.setdefault(at, output.prompt_logprobs or [])
            events = []
            for choice in output.outputs:
                index = at * job.params[at].n + choice.index
                is_echo = body.echo is True and index not in offsets
                if not is_echo and not writer.is_needed(choice):
                    continue
                content, offsets[index] = _build_choice(
                    engine.tokenizer,
                    body,
                    choice,
                    index=index,
                    prompt=job.prompts[at] if is_echo else None,
                    prompt_logprobs=echoed[at],
                    offset=offsets.get(index, 0),
                )
                events.append(writer.write(at, choice, content))
            if events:
                yield "".join(events)
    if last := writer.write_last():
        yield last


def _prepare(engine: AsyncEngine, body: CompletionBody) -> Job:
    check_stream(body)
    prompts = _read_prompts(engine, body)
    return Job(
        f"cmpl-{uuid.uuid4().hex}",
        prompts,
        [_build_params(engine, body, len(prompt.token_ids)) for prompt in prompts],
        is_echo_only=body.max_tokens == 0,
    )


def _read_prompts(engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
    items = _split(body.prompt)
    if not items:
        raise RequestError("the prompt is empty: one token is needed", param="prompt")
    check_num_choices(engine, body, len(items))
    return [_read_prompt(engine, body, item) for item in items]


def _split(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """A string or a list of integers is one prompt, any other list is several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


def _read_prompt(engine: AsyncEngine, body: CompletionBody, item: str | list[int]) -> Prompt:
    if isinstance(item, str):
        add = body.add_special_tokens is not False
        return encode_prompt(engine, item, add_special_tokens=add, param="prompt")
    if body.echo and engine.tokenizer is not None and len(item) < engine.max_model_len:
        return Prompt(item, engine.tokenizer.decode(item, skip_special_tokens=False))
    return Prompt(item)


def _build_params(engine: AsyncEngine, body: CompletionBody, num_tokens: int) -> SamplingParams:
    is_echo_only = body.max_tokens == 0 and body.echo is True
    if is_echo_only and body.min_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens = 0, got {body.min_tokens}", param="min_tokens"
        )
    max_tokens = fit_max_tokens(
        num_tokens,
        engine.max_model_len,
        asked=1 if is_echo_only else body.max_tokens,
        default=_DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
    )
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return build_params(
        body,
        engine.default_sampling,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in wanted if count is not None), default=None),
    )


def _head(job: Job, model: str) -> dict[str, Any]:
    return {
        "id": job.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _build_answer(
    tokenizer: Tokenizer | None,
    body: CompletionBody,
    job: Job,
    outputs: Sequence[RequestOutput],
    head: dict[str, Any],
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for prompt, output in zip(job.prompts, outputs, strict=True):
        positions = output.prompt_logprobs or []
        extra = {}
        if body.prompt_logprobs is not None:
            shaped = shape_prompt(prompt.token_ids, positions, num_top=body.prompt_logprobs)
            extra = {"prompt_logprobs": shaped}
        for choice in output.outputs:
            content, _ = _build_choice(
                tokenizer,
                body,
                choice,
                index=len(choices),
                prompt=prompt if body.echo else None,
                prompt_logprobs=positions,
            )
            choices.append(content | extra)
    return {**head, "choices": choices, "usage": count_usage(outputs)}


def _build_choice(
    tokenizer: Tokenizer | None,
    body: CompletionBody,
    choice: CompletionOutput,
    *,
    index: int,
    prompt: Prompt | None,
    prompt_logprobs: Sequence[Entries | None],
    offset: int = 0,
) -> tuple[dict[str, Any], int]:
    """A choice or what is new of it, after the prompt if it is given; and the next offset."""
    text, token_ids = choice.text, choice.token_ids
    positions: list[Entries | None] = list(choice.logprobs or [])
    if prompt is not None:
        text = (prompt.text or "") + text
        token_ids = [*prompt.token_ids, *token_ids]
        positions = [*prompt_logprobs, *positions]
    logprobs = None
    if body.logprobs is not None and token_ids:
        logprobs, offset = shape_legacy(
            token_ids,
            positions,
            num_top=body.logprobs,
            tokenizer=tokenizer,
            as_ids=body.return_tokens_as_token_ids is True,
            offset=offset,
        )
    content = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    return content, offset
