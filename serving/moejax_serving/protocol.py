"""The bodies of requests, shaped as OpenAI's and with vLLM's additions."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

from moejax_serving.sampling_params import NEUTRAL, refuse_unless_neutral

_log = logging.getLogger(__name__)

# After the first wrong element there is no need to look at a million others.
_Strings = Annotated[list[str], pydantic.Field(fail_fast=True)]
_TokenIds = Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(fail_fast=True)]
_Prompts = Annotated[list[_TokenIds], pydantic.Field(fail_fast=True)]


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class GenerationBody(_Body):
    """What both kinds of completions take. None: the server's default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | _Strings | None = None
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: str | _Strings | _TokenIds | _Prompts
    logprobs: int | None = None


class ContentPart(_Body):
    """A part of a message; only parts of type text are done."""

    type: str
    text: str | None = None


class Message(_Body):
    """A message of a conversation. Further keys reach the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], pydantic.Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "stream": (False,),
    "stream_options": (),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
"""Parameters of OpenAI and vLLM that are not honoured, with the values besides null that ask for
nothing."""

_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "include_reasoning",
    }
)
"""Parameters that change nothing in the answer."""


_MAX_WARNINGS = 100


def check_extras(body: GenerationBody, warned: set[str]) -> None:
    """Refuses what is known and not done; warns of each key that nobody knows, unless `warned`.

    Raises:
        RequestError: it names the first parameter that asks for something not done.
    """
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED:
            refuse_unless_neutral(name, value, _REFUSED)
        elif name not in _HARMLESS and name not in warned and len(warned) < _MAX_WARNINGS:
            warned.add(name)
            _log.warning("a request holds %.100r, which is unknown and ignored", name)
