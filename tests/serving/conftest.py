"""A tokenizer of bytes and an engine that repeats a set reply, for tests without a model."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from moejax_serving.outputs import CompletionOutput, Logprob, RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Tokenizer files: a token for each byte, and <|end|>, which ends a sequence."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_folder: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_folder)


class FakeEngine:
    """Gives every request one token of `reply` per step, then the end.

    `fail_in_step` is raised by `step`; `fail_in_add` by `add_request`. Requests stay unfinished
    while `is_stuck` is set.
    """

    def __init__(self, tokenizer: Tokenizer | None, reply: Sequence[int] = (40, 41, 42)) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = 64
        self.model_name = "fake"
        self.default_sampling: dict[str, float | int] = {}
        self.reply = list(reply)
        self.finish_reason: str | None = None
        self.fail_in_step: BaseException | None = None
        self.fail_in_add: BaseException | None = None
        self.is_stuck = False
        self.num_cached_tokens: int | None = None
        self.added: list[tuple[list[int], SamplingParams, str | None]] = []
        self.aborted: list[str] = []
        self.most_at_once = 0
        self._running: dict[str, tuple[list[int], SamplingParams, list[int], bool]] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        stream: bool = False,
    ) -> None:
        if self.fail_in_add is not None:
            raise self.fail_in_add
        self.added.append((list(prompt_token_ids), params, prompt))
        self._running[request_id] = (list(prompt_token_ids), params, [], stream)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        del self._running[request_id]

    def close(self) -> None:
        self._running.clear()

    def has_unfinished(self) -> bool:
        return bool(self._running) and not self.is_stuck

    def step(self) -> list[RequestOutput]:
        if self.fail_in_step is not None:
            raise self.fail_in_step
        self.most_at_once = max(self.most_at_once, len(self._running))
        outputs = []
        for request_id, (prompt_ids, params, made, stream) in list(self._running.items()):
            made.append(self.reply[len(made)])
            is_end = len(made) == len(self.reply)
            is_finished = is_end or len(made) == params.max_tokens
            if is_finished:
                del self._running[request_id]
            if is_finished or stream:
                reason = ("stop" if is_end else "length") if is_finished else None
                first = len(made) - 1 if stream else 0
                outputs.append(self._output(request_id, prompt_ids, params, made, first, reason))
        return outputs

    def _output(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        made: list[int],
        first: int,
        reason: Any,
    ) -> RequestOutput:
        """What was made from token `first` on, the same for each of n choices."""
        ids, logprobs, prompt_logprobs = made[first:], None, None
        if params.logprobs is not None:
            logprobs = [self._logprobs(token_id, params.logprobs) for token_id in ids]
        if params.prompt_logprobs is not None and (first == 0):
            wanted = params.prompt_logprobs
            prompt_logprobs = [None, *(self._logprobs(i, wanted) for i in prompt_ids[1:])]
        choices = [
            CompletionOutput(
                index=index,
                text="" if self.tokenizer is None else self.tokenizer.decode(ids),
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=(self.finish_reason or reason) if reason else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id,
            None,
            prompt_ids,
            prompt_logprobs,
            choices,
            finished=reason is not None,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _logprobs(self, token_id: int, count: int) -> dict[int, Logprob]:
        """The chosen token is the third likeliest; the first is impossible to beat."""
        ranked = [(0, 70, -0.5), (1, 71, -1.0), (2, token_id, -2.0), (3, 73, float("-inf"))]
        return {
            other: Logprob(logprob, rank + 1, self._text(other))
            for rank, other, logprob in [ranked[2], *ranked]
            if rank < count or other == token_id
        }

    def _text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)


@pytest.fixture
def fake_engine(byte_tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(byte_tokenizer, byte_tokenizer.encode("Hello") + [256])
