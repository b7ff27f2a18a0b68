"""The memory plan: what the budget is spent on, and whether a model fits."""

import dataclasses
import functools
from collections.abc import Sequence

from moejax.arena.format import DTYPES
from moejax.arena.geometry import Geometry, Runs
from moejax.config import DENSE_WIDTH, AnyAttention, LayerKind, Mla, Mlp, MlpAndMoe, ModelConfig
from moejax.errors import CapacityError
from moejax.layers.attention import value_size
from moejax.layers.experts import MAX_TILE
from moejax.models.choice import HEAD_TILE
from moejax.models.paged_attention import KEY_TILE, QUERY_TILE
from moejax.models.step import Bucket
from moejax_serving.sampling_params import MAX_LOGIT_BIAS

# Pages that are written at once while a model is loaded.
STAGING_BYTES = 16 << 20
# On a GPU: scratch memory of matrix libraries, and the padding around the operands of trial runs.
LIBRARY_WORKSPACE = 128 << 20
DEFAULT_CPU_ROOM = 1 << 30
DEFAULT_GPU_SHARE = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by kind; together at most the budget."""

    budget: int
    dense: int
    experts: int
    kv: int
    workspace: int
    tables: int
    staging: int
    num_pages: int
    kv_pages: int
    """Pages that KV may take."""
    block_pages: int
    """Pages of `block_size` tokens."""
    block_size: int
    longest_pages: int
    """Pages of a sequence of `max_model_len` tokens; what leaves a window takes no place."""
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks of `block_size` tokens of all layers that fit."""
        return self.kv_pages // self.block_pages

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, at least: in short sequences, or in the longest."""
        longest = self.kv_pages // self.longest_pages * self.max_model_len
        return max(self.num_blocks * self.block_size, longest)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind; they add up to the budget, but for page 0 and too little for a page."""
        kinds = ("dense", "experts", "kv", "workspace", "tables", "staging")
        return {kind: getattr(self, kind) for kind in kinds}

    def lines(self) -> list[str]:
        """The plan in words, for the log."""
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in self.kinds.items())
        return [
            f"memory budget {human(self.budget)}: {parts}",
            f"KV cache: at least {self.kv_tokens} tokens, in {self.kv_pages} pages; "
            f"max_model_len {self.max_model_len}",
        ]


