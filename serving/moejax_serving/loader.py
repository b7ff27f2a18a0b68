"""Brings a checkpoint onto the device: dense weights as arrays, experts into pages of the arena."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32
from tqdm import tqdm

from moejax.arena.format import DTYPES, POISON_WORD, decode_dense, encode_dense, to_pages
from moejax.arena.geometry import Geometry, Runs
from moejax.arena.state import ArenaState, write_pages
from moejax.arena.widths import Widths
from moejax.checkpoint import Checkpoint
from moejax.checkpoint.layout import LINEARS
from moejax.errors import CheckpointError
from moejax.models.choice import RowTables
from moejax.models.decoder import Params, abstract_params, flatten_params, nest_params
from moejax_serving.memory import STAGING_BYTES
from moejax_serving.pages import Owner, PagePool
from moejax_serving.sampling_params import MAX_LOGIT_BIAS


def load_params(checkpoint: Checkpoint, dtype: str, *, progress: bool) -> Params:
    """The dense weights on the device, in the engine's dtype; without those stored as codes."""
    wanted = flatten_params(abstract_params(checkpoint.config, dtype))
    coded = set(checkpoint.linear_names())
    have = set(checkpoint.dense_names())
    if have | coded != set(wanted):
        missing, extra = (
            sorted(set(wanted) - have - coded),
            sorted((have | coded) - set(wanted)),
        )
        raise CheckpointError(
            f"{checkpoint.folder}: dense tensors missing: {missing[:3]}, unknown: {extra[:3]}"
        )
    named = {}
    for name in coded:
        if checkpoint.linear_shape(name) != wanted[name].shape:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is {checkpoint.linear_shape(name)}, "
                f"the model needs {wanted[name].shape}"
            )
        del wanted[name]
    for name, shape in tqdm(wanted.items(), "dense weights", disable=_quiet(progress)):
        array = checkpoint.read_dense(name, shape.dtype.name)
        if array.shape != shape.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is {array.shape}, the model needs {shape.shape}"
            )
        named[name] = array
    return nest_params(named)


def empty_state(
    geometry: Geometry,
    *,
    num_pages: int,
    rows: int,
    max_model_len: int,
    max_blocks: Sequence[int],
) -> ArenaState:
    """An arena of poison, and tables that point nowhere."""
    layers, experts = geometry.num_moe_layers, geometry.num_experts
    gate_up, down = geometry.expert_runs
    return ArenaState(
        pages=jnp.full((1, num_pages, geometry.page_words), POISON_WORD, jnp.uint32),
        gate_up_pages=jnp.zeros((1, layers, experts, gate_up.num_slots), jnp.int32),
        down_pages=jnp.zeros((1, layers, experts, down.num_slots), jnp.int32),
        widths=jnp.zeros((1, layers, experts, 2), jnp.int32),
        linear_pages=jnp.zeros((1, geometry.num_linears, geometry.linear_slots), jnp.int32),
        linear_widths=jnp.zeros((1, geometry.num_linears), jnp.int32),
        block_pages=tuple(
            jnp.zeros((1, len(kind.layers), blocks), jnp.int32)
            for kind, blocks in zip(geometry.kinds, max_blocks, strict=True)
        ),
        block_tables=tuple(
            jnp.zeros((1, rows, kind.blocks_for(max_model_len)), jnp.int32)
            for kind in geometry.kinds
        ),
    )


