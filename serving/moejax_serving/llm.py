"""The Python API: `LLM(model).generate(prompts, SamplingParams(...))`."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tqdm import tqdm

from moejax.errors import RequestError
from moejax_serving.config import EngineConfig
from moejax_serving.load import load_engine
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.sizes import parse_size
from moejax_serving.tokenizer import Tokenizer

Message = Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt = str | TokensPrompt


class LLM:
    """A model that is ready to generate.

    Args:
        model: a moejax folder or a Hugging Face folder; None: the small model of the package.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16".
        memory_budget: device memory for everything, in bytes or as "10GB", "512MiB".
        skip_tokenizer_init: take and give token ids only.
        options: further fields of `EngineConfig`, such as max_model_len, max_num_seqs, seed.

    Raises:
        MoejaxError: with one line that says what is wrong with the model, a setting or the memory.
    """

    def __init__(
        self,
        model: str | pathlib.Path | None = None,
        *,
        dtype: str = "auto",
        memory_budget: int | str | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        budget = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
        config = EngineConfig(
            dtype=dtype,
            memory_budget=budget,
            skip_tokenizer_init=skip_tokenizer_init,
            **options,
        )
        self.engine = load_engine(model, config)
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if there is none."""
        if self.engine.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own sampling settings."""
        return SamplingParams(**self.engine.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all together.

        Args:
            prompts: a text, `{"prompt_token_ids": [...]}`, or a list of them.
            sampling_params: for all prompts, or one for each; None: the checkpoint's own.
            use_tqdm: show progress, on a terminal.

        Returns:
            One result per prompt, in their order.

        Raises:
            RequestError, CapacityError: a prompt or parameter is wrong; nothing has run.
        """
        single = isinstance(prompts, (str, Mapping))
        listed: list[Any] = [prompts] if single else list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise RequestError(f"{len(listed)} prompts, but {len(params)} sampling parameters")
        ids: list[str] = []
        try:
            for prompt, one in zip(listed, params, strict=True):
                ids.append(self._add(prompt, one))
            return self._run(ids, use_tqdm)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_options,
            )
            ids = tokenizer.encode(str(text), add_special_tokens=False)
            prompts.append({"prompt": str(text), "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _add(self, prompt: Any, params: SamplingParams) -> str:
        request_id = str(next(self._numbers))
        if isinstance(prompt, str):
            text, ids = prompt, self.get_tokenizer().encode(prompt)
            self.engine.add_request(request_id, ids, params, text)
            return request_id
        if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise RequestError(
                f"a prompt is a text or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}",
                param="prompt",
            )
        self.engine.add_request(
            request_id,
            prompt["prompt_token_ids"],
            params,
            prompt.get("prompt"),
            forced_token_ids=prompt.get("forced_token_ids", ()),
        )
        return request_id

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), desc="requests", disable=None if use_tqdm else True) as bar:
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    bar.update()
        return [outputs[request_id] for request_id in ids]
