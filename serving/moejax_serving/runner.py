"""The only part of the server that runs programs on devices."""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from moejax.adjust import row_parts, start_row
from moejax.arena.control import Control, pack
from moejax.arena.format import POISON_WORD
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState
from moejax.config import ModelConfig
from moejax.models.decoder import Params
from moejax.models.step import Bucket, StepOutput, compiler_options, step
from moejax.pallas.dispatch import Kernels
from moejax_serving.loader import store_pages

_POISON_CHUNK = 64

logger = logging.getLogger(__name__)


class Flight:
    """A step that the device has been given; its results are on their way to the host."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def wait(self) -> StepOutput:
        """The results as NumPy arrays, once the step has run."""
        found: StepOutput = jax.device_get(self._output)
        return found


class Runner:
    """Holds weights and arena, and one program per bucket."""

    def __init__(
        self,
        config: ModelConfig,
        geometry: Geometry,
        params: Params,
        state: ArenaState,
        *,
        workspace: int,
        kernels: Kernels,
    ) -> None:
        """`workspace`: bytes that the memory plan keeps for a program's temporaries."""
        self._config = config
        self._geometry = geometry
        self._params = params
        self._state = state
        self._workspace = workspace
        self._kernels = kernels
        self._programs: dict[Bucket, Any] = {}

    def start(
        self, control: Control, bucket: Bucket, *, with_logprobs: bool, with_targets: bool
    ) -> Flight:
        """Gives the device a step, behind those that it has. What is not wanted stays there."""
        # As a NumPy array: it is on the device sooner as an argument than as an array of its own.
        array = pack(control, bucket.layout)
        self._state, output = self.program(bucket)(self._params, self._state, array)
        return Flight(
            output._replace(
                logprobs=output.logprobs if with_logprobs else None,
                targets=output.targets if with_targets else None,
            )
        )

    def mark_row(
        self,
        row: int,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        stops: Sequence[int],
        biases: Sequence[tuple[int, float]],
    ) -> None:
        """Tells the tables of penalties and biases of a sequence that starts in a row."""
        state = self._state
        for part in row_parts(
            row,
            vocab=self._config.vocab_size,
            num_biases=state.bias_tokens.shape[1],
            prompt=prompt,
            output=output,
            stops=stops,
            biases=biases,
        ):
            marks, tokens, values = _start_row(
                state.marks, state.bias_tokens, state.bias_values, part
            )
            state = dataclasses.replace(state, marks=marks, bias_tokens=tokens, bias_values=values)
        self._state = state

    def program(self, bucket: Bucket) -> Any:
        """The program of a bucket, compiled at its first use."""
        if bucket not in self._programs:
            self._programs[bucket] = compile_step(
                self._config, self._geometry, bucket, self._kernels, self._params, self._state
            )
            if (used := self.temp_bytes(bucket)) > self._workspace:
                logger.warning(
                    "a step of %d tokens needs %d bytes of workspace, the memory plan keeps %d",
                    bucket.layout.tokens,
                    used,
                    self._workspace,
                )
        return self._programs[bucket]

    def warm_up(self, buckets: Sequence[Bucket], *, with_poison: bool, progress: bool) -> None:
        """Compiles everything that serving needs, and runs each program once with nothing to do."""
        bar = tqdm(buckets, "programs", disable=None if progress else True)
        for bucket in bar:
            self.start(Control(()), bucket, with_logprobs=True, with_targets=True).wait()
        self.mark_row(0, prompt=(), output=(), stops=(), biases=())
        if with_poison:
            self.poison([self._state.pages.shape[1]])
        jax.block_until_ready(self._state)

    def temp_bytes(self, bucket: Bucket) -> int:
        """Bytes of temporaries of a bucket's program, as the compiler says."""
        memory = self.program(bucket).memory_analysis()
        return 0 if memory is None else int(memory.temp_size_in_bytes)

    def poison(self, pages: list[int]) -> None:
        """Makes pages unreadable: for tests."""
        words = np.full((_POISON_CHUNK, self._geometry.page_words), POISON_WORD, np.uint32)
        for at in range(0, len(pages), _POISON_CHUNK):
            ids = np.full(_POISON_CHUNK, self._state.pages.shape[1], np.int32)
            part = pages[at : at + _POISON_CHUNK]
            ids[: len(part)] = part
            self._state = dataclasses.replace(
                self._state, pages=store_pages(self._state.pages, ids, words)
            )


_start_row = jax.jit(start_row, donate_argnums=(0, 1, 2))


def compile_step(
    config: ModelConfig,
    geometry: Geometry,
    bucket: Bucket,
    kernels: Kernels,
    params: Params,
    state: ArenaState,
) -> Any:
    """A compiled step: (params, state, control array) → (state, output). The state is donated."""
    program = jax.jit(
        partial(step, config=config, geometry=geometry, bucket=bucket, kernels=kernels),
        donate_argnums=1,
        compiler_options=compiler_options(bucket, kernels),
    )
    array = jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)
    return program.lower(params, state, array).compile()
