"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from moejax.errors import RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.chat_template import flatten_messages
from moejax_serving.generation import (
    build_params,
    check_num_choices,
    check_stream,
    encode_prompt,
    fit_max_tokens,
    require_tokenizer,
)
from moejax_serving.job import Job, Prompt, count_usage, generate_all, stream_all
from moejax_serving.logprob_shapes import shape_chat, shape_prompt
from moejax_serving.outputs import CompletionOutput, RequestOutput
from moejax_serving.protocol import ChatBody, Message, TokenizeBody
from moejax_serving.sampling_params import MAX_LOGPROBS, SamplingParams
from moejax_serving.streaming import ChunkWriter


async def chat(engine: AsyncEngine, body: ChatBody, model: str) -> dict[str, Any]:
    """Answers a chat request under the name `model`."""
    job = await asyncio.to_thread(_prepare, engine, body)
    head = _head(job, model, "chat.completion")
    (output,) = await generate_all(engine, job)
    # With log-probabilities of long prompts there is a lot to build: not on the event loop.
    return await asyncio.to_thread(_build_answer, body, output, head)


async def stream_chat(engine: AsyncEngine, body: ChatBody, model: str) -> AsyncGenerator[str, None]:
    """The same answer as events: the role of each choice, then its text in chunks."""
    job = await asyncio.to_thread(_prepare, engine, body)
    writer = ChunkWriter(_head(job, model, "chat.completion.chunk"), job, body.stream_options)
    begun: set[int] = set()
    async with contextlib.aclosing(stream_all(engine, job)) as outputs:
        async for at, output in outputs:
            events = []
            for choice in output.outputs:
                if choice.index not in begun:
                    begun.add(choice.index)
                    events.append(writer.write(at, choice, _build_first(choice.index)))
            writer.count(at, output)
            for choice in output.outputs:
                if writer.is_needed(choice):
                    content = {
                        "index": choice.index,
                        "delta": {"content": choice.text} if choice.text else {},
                        "logprobs": _shape_logprobs(body, choice),
                        "finish_reason": choice.finish_reason,
                    }
                    if choice.finish_reason is not None:
                        content["stop_reason"] = choice.stop_reason
                    events.append(writer.write(at, choice, content))
            if events:
                yield "".join(events)
    if last := writer.write_last():
        yield last


def read_messages(
    engine: AsyncEngine, messages: Sequence[Message], body: ChatBody | TokenizeBody
) -> Prompt:
    """The prompt that the model's template makes of a conversation.

    Raises:
        RequestError: the messages are wrong, or there is no template.
    """
    text = require_tokenizer(engine, "messages").render_chat(
        flatten_messages([_as_dict(message) for message in messages]),
        body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    add = bool(body.add_special_tokens)
    return encode_prompt(engine, text, add_special_tokens=add, param="messages")


def _as_dict(message: Message) -> dict[str, Any]:
    """The message without nulls. pydantic's own dump fails where further keys are nested deep."""
    found = {key: value for key, value in message if value is not None}
    if isinstance(message.content, list):
        found["content"] = [dict(part) for part in message.content]
    return found


def _prepare(engine: AsyncEngine, body: ChatBody) -> Job:
    check_stream(body)
    check_num_choices(engine, body)
    num_top = _count_top_logprobs(body)
    prompt = read_messages(engine, body.messages, body)
    params = _build_params(engine, body, len(prompt.token_ids), num_top)
    return Job(f"chatcmpl-{uuid.uuid4().hex}", [prompt], [params])


def _count_top_logprobs(body: ChatBody) -> int | None:
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {num_top}",
            param="top_logprobs",
        )
    if num_top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return num_top if body.logprobs else None


def _build_params(
    engine: AsyncEngine, body: ChatBody, num_tokens: int, num_top: int | None
) -> SamplingParams:
    is_old_name = body.max_completion_tokens is None
    max_tokens = fit_max_tokens(
        num_tokens,
        engine.max_model_len,
        asked=body.max_tokens if is_old_name else body.max_completion_tokens,
        default=None,
        prompt_param="messages",
        asked_param="max_tokens" if is_old_name else "max_completion_tokens",
    )
    return build_params(
        body,
        engine.default_sampling,
        max_tokens=max_tokens,
        logprobs=num_top,
        prompt_logprobs=body.prompt_logprobs,
    )


def _head(job: Job, model: str, kind: str) -> dict[str, Any]:
    return {"id": job.request_id, "object": kind, "created": int(time.time()), "model": model}


def _build_first(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def _build_answer(body: ChatBody, output: RequestOutput, head: Mapping[str, Any]) -> dict[str, Any]:
    answer = {
        **head,
        "choices": [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": _shape_logprobs(body, choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ],
        "usage": count_usage([output]),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = shape_prompt(
            output.prompt_token_ids, output.prompt_logprobs or [], num_top=body.prompt_logprobs
        )
    return answer


def _shape_logprobs(body: ChatBody, choice: CompletionOutput) -> dict[str, Any] | None:
    if not body.logprobs or not choice.token_ids:
        return None
    return shape_chat(
        choice.token_ids,
        choice.logprobs or [],
        num_top=body.top_logprobs or 0,
        as_ids=body.return_tokens_as_token_ids is True,
    )
