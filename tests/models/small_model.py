"""Small models with random weights, and an arena that runs them step by step.

On a GPU by its kernels: the same tests then say that these give what a whole pass gives.
"""

import copy
import dataclasses
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.small_configs import ALL_LAYERS, LENGTH, VOCAB, make_config
from moejax.adjust import row_parts, start_row
from moejax.arena import format
from moejax.arena.control import Control, KvEdits, KvLayout, Layout, RowControl, pack, unpack
from moejax.arena.geometry import Geometry, make_geometry
from moejax.arena.state import ArenaState, apply_edits
from moejax.arena.widths import uniform
from moejax.config import DENSE_WIDTH, ModelConfig
from moejax.layers.experts import Stacked
from moejax.models import whole
from moejax.models.batch import make_batch
from moejax.models.choice import (
    RowTables,
    StepOutput,
    choose_any_way,
    target_logprobs,
)
from moejax.models.decoder import Params, abstract_params, bind
from moejax.models.paged import make_memory
from moejax.models.step import Bucket, compiler_options, step
from moejax.pallas.dispatch import REFERENCE, Kernels, find_kernels

# Pages hold 8 tokens of 96 bytes, or an atom.
PAGE_BYTES = 1024
TABLE_ROWS = 6
BIASES = 4
# These programs are small and run a few times: compiling takes longer than running them.
QUICK = {"xla_backend_optimization_level": 0}


class Model(NamedTuple):
    """A configuration and its weights."""

    config: ModelConfig
    geometry: Geometry
    params: Params
    stacked: dict[int, Stacked]

    @property
    def dtype(self) -> str:
        return self.geometry.dtype


@cache
def make_model(name: str = ALL_LAYERS, dtype: str = "float32") -> Model:
    """Normal weights that keep the size of what passes."""
    config = make_config(name)
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)

    params = jax.tree.map(
        lambda leaf: normal(leaf.shape, leaf.dtype), abstract_params(config, dtype)
    )
    experts, width = config.moe.router.num_experts, config.moe.expert_width
    stacked = {
        layer: Stacked(
            normal((experts, 2, width, config.hidden_size), dtype),
            normal((experts, config.hidden_size, width), dtype),
        )
        for layer in config.moe_layers
    }
    return Model(config, make_geometry(config, dtype, PAGE_BYTES), params, stacked)


# The whole forward pass.


@partial(jax.jit, static_argnames=("config", "dtype", "max_length"), compiler_options=QUICK)
def _forward(
    params: Params,
    stacked: Any,
    tokens: jax.Array,
    config: ModelConfig,
    dtype: str,
    max_length: int | None,
) -> jax.Array:
    return whole.forward(params, stacked, tokens, config=config, dtype=dtype, max_length=max_length)


def whole_logprobs(model: Model, tokens: list[int], *, max_length: int | None = None) -> np.ndarray:
    """[tokens, vocab]: the log-probabilities of what comes after each token, in float64."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _forward(
        model.params, model.stacked, jnp.asarray(padded), model.config, model.dtype, max_length
    )
    return log_softmax(logits[0, : len(tokens)])


def log_softmax(logits: Any) -> np.ndarray:
    """In float64."""
    x = np.asarray(logits, np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# Steps over an arena.


def _layout(name: str, *, tokens: int, rows: int) -> Layout:
    """Of steps in which all rows may begin blocks, and one all of its blocks."""
    kinds = tuple(
        KvLayout(
            layers=kind.pages_per_block,
            blocks=rows + (tokens - rows) // kind.block_size,
            row_edits=rows + (tokens - rows) // kind.block_size,
        )
        for kind in make_model(name).geometry.kinds
    )
    return Layout(tokens=tokens, rows=rows, expert_edits=0, kinds=kinds)


def prefill_bucket(name: str = ALL_LAYERS) -> Bucket:
    layout = _layout(name, tokens=LENGTH, rows=3)
    return Bucket(layout=layout, prefill_rows=3, max_query=LENGTH)


def decode_bucket(name: str = ALL_LAYERS) -> Bucket:
    return Bucket(layout=_layout(name, tokens=4, rows=4), prefill_rows=0, max_query=1)


def mixed_bucket(name: str = ALL_LAYERS) -> Bucket:
    """Two prompts, and four rows of one token."""
    layout = _layout(name, tokens=LENGTH + 4, rows=6)
    return Bucket(layout=layout, prefill_rows=2, max_query=LENGTH)


PREFILL, DECODE, MIXED = prefill_bucket(), decode_bucket(), mixed_bucket()


@cache
def program(bucket: Bucket, name: str, dtype: str) -> Any:
    """A jitted step; the state is donated, as the engine does."""
    model, kernels = make_model(name, dtype), find_kernels(dtype)
    return jax.jit(
        partial(
            step,
            config=model.config,
            geometry=model.geometry,
            bucket=bucket,
            kernels=kernels,
        ),
        donate_argnums=1,
        compiler_options=compiler_options(bucket, kernels) | QUICK,
    )


_choose = jax.jit(choose_any_way, compiler_options=QUICK)
_target_logprobs = jax.jit(
    target_logprobs, static_argnames=("config", "dtype"), compiler_options=QUICK
)


def forward(
    params: Params,
    state: ArenaState,
    last_tokens: jax.Array,
    array: jax.Array,
    *,
    config: ModelConfig,
    geometry: Geometry,
    bucket: Bucket,
    kernels: Kernels = REFERENCE,
) -> tuple[ArenaState, jax.Array]:
    """A step without its sampling, which takes half of the time to compile: all tokens' logits."""
    control = unpack(array, bucket.layout)
    state = apply_edits(state, control)
    batch = make_batch(control, last_tokens)
    decoder = bind(config, geometry.dtype, params)
    memory = make_memory(
        config, geometry, state, batch, bucket.prefill_rows, bucket.max_query, kernels
    )
    hidden, pages = decoder(batch.tokens, memory)
    return dataclasses.replace(state, pages=pages[None]), decoder.logits(hidden)


