"""From a step's arrays of log-probabilities to what a request is given of them."""

from typing import Any

from moejax.sampling import Logprobs
from moejax_serving.outputs import Logprob
from moejax_serving.tokenizer import Tokenizer


def make_entry(
    found: Logprobs, at: int, token: int, wanted: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """One position's entry: first the token's own, then those of the likeliest `wanted`.

    Args:
        found: arrays of the host.
        at: the place in them.
        token: the token in question.
        wanted: how many of the likeliest are listed.
        tokenizer: says how a token reads; None: no text.
    """

    def one(logprob: Any, rank: Any, token: int) -> Logprob:
        text = None if tokenizer is None else tokenizer.token_text(token)
        return Logprob(logprob=float(logprob), rank=int(rank), decoded_token=text)

    entry = {token: one(found.logprob[at], found.rank[at], token)}
    for place in range(min(wanted, found.top_ids.shape[1])):
        other = int(found.top_ids[at, place])
        if other not in entry:
            entry[other] = one(found.top_logprobs[at, place], place + 1, other)
    return entry
