"""Keys of a request's body beyond those that are honoured: refused, harmless or unknown."""

import logging
from collections.abc import Mapping
from typing import Any

import pydantic

from moejax_serving.sampling_params import NEUTRAL, refuse_unless_neutral

_log = logging.getLogger(__name__)

REFUSED: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "max_completion_tokens": (),
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
    "return_token_ids": (False,),
}
"""Parameters of OpenAI and vLLM that are not honoured, or not by every route, with the values
besides null that ask for nothing."""

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


def check_extras(body: pydantic.BaseModel, warned: set[str]) -> None:
    """Refuses what is known and not done; warns of each key that nobody knows, unless `warned`.

    Raises:
        RequestError: it names the first parameter that asks for something not done.
    """
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED:
            refuse_unless_neutral(name, value, REFUSED)
        elif name not in _HARMLESS and name not in warned and len(warned) < _MAX_WARNINGS:
            warned.add(name)
            _log.warning("a request holds %.100r, which is unknown and ignored", name)
