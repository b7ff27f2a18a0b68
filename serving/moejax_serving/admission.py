"""What a request must be before the engine takes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moejax.errors import CapacityError, RequestError
from moejax_serving.sampling_params import SamplingParams, show
from moejax_serving.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the engine knows of the model beside its weights."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    """What a request leaves out, from the checkpoint's generation settings."""
    tokenizer: Tokenizer | None
    long_rope_after: int | None = None
    """A sequence of which more tokens may be processed takes the long factors of longrope."""

    def uses_long_rope(self, num_tokens: int) -> bool:
        """Whether a sequence of which so many may be takes them, from its start on."""
        return self.long_rope_after is not None and num_tokens > self.long_rope_after


def check_request(
    model: ServedModel, ids: Sequence[int], params: SamplingParams, forced: Sequence[int]
) -> None:
    """Raises RequestError or CapacityError if a model cannot answer a request.

    Args:
        model: it.
        ids: the prompt.
        params: how to sample.
        forced: tokens to take instead of sampled ones.
    """
    _check_lengths(model, ids, forced)
    named = (
        ("prompt", "token id", [*ids, *forced]),
        ("stop_token_ids", "stop_token_ids:", params.stop_ids),
        ("logit_bias", "logit_bias:", [token for token, _ in params.biases]),
    )
    for param, text, tokens in named:
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise RequestError(
                    f"{text} {show(token)} is not in the vocabulary of {model.vocab_size}",
                    param=param,
                )
    if forced and params.n > 1:
        raise RequestError("forced tokens need n = 1", param="n")
    if params.stop_strings and (model.tokenizer is None or not params.detokenize):
        raise RequestError("stop strings need a tokenizer and detokenize=True", param="stop")


def _check_lengths(model: ServedModel, ids: Sequence[int], forced: Sequence[int]) -> None:
    if not ids:
        raise RequestError("the prompt has no tokens", param="prompt")
    if len(ids) >= model.max_model_len:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens; with one token of output it must fit "
            f"into max_model_len = {model.max_model_len}"
        )
    if len(ids) + len(forced) > model.max_model_len:
        raise CapacityError(
            f"{len(ids)} prompt and {len(forced)} forced tokens do not fit into "
            f"max_model_len = {model.max_model_len}"
        )
