"""The only part of the server that runs programs on devices."""

import dataclasses
import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.arena.control import Control, pack
from moejax.arena.format import POISON_WORD
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState
from moejax.config import ModelConfig
from moejax.models.decoder import Params
from moejax.models.step import COMPILER_OPTIONS, Bucket, StepOutput, step
from moejax_serving.loader import store_pages

_POISON_CHUNK = 64

logger = logging.getLogger(__name__)


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
    ) -> None:
        """`workspace`: bytes that the memory plan keeps for a program's temporaries."""
        self._config = config
        self._geometry = geometry
        self._params = params
        self._state = state
        self._workspace = workspace
        self._programs: dict[Bucket, Any] = {}

    def run(self, control: Control, bucket: Bucket) -> StepOutput:
        """Runs a step and waits for it. The result is on the host."""
        array = jnp.asarray(pack(control, bucket.layout))
        self._state, output = self.program(bucket)(self._params, self._state, array)
        found: StepOutput = jax.device_get(output)
        return found

    def program(self, bucket: Bucket) -> Any:
        """The program of a bucket, compiled at its first use."""
        if bucket not in self._programs:
            self._programs[bucket] = compile_step(
                self._config, self._geometry, bucket, self._params, self._state
            )
            if (used := self.temp_bytes(bucket)) > self._workspace:
                logger.warning(
                    "a step of %d tokens needs %d bytes of workspace, the memory plan keeps %d",
                    bucket.layout.tokens,
                    used,
                    self._workspace,
                )
        return self._programs[bucket]

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


def compile_step(
    config: ModelConfig, geometry: Geometry, bucket: Bucket, params: Params, state: ArenaState
) -> Any:
    """A compiled step: (params, state, control array) → (state, output). The state is donated."""
    program = jax.jit(
        partial(step, config=config, geometry=geometry, bucket=bucket),
        donate_argnums=1,
        compiler_options=COMPILER_OPTIONS,
    )
    array = jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)
    return program.lower(params, state, array).compile()
