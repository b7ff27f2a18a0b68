"""Random models of small layers of three kinds, and an arena that runs them step by step."""

import dataclasses
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.adjust import row_parts, start_row
from moejax.arena import format
from moejax.arena.control import Control, Layout, RowControl, pack
from moejax.arena.geometry import Geometry, make_geometry
from moejax.arena.state import ArenaState
from moejax.config import (
    Attention,
    LayerKind,
    Mlp,
    ModelConfig,
    Moe,
    Rope,
    Router,
    SharedExpert,
    segments_of,
)
from moejax.layers.experts import Stacked
from moejax.models import whole
from moejax.models.decoder import Params, abstract_params
from moejax.models.step import COMPILER_OPTIONS, Bucket, StepOutput, step

# As many as a list of log-probabilities holds: a step's output shows the whole distribution.
VOCAB = 20
HIDDEN, EXPERTS, WIDTH = 24, 5, 9
# Pages hold 8 tokens of 96 bytes, or an atom.
PAGE_BYTES = 1024
LENGTH = 80
TABLE_ROWS = 6
BIASES = 4
# A dense segment, then one of period two.
ALL_LAYERS = "abcbc"


def make_config(layers: str) -> ModelConfig:
    """A model of these layers: a is dense, b and c have experts; all attend in other ways."""

    def attention(**options: Any) -> Attention:
        shape = {"num_heads": 4, "head_size": 6, "scale": 0.4}
        return Attention(**shape, rope=Rope(theta=100.0), **options)

    def moe(k: int, *, renormalize: bool, shared: SharedExpert | None) -> Moe:
        router = Router(
            num_experts=EXPERTS,
            experts_per_token=k,
            renormalize=renormalize,
            float32_weights=renormalize,
        )
        return Moe(router=router, expert_width=WIDTH, shared=shared)

    a = LayerKind(
        attention=attention(num_kv_heads=2, qkv_bias=True, output_bias=True, window=5),
        feed_forward=Mlp(width=14),
    )
    b = LayerKind(
        attention=attention(num_kv_heads=1, qk_norm="head"),
        feed_forward=moe(2, renormalize=True, shared=SharedExpert(width=10, gated=True)),
    )
    c = LayerKind(
        attention=attention(num_kv_heads=2, qk_norm="projection", qkv_clip=2.0, window=11),
        feed_forward=moe(3, renormalize=False, shared=None),
    )
    return ModelConfig(
        family="small",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_position_embeddings=LENGTH,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        dtype="float32",
        segments=segments_of([{"a": a, "b": b, "c": c}[letter] for letter in layers]),
    )


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
def make_model(layers: str = ALL_LAYERS, dtype: str = "float32") -> Model:
    """Normal weights that keep the size of what passes."""
    config = make_config(layers)
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)

    params = jax.tree.map(lambda leaf: normal(leaf.shape), abstract_params(config, dtype))
    stacked = {
        layer: Stacked(normal((EXPERTS, 2, WIDTH, HIDDEN)), normal((EXPERTS, HIDDEN, WIDTH)))
        for layer in config.moe_layers
    }
    return Model(config, make_geometry(config, dtype, PAGE_BYTES), params, stacked)


# The whole forward pass.


@partial(jax.jit, static_argnames=("config", "dtype"))
def _forward(params: Params, stacked: Any, tokens: jax.Array, config: Any, dtype: str) -> jax.Array:
    return whole.forward(params, stacked, tokens, config=config, dtype=dtype)