def human(size: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def workspace_bytes(
    config: ModelConfig, geometry: Geometry, bucket: Bucket, max_model_len: int
) -> int:
    """A bound on the temporaries of a step's program on the plain path.

    One expert's weights, gathered and decoded; a layer's dense weights; a tile of keys of each row;
    activations; scores; logits. Tests and the start of an engine compare it with the compiler.
    """
    itemsize = DTYPES[geometry.dtype].itemsize
    tokens, rows = bucket.layout.tokens, bucket.layout.rows
    linears = sum(_decoding_bytes(runs) for runs in geometry.expert_runs)
    linears += max(
        (_decoding_bytes(geometry.runs_of(t.shape)) for t in geometry.linears), default=0
    )
    # Rows of one query attend all at once, those of several in tiles, one after the other.
    decode_rows = rows - bucket.prefill_rows
    queries = max(decode_rows, min(QUERY_TILE, bucket.max_query) if bucket.prefill_rows else 0)
    attention = 0
    for layer in config.layers:
        kind = geometry.kinds[geometry.kind_of(layer.attention)]
        blocks = min(max(1, KEY_TILE // kind.block_size), kind.blocks_for(max_model_len))
        cache = (max(decode_rows, 1) + 1) * blocks * geometry.page_bytes
        part = layer.attention
        heads, width = part.num_heads, itemsize * tokens * _query_width(part)
        scores = 4 * queries * heads * blocks * kind.block_size
        # Partial results are float32, and exist twice in the loop over keys.
        partial = 2 * 4 * queries * heads * value_size(part)
        attention = max(attention, 2 * cache + 4 * scores + 12 * width + partial)
    widths = [config.moe.expert_width, *map(_mlp_width, config.layers)]
    slots = tokens * config.moe.router.experts_per_token + min(MAX_TILE, tokens)
    activations = itemsize * (
        tokens * (6 * config.hidden_size + 4 * max(widths)) + 3 * slots * config.hidden_size
    )
    places = rows + (min(HEAD_TILE, tokens) if bucket.prefill_rows else 0)
    logits = 4 * places * config.vocab_size
    dense = itemsize * max(map(functools.partial(_layer_weights, config), config.layers))
    return 3 * linears + dense + attention + 2 * activations + 6 * logits + (1 << 20)


def _decoding_bytes(runs: Runs) -> int:
    """A bound on what it takes to gather and decode a linear, a third of it."""
    pages = max(runs.pages_at(width) for width in _widths_of(runs)) * runs.page_bytes
    if runs.quantization is None:
        return pages
    weights = runs.shape.stored_rows * runs.shape.columns
    # Codes and places in the table are 32 bits wide, whatever the dtype of the weights.
    return pages + 8 * weights


def _widths_of(runs: Runs) -> Sequence[int]:
    return (DENSE_WIDTH,) if runs.quantization is None else runs.quantization.widths


def _query_width(part: AnyAttention) -> int:
    """Values of a token's queries, or of what attention gives for them, whatever is more."""
    if isinstance(part, Mla):
        return part.num_heads * (part.latent_size + part.rope_size)
    return part.num_heads * part.head_size


def _mlp_width(kind: LayerKind) -> int:
    """Width of the MLP that every token passes in a layer."""
    part = kind.feed_forward
    if isinstance(part, Mlp):
        return part.width
    dense = part.mlp.width if isinstance(part, MlpAndMoe) else 0
    shared = kind.moe.shared if kind.moe is not None else None
    return max(dense, 0 if shared is None else shared.width)


def _layer_weights(config: ModelConfig, kind: LayerKind) -> int:
    """Dense weights of a layer; on a CPU, XLA takes them out of the stack of all layers."""
    part = kind.attention
    if isinstance(part, Mla):
        q_size = part.num_heads * (part.nope_size + part.rope_size)
        latent = part.q_latent_size
        count = q_size * config.hidden_size
        if latent is not None:
            count = latent * (q_size + config.hidden_size)
        count += part.cached_values * config.hidden_size
        count += part.num_heads * (part.nope_size + part.value_size) * part.latent_size
        count += part.num_heads * part.value_size * config.hidden_size
    else:
        count = 2 * part.head_size * (part.num_heads + part.num_kv_heads) * config.hidden_size
    return count + 3 * _mlp_width(kind) * config.hidden_size


def sampling_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of the tables of penalties and biases: a mark per row and token, and the biases."""
    return 4 * rows * config.vocab_size + 8 * rows * MAX_LOGIT_BIAS


def largest_matrix_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the largest dense matrix: XLA copies operands when it tries out GPU kernels."""
    rows = [config.vocab_size]
    for kind in config.layers:
        rows += [_query_width(kind.attention), _mlp_width(kind)]
    return max(rows) * config.hidden_size * DTYPES[dtype].itemsize


def plan_memory(
    config: ModelConfig,
    geometry: Geometry,
    *,
    budget: int | None,
    device_bytes: int | None,
    dense: int,
    workspace: int,
    rows: int,
    max_model_len: int,
    max_query: int,
    weight_pages: int,
) -> MemoryPlan:
    """Divides a budget.

    Args:
        config: the model.
        geometry: how it is cut into pages.
        budget: bytes for everything; None: the default.
        device_bytes: the memory of the accelerator, None on a CPU.
        dense: bytes of the dense weights.
        workspace: bytes of the temporaries of the largest program.
        rows: sequences that run at the same time.
        max_model_len: tokens of the longest sequence, whose KV must fit.
        max_query: most tokens of a sequence in one step.
        weight_pages: pages of the experts and other linears at their widths.

    Raises:
        CapacityError: the model does not fit; with the numbers.
    """
    experts = weight_pages * geometry.page_bytes
    if device_bytes is not None:
        workspace += LIBRARY_WORKSPACE + largest_matrix_bytes(config, geometry.dtype)
    slots = sum(runs.num_slots for runs in geometry.expert_runs) + 2
    entries = geometry.num_moe_layers * geometry.num_experts * slots
    entries += geometry.num_linears * (geometry.linear_slots + 1)
    row_entries = 1 + sum(kind.blocks_for(max_model_len) for kind in geometry.kinds)
    tables = 4 * (entries + rows * row_entries)
    tables += sampling_bytes(config, rows)
    fixed = dense + workspace + STAGING_BYTES + tables
    if budget is None:
        budget = (
            fixed + experts + DEFAULT_CPU_ROOM
            if device_bytes is None
            else int(device_bytes * DEFAULT_GPU_SHARE)
        )
    # The pages of a kv_block stand in a table; any kind may take all pages of the cache.
    page_bytes = geometry.page_bytes + 4 * len(geometry.kinds)
    # Page 0 is poison, and so is kv_block 0 of each kind.
    poison = geometry.page_bytes + 4 * geometry.num_layers
    room = budget - fixed - experts - poison
    least = geometry.most_pages(max_model_len, max_query) * page_bytes
    if room < least:
        needed = budget - room + least
        raise CapacityError(
            f"{config.family} in {geometry.dtype} needs at least {human(needed)} ({needed} "
            f"bytes) for {rows} sequences (max_num_seqs) of {max_model_len} tokens "
            f"(max_model_len): experts {human(experts)}, dense weights {human(dense)}, workspace "
            f"{human(workspace)}, tables {human(tables)}, staging {human(STAGING_BYTES)}, KV of "
            f"{max_model_len} tokens {human(least)}; "
            f"the memory budget is {human(budget)}"
        )
    kv_pages = room // page_bytes
    return MemoryPlan(
        budget=budget,
        dense=dense,
        experts=experts,
        kv=kv_pages * geometry.page_bytes,
        workspace=workspace,
        tables=tables + 4 * (geometry.num_layers + len(geometry.kinds) * kv_pages),
        staging=STAGING_BYTES,
        num_pages=1 + weight_pages + kv_pages,
        kv_pages=kv_pages,
        block_pages=geometry.block_pages,
        block_size=geometry.block_size,
        longest_pages=geometry.most_pages(max_model_len, max_query),
        max_model_len=max_model_len,
    )


def most_blocks(geometry: Geometry, kv_pages: int) -> list[int]:
    """kv_blocks of each kind if it took all pages of the cache; the poison block included."""
    return [1 + kv_pages // kind.pages_per_block for kind in geometry.kinds]