def jit_forward(model: Model, bucket: Bucket) -> Any:
    return jax.jit(
        partial(
            forward,
            config=model.config,
            geometry=model.geometry,
            bucket=bucket,
            kernels=find_kernels(model.dtype),
        ),
        donate_argnums=1,
        compiler_options=QUICK,
    )


class Arena:
    """Poison, with the model's experts in it; gives blocks to rows as their tokens come.

    Pages and kv_blocks are handed out in a random order of the seed. Blocks that no later token of
    a row sees are taken back, and their pages are poison again; the tables still name them. With
    `reuses` they are the next that are handed out.
    """

    def __init__(
        self,
        name: str = ALL_LAYERS,
        dtype: str = "float32",
        *,
        seed: int = 0,
        reuses: bool = False,
    ) -> None:
        self.name, self.reuses = name, reuses
        self.model = self._make_model(name, dtype)
        geometry = self.model.geometry
        max_blocks = [1 + TABLE_ROWS * kind.blocks_for(LENGTH) for kind in geometry.kinds]
        num_pages = 1 + self._weight_pages()
        for kind, blocks in zip(geometry.kinds, max_blocks, strict=True):
            num_pages += (blocks - 1) * kind.pages_per_block
        rng = np.random.default_rng(seed)
        self._free_pages = (1 + rng.permutation(num_pages - 1)).tolist()
        self._free_blocks = [(1 + rng.permutation(n - 1)).tolist() for n in max_blocks]
        # Kind → row → index in its table → (kv_block, *pages).
        self.held: list[dict[int, dict[int, tuple[int, ...]]]] = [{} for _ in max_blocks]
        self.num_given_back = 0
        pages = np.full((1, num_pages, geometry.page_words), format.POISON_WORD, np.uint32)
        tables = self._store_weights(pages[0])
        self.state = ArenaState(
            pages=jnp.asarray(pages),
            **{name: jnp.asarray(table[None]) for name, table in tables.items()},
            block_pages=tuple(
                jnp.zeros((1, kind.pages_per_block, blocks), jnp.int32)
                for kind, blocks in zip(geometry.kinds, max_blocks, strict=True)
            ),
            block_tables=tuple(
                jnp.zeros((1, TABLE_ROWS, kind.blocks_for(LENGTH)), jnp.int32)
                for kind in geometry.kinds
            ),
        )
        self.rows = RowTables(
            last_tokens=jnp.zeros(TABLE_ROWS, jnp.int32),
            marks=jnp.zeros((TABLE_ROWS, VOCAB), jnp.int32),
            bias_tokens=jnp.full((TABLE_ROWS, BIASES), VOCAB, jnp.int32),
            bias_values=jnp.zeros((TABLE_ROWS, BIASES), jnp.float32),
        )

    def _make_model(self, name: str, dtype: str) -> Model:
        return make_model(name, dtype)

    def _weight_pages(self) -> int:
        geometry = self.model.geometry
        return uniform(geometry, DENSE_WIDTH).pages(geometry)

    def _store_weights(self, pages: np.ndarray) -> dict[str, np.ndarray]:
        """Writes the experts into pages; the tables that find them."""
        geometry = self.model.geometry
        tables = [
            np.zeros((geometry.num_moe_layers, geometry.num_experts, runs.num_slots), np.int32)
            for runs in geometry.expert_runs
        ]
        for layer, experts in enumerate(self.model.stacked.values()):
            for e in range(geometry.num_experts):
                gate, up = np.asarray(experts.gate_up[e])
                matrices = format.stack_halves(gate, up), np.asarray(experts.down[e])
                for table, matrix in zip(tables, matrices, strict=True):
                    run = format.to_pages(format.encode_dense(matrix), geometry.page_words)
                    ids = [self._free_pages.pop() for _ in run]
                    pages[ids], table[layer, e] = run, ids
        gate_up, down = tables
        return {
            "gate_up_pages": gate_up,
            "down_pages": down,
            "widths": np.full((*gate_up.shape[:2], 2), DENSE_WIDTH, np.int32),
            "linear_pages": np.zeros((0, 0), np.int32),
            "linear_widths": np.zeros(0, np.int32),
        }

    def control(self, rows: list[RowControl]) -> Control:
        """What the step is told, with the blocks that these tokens begin."""
        edits = [KvEdits([], []) for _ in self.held]
        for row in rows:
            for number, kind in enumerate(self.model.geometry.kinds):
                held = self.held[number].setdefault(row.row, {})
                if row.tokens:
                    self._give_back(number, row.row, kind.first_block(row.cached))
                for index in range(
                    kind.first_block(row.cached), kind.blocks_for(row.cached + len(row.tokens))
                ):
                    if index in held:
                        continue
                    block = self._free_blocks[number].pop()
                    pages = [self._free_pages.pop() for _ in kind.layers]
                    held[index] = (block, *pages)
                    edits[number].blocks.append(held[index])
                    edits[number].rows.append((row.row, index, block))
        return Control(rows, edits, want_logprobs=True)

    def _give_back(self, number: int, row: int, first: int) -> None:
        """Takes the blocks of a row before its block `first`."""
        held = self.held[number][row]
        left = [held.pop(index) for index in sorted(held) if index < first]
        if not left:
            return
        pages = np.array(self.state.pages)
        for block, *ids in left:
            pages[0, ids] = format.POISON_WORD
            at = len(self._free_pages) if self.reuses else 0
            self._free_pages[at:at] = ids
            at = len(self._free_blocks[number]) if self.reuses else 0
            self._free_blocks[number].insert(at, block)
        self.state = dataclasses.replace(self.state, pages=jnp.asarray(pages))
        self.num_given_back += len(left)

    def run(self, rows: list[RowControl], bucket: Bucket) -> StepOutput:
        return self.run_array(pack(self.control(rows), bucket.layout), bucket)

    def run_array(self, array: np.ndarray, bucket: Bucket) -> StepOutput:
        run = program(bucket, self.name, self.model.dtype)
        model, rows = self.model, self.rows
        self.state, given, hidden = run(
            model.params, self.state, rows.last_tokens, jnp.asarray(array)
        )
        last_tokens, marks, output = _choose(
            rows.last_tokens, rows.marks, rows.bias_tokens, rows.bias_values, given
        )
        self.rows = dataclasses.replace(rows, last_tokens=last_tokens, marks=marks)
        if hidden is not None:
            targets = unpack(jnp.asarray(array), bucket.layout)["targets"]
            found = _target_logprobs(
                model.params, hidden, targets, config=model.config, dtype=model.dtype
            )
            output = output._replace(targets=found)
        on_host: StepOutput = jax.device_get(output)
        return on_host

    def mark(self, row: int, **lists: Any) -> None:
        """Tells the tables of penalties and biases of a row that begins."""
        given = {"prompt": [], "output": [], "stops": [], "biases": []} | lists
        for part in row_parts(row, vocab=VOCAB, num_biases=BIASES, **given):
            tables = (self.rows.marks, self.rows.bias_tokens, self.rows.bias_values)
            marks, bias_tokens, bias_values = start_row(*tables, jax.tree.map(jnp.asarray, part))
            self.rows = dataclasses.replace(
                self.rows, marks=marks, bias_tokens=bias_tokens, bias_values=bias_values
            )

    def copy(self) -> "Arena":
        """Another one with the same pages and tables."""
        other = copy.copy(self)
        for name in ("_free_pages", "_free_blocks", "held"):
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        other.state, other.rows = jax.tree.map(jnp.copy, (self.state, self.rows))
        return other


def row_of(row: int, tokens: list[int], cached: int = 0, **fields: Any) -> RowControl:
    """Tokens of a row; unless said otherwise, the last one is sampled greedily."""
    return RowControl(**{"row": row, "tokens": tokens, "cached": cached, "sample": True} | fields)


def distribution(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Lists of the likeliest tokens, of all there are, in the order of the vocabulary."""
    found = np.full((*ids.shape[:-1], VOCAB), np.nan)
    np.put_along_axis(found, ids.astype(np.int64), logprobs, axis=-1)
    return found


def state_arrays(state: ArenaState) -> dict[str, np.ndarray]:
    """All arrays by name; of tables of several kinds of KV, `name.0` and so on."""
    found = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, tuple):
            found |= {f"{field.name}.{i}": np.array(part) for i, part in enumerate(value)}
        elif value is not None:
            found[field.name] = np.array(value)
    return found
