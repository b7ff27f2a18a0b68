"""From a request's body to what the engine is asked for: what both kinds of completions share."""

from collections.abc import Mapping
from typing import Any

from moejax.errors import CapacityError, RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.job import Prompt
from moejax_serving.protocol import GenerationBody
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer

_FROM_SERVER = ("temperature", "top_p", "top_k", "min_p")
_FROM_BODY = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class ContextLengthError(RequestError):
    """The prompt, or what is to be generated, does not fit into the model's context."""


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


def check_num_choices(engine: AsyncEngine, body: GenerationBody, num_prompts: int = 1) -> None:
    """Refuses a request that the queue can never hold, before work is put into it.

    Raises:
        RequestError: it names `n`, or the prompts if there are too many of them alone.
    """
    num_choices = num_prompts * max(body.n or 1, 1)
    if num_choices <= engine.max_queued_requests:
        return
    is_n = num_prompts <= engine.max_queued_requests
    each = f"n = {body.n} for each of " if is_n else ""
    raise RequestError(
        f"{each}{num_prompts} prompts in one request; the server holds at most "
        f"{engine.max_queued_requests}",
        param="n" if is_n else "prompt",
    )


def check_stream(body: GenerationBody) -> None:
    """Refuses what makes sense only with a stream, or only without.

    Raises:
        RequestError: it names the parameter.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if options is not None and options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise RequestError(f"{name} is not supported: leave it out", param=name)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs needs stream=false", param="prompt_logprobs")


def build_params(
    body: GenerationBody,
    defaults: Mapping[str, float | int],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The body's sampling parameters; `defaults` for what it leaves out."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _FROM_BODY + _FROM_SERVER}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in _FROM_SERVER:
        if name in defaults:
            chosen.setdefault(name, defaults[name])
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **chosen
    )


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
