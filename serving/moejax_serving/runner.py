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
from moejax.arena.control import Control, RowControl, pack
from moejax.arena.format import POISON_WORD
from moejax.arena.geometry import Geometry
from moejax.arena.state import ArenaState
from moejax.config import ModelConfig
from moejax.models.choice import (
    RowLogits,
    RowTables,
    StepOutput,
    Way,
    choose_any_way,
    choose_one_way,
    target_logprobs,
    way_of,
)
from moejax.models.decoder import Params
from moejax.models.step import Bucket, compiler_options, step
from moejax.pallas.dispatch import Kernels
from moejax.pallas.pages import commit_pages
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
        rows: RowTables,
        *,
        workspace: int,
        kernels: Kernels,
    ) -> None:
        """`workspace`: bytes that the memory plan keeps for a program's temporaries."""
        self._config = config
        self._geometry = geometry
        self._params = params
        self._state = state
        self._rows = rows
        self._workspace = workspace
        self._kernels = kernels
        self._programs: dict[Bucket, Any] = {}

    def start(self, control: Control, bucket: Bucket, *, with_targets: bool) -> Flight:
        """Gives the device a step, behind those that it has.

        `with_targets`: whether log-probabilities of targets are computed.
        """
        # As a NumPy array: it is on the device sooner as an argument than as an array of its own.
        array = pack(control, bucket.layout)
        run = self.program(bucket)
        self._state, given, hidden = run(self._params, self._state, self._rows.last_tokens, array)
        output = self._choose(given, way_of(control.rows, want_logprobs=control.want_logprobs))
        if not control.want_logprobs:
            output = output._replace(logprobs=None)
        if with_targets:
            first = bucket.layout.offsets["targets"]
            targets = array[first : first + bucket.layout.tokens]
            found = _target_logprobs(
                self._params, hidden, targets, config=self._config, dtype=self._geometry.dtype
            )
            output = output._replace(targets=found)
        return Flight(output)

    def _choose(self, given: RowLogits, way: Way) -> StepOutput:
        rows = self._rows
        output: StepOutput
        if way is not Way.ANY:
            last_tokens, output = _choose_one_way(rows.last_tokens, given, way=way)
            self._rows = dataclasses.replace(rows, last_tokens=last_tokens)
            return output
        last_tokens, marks, output = _choose_any_way(
            rows.last_tokens, rows.marks, rows.bias_tokens, rows.bias_values, given
        )
        self._rows = dataclasses.replace(rows, last_tokens=last_tokens, marks=marks)
        return output

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
        rows = self._rows
        for part in row_parts(
            row,
            vocab=self._config.vocab_size,
            num_biases=rows.bias_tokens.shape[1],
            prompt=prompt,
            output=output,
            stops=stops,
            biases=biases,
        ):
            marks, tokens, values = _start_row(rows.marks, rows.bias_tokens, rows.bias_values, part)
            rows = dataclasses.replace(rows, marks=marks, bias_tokens=tokens, bias_values=values)
        self._rows = rows

    def program(self, bucket: Bucket) -> Any:
        """The program of a bucket, compiled at its first use."""
        if bucket not in self._programs:
            self._programs[bucket] = compile_step(
                self._config,
                self._geometry,
                bucket,
                self._kernels,
                self._params,
                self._state,
                self._rows.last_tokens,
            )
            if (used := self.temp_bytes(bucket)) > self._workspace:
                logger.warning(
                    "a step of %d tokens needs %d bytes of workspace, the memory plan keeps %d",
                    bucket.layout.tokens,
                    used,
                    self._workspace,
                )
        return self._programs[bucket]

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        shipment_pages: int,
        with_poison: bool,
        progress: bool,
    ) -> None:
        """Compiles everything that serving needs, and runs each program once with nothing to do.

        `shipment_pages`: pages that are committed at once; 0: none ever are.
        """
        bar = tqdm(buckets, "programs", disable=None if progress else True)
        for bucket in bar:
            for rows, want_logprobs in _ONE_OF_EACH_WAY:
                control = Control(rows, want_logprobs=want_logprobs)
                with_targets = want_logprobs and bucket.prefill_rows > 0
                self.start(control, bucket, with_targets=with_targets).wait()
        self.mark_row(0, prompt=(), output=(), stops=(), biases=())
        if shipment_pages:
            nothing = np.zeros((shipment_pages, self._geometry.page_words), np.uint32)
            nowhere = np.full(shipment_pages, self._state.pages.shape[1], np.int32)
            self.commit(nowhere, self.send(nothing))
        if with_poison:
            self.poison([self._state.pages.shape[1]])
        jax.block_until_ready((self._state, self._rows))

    def temp_bytes(self, bucket: Bucket) -> int:
        """Bytes of temporaries and results of a bucket's program, as the compiler says."""
        memory = self.program(bucket).memory_analysis()
        if memory is None:
            return 0
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.temp_size_in_bytes + results)

    def send(self, values: np.ndarray) -> jax.Array:
        """Starts a transfer of pages, uint32[n, words], to the device."""
        sent: jax.Array = jax.device_put(values)
        return sent

    def commit(self, ids: np.ndarray, staged: jax.Array) -> None:
        """Copies pages that have arrived into the arena, behind the steps that the device has.

        Ids out of range are left out; of as many pages one program serves all calls.
        """
        pages = _commit(self._state.pages, ids, staged)
        self._state = dataclasses.replace(self._state, pages=pages)

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


@partial(jax.jit, donate_argnums=0)
def _commit(pages: jax.Array, ids: jax.Array, staged: jax.Array) -> jax.Array:
    return commit_pages(pages[0], ids, staged)[None]


_start_row = jax.jit(start_row, donate_argnums=(0, 1, 2))
_choose_one_way = jax.jit(choose_one_way, static_argnames="way", donate_argnums=0)
_choose_any_way = jax.jit(choose_any_way, donate_argnums=(0, 1))
_target_logprobs = jax.jit(target_logprobs, static_argnames=("config", "dtype"))

# Of no tokens: empty rows, of which nothing is remembered.
_EMPTY = RowControl(row=0, tokens=(), cached=0, sample=False)
_ONE_OF_EACH_WAY = (
    ((), True),
    ((), False),
    ((_EMPTY._replace(temperature=1.0),), False),
    ((_EMPTY._replace(temperature=1.0, top_k=1),), False),
)


def compile_step(
    config: ModelConfig,
    geometry: Geometry,
    bucket: Bucket,
    kernels: Kernels,
    params: Params,
    state: ArenaState,
    last_tokens: jax.Array,
) -> Any:
    """A compiled step, the state of which is donated: see `moejax.models.step.step`."""
    program = jax.jit(
        partial(step, config=config, geometry=geometry, bucket=bucket, kernels=kernels),
        donate_argnums=1,
        compiler_options=compiler_options(bucket, kernels),
    )
    array = jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)
    return program.lower(params, state, last_tokens, array).compile()
