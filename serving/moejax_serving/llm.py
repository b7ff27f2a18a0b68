"""The Python API: `LLM(model).generate(prompts, SamplingParams(...))`."""

import dataclasses
import itertools
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tqdm import tqdm

from moejax.errors import ConfigError, RequestError
from moejax_serving.chat_template import RESERVED, flatten_messages
from moejax_serving.config import EngineConfig
from moejax_serving.load import load_engine
from moejax_serving.outputs import RequestOutput
from moejax_serving.sampling_params import (
    SamplingParams,
    read_token_ids,
    refuse_unless_neutral,
    show,
)
from moejax_serving.shield import Shield
from moejax_serving.sizes import parse_size, parse_width
from moejax_serving.tokenizer import Tokenizer

Message = Mapping[str, Any]


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt = str | TokensPrompt

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "forced_token_ids")

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "tokenization_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "lora_request": (),
}
"""What vLLM's `LLM.chat` takes and this one does not, with the values that ask for nothing."""


class LLM:
    """A model that is ready to generate.

    Threads may share it: it runs one call at a time, and the others wait. Prompts that come in one
    call run together.

    Args:
        model: a moejax folder or a Hugging Face folder; None: the small model of the package.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16".
        memory_budget: device memory for everything, in bytes or as "10GB", "512MiB".
        skip_tokenizer_init: take and give token ids only.
        options: further fields of `EngineConfig`, such as max_model_len, max_num_seqs, seed;
            expert_bits ("auto", a width, or the path of a file of widths), linear_bits ("auto" or
            a width), planner ("off", "dynamic", or "static" with expert_memory, as memory_budget).

    Raises:
        MoejaxError: with one line that says what is wrong with the model, a setting or the memory.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        dtype: Any = "auto",
        memory_budget: Any = None,
        skip_tokenizer_init: Any = False,
        **options: Any,
    ) -> None:
        if not isinstance(model, str | os.PathLike | None):
            raise ConfigError(f"model must be the path of a folder, got {show(model)}")
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        if unknown := sorted(options.keys() - names):
            raise ConfigError(f"{unknown[0]} is no setting; these are: {', '.join(names)}")
        options["memory_budget"] = memory_budget
        for name in ("memory_budget", "expert_memory"):
            if isinstance(options.get(name), str):
                options[name] = parse_size(options[name])
        for name in ("expert_bits", "linear_bits"):
            if isinstance(value := options.get(name), str):
                options[name] = parse_width(value)
        if isinstance(options.get("expert_bits"), os.PathLike):
            options["expert_bits"] = os.fspath(options["expert_bits"])
        config = EngineConfig(
            dtype=dtype,
            skip_tokenizer_init=skip_tokenizer_init,
            **options,
        )
        self.engine = load_engine(None if model is None else pathlib.Path(model), config)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # the engine is for one thread at a time
        self._shield = Shield()

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
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all together.

        Args:
            prompts: a `Prompt`, that is a text or `{"prompt_token_ids": [...]}`, or a list of them.
            sampling_params: `SamplingParams` for all prompts, or one for each; None: the
                checkpoint's own.
            use_tqdm: show progress, on a terminal.

        Returns:
            One result per prompt, in their order.

        Raises:
            RequestError, CapacityError: a prompt or parameter is wrong; nothing has run.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        listed = _read_list("prompts", prompts, "a text, {'prompt_token_ids': [...]}")
        params = self._read_params(sampling_params, len(listed))
        read = [self._read_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(listed)]
        with self._lock:
            return self._run(read, params, use_tqdm)

    def chat(
        self,
        /,
        messages: Any,
        sampling_params: Any = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Any = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's chat template.

        Args:
            messages: a list of `Message`, such as `[{"role": "user", "content": "Hello"}]`, or a
                list of such lists. Content is a text or a list of text parts.
            sampling_params: as in `generate`.
            add_generation_prompt: end the prompt where the assistant begins.
            chat_template_kwargs: what else the template can read, as vLLM takes it.
            use_tqdm: show progress, on a terminal.
            template_options: the same, as arguments.

        Raises:
            RequestError, CapacityError: a message or parameter is wrong; nothing has run.
        """
        variables = _read_variables(chat_template_kwargs, template_options)
        listed = _read_list("messages", messages, "a list of messages")
        single = any(isinstance(entry, Mapping) for entry in listed)
        conversations = [listed] if single else listed
        tokenizer = self.get_tokenizer()
        prompts = []
        for i, conversation in enumerate(conversations):
            text = tokenizer.render_chat(
                flatten_messages(conversation, "messages" if single else f"messages[{i}]"),
                variables,
                add_generation_prompt=add_generation_prompt,
            )
            ids = tokenizer.encode_prompt(text, self.engine.max_model_len, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _read_params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        listed = _read_list("sampling_params", given, "SamplingParams")
        for i, params in enumerate(listed):
            if not isinstance(params, SamplingParams):
                raise RequestError(
                    f"sampling_params[{i}] must be SamplingParams, got {show(params)}",
                    param="sampling_params",
                )
        if len(listed) != count:
            raise RequestError(
                f"{count} prompts, but {len(listed)} sampling parameters", param="sampling_params"
            )
        return listed

    def _read_prompt(self, prompt: Any, name: str) -> "_ReadPrompt":
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping) or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise RequestError(
                f"{name} must be a text or {{'prompt_token_ids': [...]}}, got {show(prompt)}",
                param="prompt",
            )
        for key in prompt:
            if key not in _PROMPT_KEYS:
                raise RequestError(
                    f"{name} has {show(key)}, which is not supported: it may have "
                    + ", ".join(_PROMPT_KEYS),
                    param=str(key),
                )
        text = prompt.get("prompt")
        if not isinstance(text, str | None):
            raise RequestError(f"{name}: prompt must be a text, got {show(text)}", param="prompt")
        if "prompt_token_ids" in prompt:
            ids = read_token_ids("prompt_token_ids", prompt["prompt_token_ids"])
        elif text is None:
            raise RequestError(f"{name}: prompt must be a text, got None", param="prompt")
        else:
            ids = self.get_tokenizer().encode_prompt(text, self.engine.max_model_len)
        forced = read_token_ids("forced_token_ids", prompt.get("forced_token_ids", ()))
        return _ReadPrompt(text, ids, forced)

    def _run(
        self, prompts: Sequence["_ReadPrompt"], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        ids = [str(next(self._numbers)) for _ in prompts]

        def add() -> None:
            for request_id, prompt, one in zip(ids, prompts, params, strict=True):
                self.engine.add_request(
                    request_id, prompt.ids, one, prompt.text, forced_token_ids=prompt.forced
                )

        try:
            self._shield(add)
            with tqdm(total=len(ids), desc="requests", disable=None if use_tqdm else True) as bar:
                while self.engine.has_unfinished():
                    for output in self._shield(self.engine.step):
                        outputs[output.request_id] = output
                        bar.update()
        finally:
            self._shield(self.engine.close)
        return [outputs[request_id] for request_id in ids]


@dataclasses.dataclass(frozen=True, slots=True)
class _ReadPrompt:
    text: str | None
    ids: list[int]
    forced: list[int]


def _read_list(name: str, given: Any, entry: str) -> list[Any]:
    """Lists, tuples and arrays as a list; whatever else is given is refused."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise RequestError(f"{name} must be {entry} or a list of it, got {show(given)}", param=name)
    return list(listed)


def _read_variables(kwargs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template can read beside the messages; refuses what it would not see."""
    if not isinstance(kwargs, Mapping | None):
        raise RequestError(
            f"chat_template_kwargs must be a mapping of names to values, got {show(kwargs)}",
            param="chat_template_kwargs",
        )
    variables = dict(kwargs or {})
    for name, value in options.items():
        if name in _REFUSED:
            refuse_unless_neutral(name, value, _REFUSED)
        elif name in RESERVED:
            raise RequestError(f"{name}={show(value)} is not supported: leave it out", param=name)
        elif name in _SAMPLING:
            raise RequestError(f"{name} is set in SamplingParams({name}=...)", param=name)
        else:
            variables[name] = value
    return variables
