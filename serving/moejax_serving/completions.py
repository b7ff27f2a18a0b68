"""POST /v1/completions: prompts in, texts out."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.errors import RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.generation import (
    Prompt,
    build_params,
    check_num_prompts,
    chosen_logprobs,
    count_usage,
    encode_prompt,
    finite,
    fit_max_tokens,
    generate_all,
    token_name,
)
from moejax_serving.outputs import CompletionOutput
from moejax_serving.protocol import CompletionBody

_DEFAULT_MAX_TOKENS = 16


async def complete(
    engine: AsyncEngine, body: CompletionBody, defaults: Mapping[str, float | int], model: str
) -> dict[str, Any]:
    """Answers a completion request.

    Args:
        engine: generates.
        body: the request.
        defaults: sampling parameters for those that the request leaves out.
        model: the name to answer under.
    """
    request_id = f"cmpl-{uuid.uuid4().hex}"
    created = int(time.time())
    prompts = await asyncio.to_thread(_read_prompts, engine, body)
    params = [
        build_params(
            body,
            defaults,
            max_tokens=fit_max_tokens(
                len(prompt.token_ids),
                engine.max_model_len,
                asked=body.max_tokens,
                default=_DEFAULT_MAX_TOKENS,
                prompt_param="prompt",
            ),
            logprobs=body.logprobs,
        )
        for prompt in prompts
    ]
    outputs = await generate_all(engine, prompts, params, request_id)
    choices = [output.outputs[0] for output in outputs]
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None if choice.logprobs is None else _logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": count_usage(outputs),
    }


def _read_prompts(engine: AsyncEngine, body: CompletionBody) -> list[Prompt]:
    items = _split(body.prompt)
    if not items:
        raise RequestError("the prompt is empty: one token is needed", param="prompt")
    check_num_prompts(engine, len(items))
    add = body.add_special_tokens is not False
    return [
        encode_prompt(engine, item, add_special_tokens=add, param="prompt")
        if isinstance(item, str)
        else Prompt(item)
        for item in items
    ]


def _split(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """A string or a list of integers is one prompt, any other list is several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


def _logprobs(choice: CompletionOutput) -> dict[str, Any]:
    """The legacy shape: four lists with an entry per generated token."""
    tokens, token_logprobs, top_logprobs, offsets = [], [], [], []
    offset = 0
    for token_id, chosen, entries in chosen_logprobs(choice):
        token = token_name(token_id, chosen)
        top: dict[str, float] = {}
        for other_id, other in entries.items():
            name = token_name(other_id, other)  # two tokens can have one name: the likelier stays
            top[name] = max(finite(other.logprob), top.get(name, finite(other.logprob)))
        tokens.append(token)
        token_logprobs.append(finite(chosen.logprob))
        top_logprobs.append(top)
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