def whole_logprobs(model: Model, tokens: list[int]) -> np.ndarray:
    """[tokens, vocab]: the log-probabilities of what comes after each token, in float64."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _forward(model.params, model.stacked, jnp.asarray(padded), model.config, model.dtype)
    x = np.asarray(logits[0, : len(tokens)], np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# Steps over an arena.


def prefill_bucket(layers: str = ALL_LAYERS) -> Bucket:
    layout = Layout(
        tokens=LENGTH, rows=3, blocks=13, row_edits=13, expert_edits=0, layers=len(layers)
    )
    return Bucket(layout=layout, prefill_rows=3, max_query=LENGTH)


def decode_bucket(layers: str = ALL_LAYERS) -> Bucket:
    layout = Layout(tokens=4, rows=4, blocks=4, row_edits=4, expert_edits=0, layers=len(layers))
    return Bucket(layout=layout, prefill_rows=0, max_query=1)


def mixed_bucket(layers: str = ALL_LAYERS) -> Bucket:
    """Two prompts, and four rows of one token."""
    layout = Layout(
        tokens=LENGTH + 4, rows=6, blocks=17, row_edits=17, expert_edits=0, layers=len(layers)
    )
    return Bucket(layout=layout, prefill_rows=2, max_query=LENGTH)


PREFILL, DECODE, MIXED = prefill_bucket(), decode_bucket(), mixed_bucket()


@cache
def program(bucket: Bucket, layers: str, dtype: str) -> Any:
    """A jitted step; the state is donated, as the engine does."""
    model = make_model(layers, dtype)
    return jax.jit(
        partial(step, config=model.config, geometry=model.geometry, bucket=bucket),
        donate_argnums=1,
        compiler_options=COMPILER_OPTIONS,
    )


class Arena:
    """Poison, with the model's experts in it; gives blocks to rows as their tokens come.

    Pages and kv_blocks are handed out in a random order of the seed.
    """

    def __init__(self, layers: str = ALL_LAYERS, dtype: str = "float32", *, seed: int = 0) -> None:
        self.layers = layers
        self.model = make_model(layers, dtype)
        geometry = self.model.geometry
        self.block_size = geometry.block_size
        max_blocks = 1 + TABLE_ROWS * (LENGTH // self.block_size)
        num_pages = 1 + geometry.expert_pages + (max_blocks - 1) * geometry.num_layers
        rng = np.random.default_rng(seed)
        self._free_pages = (1 + rng.permutation(num_pages - 1)).tolist()
        self._free_blocks = (1 + rng.permutation(max_blocks - 1)).tolist()
        self._held: dict[int, int] = {}
        pages = np.full((1, num_pages, geometry.page_words), format.POISON_WORD, np.uint32)
        gate_up, down = self._store_experts(pages[0])
        self.state = ArenaState(
            pages=jnp.asarray(pages),
            gate_up_pages=jnp.asarray(gate_up[None]),
            down_pages=jnp.asarray(down[None]),
            widths=jnp.full((1, *gate_up.shape[:2], 2), format.DENSE_WIDTH, jnp.int32),
            block_pages=jnp.zeros((1, geometry.num_layers, max_blocks), jnp.int32),
            block_tables=jnp.zeros((1, TABLE_ROWS, LENGTH // self.block_size), jnp.int32),
            last_tokens=jnp.zeros(TABLE_ROWS, jnp.int32),
            marks=jnp.zeros((TABLE_ROWS, VOCAB), jnp.int32),
            bias_tokens=jnp.full((TABLE_ROWS, BIASES), VOCAB, jnp.int32),
            bias_values=jnp.zeros((TABLE_ROWS, BIASES), jnp.float32),
        )

    def _store_experts(self, pages: np.ndarray) -> list[np.ndarray]:
        geometry = self.model.geometry
        tables = [
            np.zeros((geometry.num_moe_layers, EXPERTS, slots), np.int32)
            for slots in geometry.dense_pages
        ]
        for layer, experts in enumerate(self.model.stacked.values()):
            for e in range(EXPERTS):
                gate, up = np.asarray(experts.gate_up[e])
                matrices = format.stack_halves(gate, up), np.asarray(experts.down[e])
                for table, matrix in zip(tables, matrices, strict=True):
                    run = format.to_pages(format.encode_dense(matrix), geometry.page_words)
                    ids = [self._free_pages.pop() for _ in run]
                    pages[ids], table[layer, e] = run, ids
        return tables

    def control(self, rows: list[RowControl]) -> Control:
        """What the step is told, with the blocks that these tokens begin."""
        block_edits, row_edits = [], []
        for row in rows:
            while self._held.get(row.row, 0) * self.block_size < row.cached + len(row.tokens):
                block = self._free_blocks.pop()
                pages = [self._free_pages.pop() for _ in self.model.config.layers]
                block_edits.append((block, *pages))
                row_edits.append((row.row, self._held.get(row.row, 0), block))
                self._held[row.row] = self._held.get(row.row, 0) + 1
        return Control(rows, block_edits, row_edits, want_logprobs=True)

    def run(self, rows: list[RowControl], bucket: Bucket) -> StepOutput:
        return self.run_array(pack(self.control(rows), bucket.layout), bucket)

    def run_array(self, array: np.ndarray, bucket: Bucket) -> StepOutput:
        run = program(bucket, self.layers, self.model.dtype)
        self.state, output = run(self.model.params, self.state, jnp.asarray(array))
        found: StepOutput = jax.device_get(output)
        return found

    def mark(self, row: int, **lists: Any) -> None:
        """Tells the tables of penalties and biases of a row that begins."""
        given = {"prompt": [], "output": [], "stops": [], "biases": []} | lists
        for part in row_parts(row, vocab=VOCAB, num_biases=BIASES, **given):
            tables = (self.state.marks, self.state.bias_tokens, self.state.bias_values)
            marks, bias_tokens, bias_values = start_row(*tables, jax.tree.map(jnp.asarray, part))
            self.state = dataclasses.replace(
                self.state, marks=marks, bias_tokens=bias_tokens, bias_values=bias_values
            )

    def copy(self) -> "Arena":
        """Another one with the same pages and tables."""
        other = Arena.__new__(Arena)
        other.__dict__ = {
            name: value.copy() if isinstance(value, (list, dict)) else value
            for name, value in self.__dict__.items()
        }
        other.state = jax.tree.map(jnp.copy, self.state)
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
    return {
        field.name: np.array(getattr(state, field.name))
        for field in dataclasses.fields(state)
        if getattr(state, field.name) is not None
    }
