"""Log-probabilities as answers hold them: OpenAI's two shapes, and vLLM's for prompts."""

import math
from collections.abc import Sequence
from typing import Any

from moejax_serving.outputs import Logprob
from moejax_serving.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity

type Entries = dict[int, Logprob]
"""By token id, what is known of one position: the token that stands there and the likeliest."""


def shape_legacy(
    token_ids: Sequence[int],
    positions: Sequence[Entries | None],
    *,
    num_top: int,
    tokenizer: Tokenizer | None,
    as_ids: bool = False,
    offset: int = 0,
) -> tuple[dict[str, Any], int]:
    """The shape of completions, four lists with an entry per token, and the offset after them.

    Args:
        token_ids: the tokens.
        positions: what is known of each; None for a token that nothing predicts.
        num_top: how many of the likeliest tokens are shown.
        tokenizer: names the tokens of which nothing is known.
        as_ids: name all tokens by their ids.
        offset: where the first token's text begins.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entries in zip(token_ids, positions, strict=True):
        if entries is None:
            text = None if tokenizer is None else tokenizer.token_text(token_id)
            token = _name(token_id, text, as_ids)
            token_logprobs.append(None)
            top_logprobs.append(None)
        else:
            chosen = entries[token_id]
            token = _name(token_id, chosen.decoded_token, as_ids)
            token_logprobs.append(_finite(chosen.logprob))
            top: dict[str, float] = {}
            for other_id, other in entries.items():
                if other_id == token_id or _is_top(other, num_top):
                    # Two tokens can have one name: the likelier one stays.
                    name = _name(other_id, other.decoded_token, as_ids)
                    top[name] = max(_finite(other.logprob), top.get(name, _LOWEST_LOGPROB))
            top_logprobs.append(top)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
    shape = {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
    return shape, offset


def shape_chat(
    token_ids: Sequence[int], positions: Sequence[Entries], *, num_top: int, as_ids: bool = False
) -> dict[str, Any]:
    """The shape of chat: an object per token, with the likeliest tokens in order."""
    content = []
    for token_id, entries in zip(token_ids, positions, strict=True):
        likeliest = sorted(entries.items(), key=lambda item: _finite(item[1].logprob), reverse=True)
        top = [_chat_entry(other_id, other, as_ids) for other_id, other in likeliest[:num_top]]
        content.append({**_chat_entry(token_id, entries[token_id], as_ids), "top_logprobs": top})
    return {"content": content}


def shape_prompt(
    token_ids: Sequence[int], positions: Sequence[Entries | None], *, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The shape of `prompt_logprobs`: for each prompt token, what is known by token id."""
    return [
        None
        if entries is None
        else {
            str(other_id): {
                "logprob": _finite(other.logprob),
                "rank": other.rank,
                "decoded_token": other.decoded_token,
            }
            for other_id, other in entries.items()
            if other_id == token_id or _is_top(other, num_top)
        }
        for token_id, entries in zip(token_ids, positions, strict=True)
    ]


def _chat_entry(token_id: int, logprob: Logprob, as_ids: bool) -> dict[str, Any]:
    token = _name(token_id, logprob.decoded_token, as_ids)
    return {"token": token, "logprob": _finite(logprob.logprob), "bytes": list(token.encode())}


def _is_top(entry: Logprob, num_top: int) -> bool:
    """Whether it was asked for here; more may have been asked for by another parameter."""
    return entry.rank is None or entry.rank <= num_top


def _finite(logprob: float) -> float:
    """A log-probability that JSON can hold; what is no number counts as the lowest."""
    return max(logprob, _LOWEST_LOGPROB) if math.isfinite(logprob) else _LOWEST_LOGPROB


def _name(token_id: int, text: str | None, as_ids: bool) -> str:
    return f"token_id:{token_id}" if text is None or as_ids else text
