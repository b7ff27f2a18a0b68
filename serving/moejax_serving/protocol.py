"""The bodies of requests, shaped as OpenAI's and with vLLM's additions."""

from typing import Annotated, Any

import pydantic

from moejax_serving.extras import REFUSED
from moejax_serving.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LEN,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)

MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary has more tokens."""

# After the first wrong element there is no need to look at a million others.
_Strings = Annotated[list[str], pydantic.Field(fail_fast=True)]
_TokenIds = Annotated[
    list[Annotated[int, pydantic.Field(ge=0, le=MAX_TOKEN_ID)]], pydantic.Field(fail_fast=True)
]
_Prompts = Annotated[list[_TokenIds], pydantic.Field(fail_fast=True)]
_NOT_EMPTY = {"minItems": 1, "minLength": 1}


def _documented(**schema: Any) -> Any:
    """Limits of a field for readers of the schema; `SamplingParams` is what refuses."""
    return pydantic.Field(json_schema_extra=schema)


def _add_refused(schema: dict[str, Any]) -> None:
    """Says which values the parameters may have that are known and not done."""
    for name, neutral in REFUSED.items():
        allowed = [value for value in neutral if not isinstance(value, tuple)]
        schema["properties"].setdefault(name, {"enum": [None, *allowed]})


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream holds besides text."""

    include_usage: bool | None = None
    """A last chunk with the usage of the whole request; null means true, as in vLLM."""
    continuous_usage_stats: bool | None = None
    """Each chunk holds the usage of its choice up to there."""
    include_obfuscation: Annotated[bool | None, _documented(enum=[None, False])] = None


class GenerationBody(_Body):
    """What both kinds of completions take. None: the server's default."""

    model_config = pydantic.ConfigDict(json_schema_extra=_add_refused)

    model: str | None = None
    max_tokens: int | None = None
    n: Annotated[int | None, _documented(minimum=1, maximum=MAX_N)] = None
    temperature: Annotated[float | None, _documented(minimum=0, maximum=1e9)] = None
    top_p: Annotated[float | None, _documented(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, _documented(minimum=-1, maximum=2**31 - 1)] = None
    min_p: Annotated[float | None, _documented(minimum=0, maximum=1)] = None
    presence_penalty: Annotated[float | None, _documented(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, _documented(minimum=-2, maximum=2)] = None
    repetition_penalty: Annotated[float | None, _documented(minimum=0.001, maximum=1000)] = None
    logit_bias: Annotated[
        dict[str, Any] | None,
        _documented(
            maxProperties=MAX_LOGIT_BIAS,
            propertyNames={"pattern": "^[0-9]{1,10}$"},
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
    ] = None
    # The schema's numbers are floats: this is the last one below 2**63.
    seed: Annotated[int | None, _documented(minimum=-(2**63), maximum=2**63 - 1024)] = None
    stop: Annotated[
        str | _Strings | None,
        _documented(
            minLength=1,
            maxLength=MAX_STOP_LEN,
            maxItems=MAX_STOPS,
            items={"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN},
        ),
    ] = None
    stop_token_ids: Annotated[_TokenIds | None, _documented(maxItems=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, _documented(minimum=0, maximum=2**31 - 1)] = None
    prompt_logprobs: Annotated[int | None, _documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | _Strings | _TokenIds | _Prompts, _documented(**_NOT_EMPTY, items=_NOT_EMPTY)
    ]
    max_tokens: Annotated[int | None, _documented(minimum=0)] = None
    """0 only with `echo`."""
    logprobs: Annotated[int | None, _documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    echo: bool | None = None


class ContentPart(_Body):
    """A part of a message; only parts of type text are done."""

    type: Annotated[str, _documented(enum=["text"])]
    text: str | None = None


class Message(_Body):
    """A message of a conversation. Further keys reach the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None


_Messages = Annotated[list[Message], pydantic.Field(fail_fast=True)]


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[_Messages, _documented(minItems=1)]
    max_tokens: Annotated[int | None, _documented(minimum=1)] = None
    max_completion_tokens: Annotated[int | None, _documented(minimum=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, _documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """The body of POST /tokenize: a prompt or messages, not both."""

    model_config = pydantic.ConfigDict(json_schema_extra=_add_refused)

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """None: with a prompt, and not with messages, whose template adds them."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: _TokenIds
