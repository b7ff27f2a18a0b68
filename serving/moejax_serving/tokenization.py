"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's routes for a client's own counts."""

from typing import Any

from moejax.errors import RequestError
from moejax_serving.async_engine import AsyncEngine
from moejax_serving.chat import read_messages
from moejax_serving.generation import require_tokenizer
from moejax_serving.protocol import DetokenizeBody, TokenizeBody
from moejax_serving.tokenizer import Tokenizer

MAX_CHARACTERS = 2**22
"""Of a text whose tokens are asked for: they take a second or two, and a gigabyte."""

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenize(engine: AsyncEngine, body: TokenizeBody) -> dict[str, Any]:
    """The tokens of a text or of a conversation.

    Raises:
        RequestError: the body holds neither or both, or the server has no tokenizer.
    """
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("either prompt or messages is needed, and not both", param="prompt")
    if body.messages is not None:
        tokenizer = require_tokenizer(engine, "messages")
        ids = list(read_messages(engine, body.messages, body).token_ids)
    else:
        assert body.prompt is not None
        if len(body.prompt) > MAX_CHARACTERS:
            raise RequestError(
                f"the prompt has {len(body.prompt)} characters, and may have {MAX_CHARACTERS}",
                param="prompt",
            )
        tokenizer = require_tokenizer(engine, "prompt")
        ids = _encode(tokenizer, body.prompt, body.add_special_tokens is not False)
    texts = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": engine.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }


def detokenize(engine: AsyncEngine, body: DetokenizeBody) -> dict[str, Any]:
    """The text of tokens, special ones included.

    Raises:
        RequestError: an id is not in the vocabulary, or the server has no tokenizer.
    """
    tokenizer = require_tokenizer(engine, "tokens")
    for token_id in set(body.tokens):
        is_listed = token_id < tokenizer.vocab_size  # ids may have gaps: then more are in use
        if not is_listed and not tokenizer.decode([token_id], skip_special_tokens=False):
            raise RequestError(f"token id {token_id} is not in the vocabulary", param="tokens")
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def tokenizer_info(engine: AsyncEngine) -> dict[str, Any]:
    """What tokenizer_config.json says of special tokens and of the chat template.

    Raises:
        RequestError: the server has no tokenizer.
    """
    tokenizer = require_tokenizer(engine, "model")
    info: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": engine.max_model_len,
        **dict.fromkeys(_NAMED_TOKENS),
        **tokenizer.special_tokens,
    }
    template = tokenizer.chat_template
    if template is not None and (source := template.default_source) is not None:
        info["chat_template"] = source
    return info


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Whatever its length: texts that no prompt could hold may be counted."""
    try:
        return tokenizer.encode(text, add_special_tokens)
    except RequestError as error:
        raise RequestError(str(error), param="prompt") from error
