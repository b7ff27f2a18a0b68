"""The memory plan: what the budget is spent on, and whether a model fits."""

import dataclasses
from functools import partial

from moejax.arena.format import DTYPES
from moejax.arena.geometry import Geometry
from moejax.config import LayerKind, Mlp, ModelConfig
from moejax.errors import CapacityError
from moejax.models.paged import KEY_TILE, QUERY_TILE
from moejax.models.step import HEAD_TILE, Bucket
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
    num_blocks: int
    """kv_blocks that fit."""
    block_size: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind; they add up to the budget, but for what is too little for a block."""
        kinds = ("dense", "experts", "kv", "workspace", "tables", "staging")
        return {kind: getattr(self, kind) for kind in kinds}

    def lines(self) -> list[str]:
        """The plan in words, for the log."""
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in self.kinds.items())
        return [
            f"memory budget {human(self.budget)}: {parts}",
            f"KV cache: {self.kv_tokens} tokens in {self.num_blocks} blocks of {self.block_size}",
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
    config: ModelConfig, geometry: Geometry, bucket: Bucket, blocks_per_row: int
) -> int:
    """A bound on the temporaries of a step's program on the plain path.

    One expert's weights, gathered and decoded; a layer's dense weights; a tile of keys of each row;
    activations; scores; logits. Tests and the start of an engine compare it with the compiler.
    """
    itemsize = DTYPES[geometry.dtype].itemsize
    tokens, rows = bucket.layout.tokens, bucket.layout.rows
    expert = sum(geometry.dense_pages) * geometry.page_bytes
    blocks = min(max(1, KEY_TILE // geometry.block_size), blocks_per_row)
    keys = blocks * geometry.block_size
    row_kv = blocks * geometry.page_bytes
    heads = max(kind.attention.num_heads for kind in config.layers)
    head_width = max(kind.attention.num_heads * kind.attention.head_size for kind in config.layers)
    # Rows of one query attend all at once, those of several in tiles, one after the other.
    decode_rows = rows - bucket.prefill_rows
    queries = max(decode_rows, min(QUERY_TILE, bucket.max_query) if bucket.prefill_rows else 0)
    cache, scores = max(decode_rows, 1) * row_kv, 4 * queries * heads * keys
    widths = [config.moe.expert_width]
    for kind in config.layers:
        part = kind.feed_forward
        widths += [part.width] if isinstance(part, Mlp) else []
        widths += [part.shared.width] if not isinstance(part, Mlp) and part.shared else []
    slots = tokens * config.moe.router.experts_per_token + min(64, tokens)
    activations = itemsize * (
        tokens * (6 * config.hidden_size + 6 * head_width + 4 * max(widths))
        + 3 * slots * config.hidden_size
    )
    places = rows + (min(HEAD_TILE, tokens) if bucket.prefill_rows else 0)
    logits = 4 * places * config.vocab_size
    dense = itemsize * max(map(partial(_layer_weights, config), config.layers))
    kv = 2 * (cache + row_kv)
    return 3 * expert + dense + kv + 4 * scores + 2 * activations + 6 * logits + (1 << 20)


def _layer_weights(config: ModelConfig, kind: LayerKind) -> int:
    """Dense weights of a layer; on a CPU, XLA takes them out of the stack of all layers."""
    attention, part = kind.attention, kind.feed_forward
    count = 2 * attention.head_size * (attention.num_heads + attention.num_kv_heads)
    if isinstance(part, Mlp):
        count += 3 * part.width
    elif part.shared is not None:
        count += 3 * part.shared.width
    return count * config.hidden_size


def sampling_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of the tables of penalties and biases: a mark per row and token, and the biases."""
    return 4 * rows * config.vocab_size + 8 * rows * MAX_LOGIT_BIAS


def largest_matrix_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the largest dense matrix: XLA copies operands when it tries out GPU kernels."""
    rows = [config.vocab_size]
    for kind in config.layers:
        rows.append(kind.attention.num_heads * kind.attention.head_size)
        part = kind.feed_forward
        if isinstance(part, Mlp):
            rows.append(part.width)
        elif part.shared is not None:
            rows.append(part.shared.width)
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
    blocks_per_row: int,
    least_blocks: int = 1,
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
        blocks_per_row: kv_blocks of the longest sequence.
        least_blocks: kv_blocks that must fit.

    Raises:
        CapacityError: the model does not fit; with the numbers.
    """
    experts = geometry.expert_pages * geometry.page_bytes
    if device_bytes is not None:
        workspace += LIBRARY_WORKSPACE + largest_matrix_bytes(config, geometry.dtype)
    linears = geometry.num_moe_layers * geometry.num_experts
    tables = 4 * (linears * (sum(geometry.dense_pages) + 2) + rows * (blocks_per_row + 1))
    tables += sampling_bytes(config, rows)
    fixed = dense + workspace + STAGING_BYTES + tables
    if budget is None:
        budget = (
            fixed + experts + DEFAULT_CPU_ROOM
            if device_bytes is None
            else int(device_bytes * DEFAULT_GPU_SHARE)
        )
    block_pages = geometry.block_pages * geometry.page_bytes
    block_entries = 4 * geometry.num_layers
    # Page 0 and kv_block 0 are poison.
    poison = geometry.page_bytes + block_entries
    room = budget - fixed - experts - poison
    least = least_blocks * (block_pages + block_entries)
    if room < least:
        needed = budget - room + least
        length = "one KV block" if blocks_per_row == 1 else "max_model_len"
        num_tokens = blocks_per_row * geometry.block_size
        raise CapacityError(
            f"{config.family} in {geometry.dtype} needs at least {human(needed)} ({needed} "
            f"bytes) for {rows} sequences (max_num_seqs) of {num_tokens} tokens "
            f"({length}): experts {human(experts)}, dense weights {human(dense)}, workspace "
            f"{human(workspace)}, tables {human(tables)}, staging {human(STAGING_BYTES)}, KV of "
            f"{least_blocks * geometry.block_size} tokens {human(least)}; "
            f"the memory budget is {human(budget)}"
        )
    num_blocks = room // (block_pages + block_entries)
    return MemoryPlan(
        budget=budget,
        dense=dense,
        experts=experts,
        kv=num_blocks * block_pages,
        workspace=workspace,
        tables=tables + block_entries * (num_blocks + 1),
        staging=STAGING_BYTES,
        num_pages=1 + geometry.expert_pages + num_blocks * geometry.block_pages,
        num_blocks=num_blocks,
        block_size=geometry.block_size,
    )