def empty_rows(rows: int, vocab_size: int) -> RowTables:
    """Tables of rows that nothing is known of."""
    return RowTables(
        last_tokens=jnp.zeros(rows, jnp.int32),
        marks=jnp.zeros((rows, vocab_size), jnp.int32),
        bias_tokens=jnp.full((rows, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
    )


@partial(jax.jit, donate_argnums=0)
def store_pages(pages: Any, ids: Any, values: Any) -> Any:
    """Replaces pages of the one-device arena [1, pages, words], which is donated."""
    return write_pages(pages[0], ids, values)[None]


def load_linears(
    checkpoint: Checkpoint,
    geometry: Geometry,
    widths: Widths,
    state: ArenaState,
    pool: PagePool,
    *,
    progress: bool,
) -> ArenaState:
    """Writes experts and other linears into pages of the pool, and fills the tables."""
    experts = [
        np.zeros((geometry.num_moe_layers, geometry.num_experts, runs.num_slots), np.int32)
        for runs in geometry.expert_runs
    ]
    others = np.zeros((geometry.num_linears, geometry.linear_slots), np.int32)
    writer = _PageWriter(state.pages, geometry.page_words)
    bar = tqdm(total=widths.pages(geometry) * geometry.page_bytes, desc="experts", unit="B",
               unit_scale=True, disable=_quiet(progress))  # fmt: skip
    for runs, slots, read in _linears(checkpoint, geometry, widths, experts, others):
        for name, run in read.items():
            values = to_pages(run, geometry.page_words)
            ids = pool.take(len(values), Owner.WEIGHTS)
            if ids is None:
                raise AssertionError("the memory plan has too few pages for the experts")
            first = runs.first_slot(name)
            slots[first : first + len(ids)] = ids
            writer.put(ids, values)
            bar.update(values.nbytes)
    bar.close()
    gate_up, down = (jnp.asarray(table[None]) for table in experts)
    return dataclasses.replace(
        state,
        pages=writer.finish(),
        gate_up_pages=gate_up,
        down_pages=down,
        widths=jnp.asarray(widths.experts[None]),
        linear_pages=jnp.asarray(others[None]),
        linear_widths=jnp.asarray(widths.linears[None]),
    )


def _linears(
    checkpoint: Checkpoint,
    geometry: Geometry,
    widths: Widths,
    experts: Sequence[np.ndarray],
    others: np.ndarray,
) -> Iterator[tuple[Runs, np.ndarray, dict[str, np.ndarray]]]:
    """Of every linear: its runs, its slots, and what is resident of it, in the engine's dtype."""
    source = checkpoint.config.dtype
    for number, layer in enumerate(checkpoint.config.moe_layers):
        files = checkpoint.expert_runs(layer)
        for expert in range(geometry.num_experts):
            for which, (linear, runs) in enumerate(zip(LINEARS, geometry.expert_runs, strict=True)):
                names = runs.resident(int(widths.experts[number, expert, which]))
                checkpoint.verify_expert(layer, expert, [f"{linear}.{name}" for name in names])
                read = {name: files[f"{linear}.{name}"][expert] for name in names}
                yield runs, experts[which][number, expert], _as_dtype(read, runs, source)
    for tensor in geometry.linears:
        runs, files = geometry.runs_of(tensor.shape), checkpoint.linear_runs(tensor.name)
        for repeat in range(tensor.repeats):
            number = tensor.first + repeat
            names = runs.resident(int(widths.linears[number]))
            checkpoint.verify_linear(tensor.name, repeat, names)
            read = {name: files[name][repeat] for name in names}
            yield runs, others[number], _as_dtype(read, runs, checkpoint.linear_dtype(tensor.name))


def expert_reader(
    checkpoint: Checkpoint, geometry: Geometry
) -> Callable[[int, str], UInt32[np.ndarray, "pages words"]]:
    """Reads the pages of a run of an expert's linear, which has the number of `WeightTable`.

    A run is checked when it is read for the first time. It raises CheckpointError.
    """
    verified: set[tuple[int, str]] = set()
    layers = list(checkpoint.config.moe_layers)

    def read(linear: int, name: str) -> UInt32[np.ndarray, "pages words"]:
        row, which = divmod(linear, 2)
        number, expert = divmod(row, geometry.num_experts)
        layer, full = layers[number], f"{LINEARS[which]}.{name}"
        if (linear, name) not in verified:
            checkpoint.verify_expert(layer, expert, [full])
            verified.add((linear, name))
        run = checkpoint.expert_runs(layer)[full][expert]
        return to_pages(run, geometry.page_words)

    return read


def _as_dtype(read: dict[str, np.ndarray], runs: Runs, source: str) -> dict[str, np.ndarray]:
    """The same with a dense run in the engine's dtype."""
    if "dense" not in read or source == runs.dtype:
        return read
    shape = runs.shape
    matrix = decode_dense(read["dense"], shape.stored_rows, shape.columns, DTYPES[source])
    return read | {"dense": encode_dense(matrix.astype(DTYPES[runs.dtype]))}


class _PageWriter:
    """Gathers pages and writes many at once, always as many, so that one program serves."""

    def __init__(self, pages: Any, page_words: int) -> None:
        self._pages = pages
        size = max(1, STAGING_BYTES // (page_words * 4))
        self._out_of_range = pages.shape[1]
        self._ids = np.full(size, self._out_of_range, np.int32)
        self._values = np.zeros((size, page_words), np.uint32)
        self._used = 0

    def put(self, ids: list[int], values: np.ndarray) -> None:
        """Pages to be written; `values` may change afterwards."""
        while ids:
            n = min(len(ids), len(self._ids) - self._used)
            at = slice(self._used, self._used + n)
            self._ids[at], self._values[at] = ids[:n], values[:n]
            ids, values = ids[n:], values[n:]
            self._used += n
            if self._used == len(self._ids):
                self._flush()

    def _flush(self) -> None:
        self._pages = store_pages(self._pages, self._ids, self._values)
        # The buffers are used again: the copy to the device must have ended.
        jax.block_until_ready(self._pages)
        self._ids[:] = self._out_of_range
        self._used = 0

    def finish(self) -> Any:
        """The arena after everything has been written."""
        if self._used:
            self._flush()
        return self._pages


def _quiet(progress: bool) -> bool | None:
    """tqdm's `disable`: None shows a bar on a terminal only."""
    return None if progress else True
