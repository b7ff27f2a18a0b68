"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from moejax.errors import RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.chat_template import flatten_messages
from moejax_serving.generation import (
    Prompt,
    build_params,
    chosen_logprobs,
    count_usage,
    encode_prompt,
    finite,
    fit_max_tokens,
    generate_all,
    require_tokenizer,
    token_name,
)
from moejax_serving.outputs import CompletionOutput, Logprob
from moejax_serving.protocol import ChatBody, Message
from moejax_serving.sampling_params import MAX_LOGPROBS


async def chat(
    engine: AsyncEngine, body: ChatBody, defaults: Mapping[str, float | int], model: str
) -> dict[str, Any]:
    """Answers a chat request.

    Args:
        engine: generates.
        body: the request.
        defaults: sampling parameters for those that the request leaves out.
        model: the name to answer under.
    """
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    created = int(time.time())
    num_top = _count_top_logprobs(body)
    prompt = await asyncio.to_thread(_read_prompt, engine, body)
    is_old_name = body.max_completion_tokens is None
    max_tokens = fit_max_tokens(
        len(prompt.token_ids),
        engine.max_model_len,
        asked=body.max_tokens if is_old_name else body.max_completion_tokens,
        default=None,
        prompt_param="messages",
        asked_param="max_tokens" if is_old_name else "max_completion_tokens",
    )
    params = build_params(body, defaults, max_tokens=max_tokens, logprobs=num_top)
    outputs = await generate_all(engine, [prompt], [params], request_id)
    choice = outputs[0].outputs[0]
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": None if num_top is None else _logprobs(choice, num_top),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
        ],
        "usage": count_usage(outputs),
    }


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


def _read_prompt(engine: AsyncEngine, body: ChatBody) -> Prompt:
    text = require_tokenizer(engine, "messages").render_chat(
        flatten_messages([_as_dict(message) for message in body.messages]),
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


def _logprobs(choice: CompletionOutput, num_top: int) -> dict[str, Any]:
    content = []
    for token_id, chosen, entries in chosen_logprobs(choice):
        likeliest = sorted(entries.items(), key=lambda item: finite(item[1].logprob), reverse=True)
        top = [_entry(other_id, other) for other_id, other in likeliest[:num_top]]
        content.append({**_entry(token_id, chosen), "top_logprobs": top})
    return {"content": content}


def _entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
    token = token_name(token_id, logprob)
    return {
        "token": token,
        "logprob": finite(logprob.logprob),
        "bytes": list(token.encode()),
    }
