"""From a request's body to generated tokens: what both kinds of completions share."""

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.errors import CapacityError, MoejaxError, RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput
from moejax_serving.protocol import GenerationBody
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer

_FROM_SERVER = ("temperature", "top_p", "top_k", "min_p")
_FROM_BODY = (
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class ContextLengthError(RequestError):
    """The prompt, or what is to be generated, does not fit into the model's context."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one prompt, and its text if it came as text."""

    token_ids: Sequence[int]
    text: str | None = None


def require_tokenizer(engine: AsyncEngine, param: str) -> Tokenizer:
    """The engine's tokenizer.

    Raises:
        RequestError: the server runs without one.
    """
    if engine.tokenizer is None:
        raise RequestError("the server has no tokenizer: send prompts as token ids", param=param)
    return engine.tokenizer


def encode_prompt(
    engine: AsyncEngine, text: str, *, add_special_tokens: bool, param: str
) -> Prompt:
    """The prompt that a text makes; `param` is the field that it came in.

    Raises:
        ContextLengthError: the text is so long that it was not read to its end.
        RequestError: it is not Unicode, or the server has no tokenizer.
    """
    tokenizer = require_tokenizer(engine, param)
    try:
        ids = tokenizer.encode_prompt(
            text, engine.max_model_len, add_special_tokens=add_special_tokens
        )
    except CapacityError as error:
        raise ContextLengthError(str(error), param=param) from error
    except RequestError as error:
        raise RequestError(str(error), param=param) from error
    return Prompt(ids, text)


def check_num_prompts(engine: AsyncEngine, num_prompts: int) -> None:
    """Refuses a request that the queue can never hold, before work is put into it."""
    if num_prompts > engine.max_queued_requests:
        raise RequestError(
            f"{num_prompts} prompts in one request; the server holds at most "
            f"{engine.max_queued_requests}",
            param="prompt",
        )


def build_params(
    body: GenerationBody,
    defaults: Mapping[str, float | int],
    *,
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    """The body's sampling parameters; `defaults` for what it leaves out."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _FROM_BODY + _FROM_SERVER}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in _FROM_SERVER:
        if name in defaults:
            chosen.setdefault(name, defaults[name])
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **chosen)


def fit_max_tokens(
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    asked: int | None,
    default: int | None,
    prompt_param: str,
    asked_param: str = "max_tokens",
) -> int:
    """How many tokens to generate: what was asked for, else the default, else what is left.

    Raises:
        ContextLengthError: it holds the numbers that do not fit.
    """
    left = max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise RequestError("the prompt is empty: one token is needed", param=prompt_param)
    if left < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, and the model's context of "
            f"{max_model_len} tokens must hold it and one more",
            param=prompt_param,
        )
    if asked is None:
        return left if default is None else min(default, left)
    if asked < 1:
        raise RequestError(f"{asked_param} must be at least 1, got {asked}", param=asked_param)
    if asked > left:
        raise ContextLengthError(
            f"{asked_param} is {asked}, but {left} tokens are left: the model's context is "
            f"{max_model_len} tokens and the prompt has {num_prompt_tokens}",
            param=asked_param,
        )
    return asked


async def generate_all(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    request_id: str,
) -> list[RequestOutput]:
    """The outputs of all prompts, or the first error: then the other prompts are aborted."""
    tasks = [
        asyncio.ensure_future(
            engine.generate(prompt.token_ids, param, f"{request_id}-{index}", prompt.text)
        )
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    try:
        outputs = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for output in outputs:
        reason = output.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            raise MoejaxError(f"the engine ended the request early: finish reason {reason}")
    return list(outputs)


def count_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage object."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(len(choice.token_ids) for o in outputs for choice in o.outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    cached = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return usage


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; what is no number counts as the lowest."""
    return max(logprob, _LOWEST_LOGPROB) if math.isfinite(logprob) else _LOWEST_LOGPROB


def token_name(token_id: int, logprob: Logprob) -> str:
    """A token as it is shown beside its log-probability."""
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def chosen_logprobs(choice: CompletionOutput) -> list[tuple[int, Logprob, dict[int, Logprob]]]:
    """For each generated token: its id, its own entry, and all entries of its position."""
    return [
        (token_id, entries[token_id], entries)
        for token_id, entries in zip(choice.token_ids, choice.logprobs or [], strict=True)
    ]
