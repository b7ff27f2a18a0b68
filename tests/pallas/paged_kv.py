"""Keys and values of rows in pages, and what their queries attend to in float64."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from moejax.arena.format import DTYPES, POISON_WORD
from moejax.config import AnyAttention, Attention, Mla, Rope
from moejax.pallas.attention import Plan, make_plan
from moejax.pallas.attention_tiling import Tiling, choose_tilings


def gqa(heads: int, kv_heads: int, size: int, **options: Any) -> Attention:
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        scale=size**-0.5,
        rope=None,
        **options,
    )


def mla(heads: int, latent: int = 512, rope: int = 64) -> Mla:
    return Mla(
        num_heads=heads,
        q_latent_size=None,
        latent_size=latent,
        nope_size=128,
        rope_size=rope,
        value_size=128,
        scale=(128 + rope) ** -0.5,
        rope=Rope(theta=10000.0),
        latent_norm_epsilon=1e-6,
    )


class Case(NamedTuple):
    """A layer and the rows of a step."""

    part: AnyAttention
    prefill: tuple[tuple[int, int], ...] = ((37, 0), (1, 63), (0, 9), (70, 130))
    """Tokens and cached tokens of the rows that may have several."""
    decode: tuple[tuple[int, int], ...] = ((1, 0), (1, 300), (0, 5), (1, 63), (1, 64))
    """Of those that have one at most."""
    dtype: str = "bfloat16"
    pad_tokens: int = 5
    page_bytes: int = 16384
    longest: int = 1024
    """Tokens that the tables have room for."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The arrays of a case."""

    case: Case
    q: np.ndarray
    sinks: np.ndarray | None
    pages: np.ndarray
    block_pages: np.ndarray
    block_tables: np.ndarray
    block_size: int
    rows: dict[str, np.ndarray]
    """table_rows, starts, lengths and cached"""
    kv: list[np.ndarray]
    """Of each row, in float64: what its tokens cache."""

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """Of attend_paged."""
        layer = np.int32(1)
        return self.q, self.pages, self.block_pages, self.block_tables, layer, self.sinks

    def tilings(self, **changes: Any) -> tuple[Tiling, Tiling]:
        """The chosen ones with changes to that of single queries."""
        case = self.case
        decode, ragged = choose_tilings(
            case.part,
            case.dtype,
            rows=len(case.decode),
            longest=case.longest,
            max_query=len(self.q),
        )
        return dataclasses.replace(decode, **changes), ragged

    def plan(self, tilings: tuple[Tiling, Tiling], rows: dict[str, Any] | None = None) -> Plan:
        return make_plan(
            **{k: jnp.asarray(v) for k, v in self.rows.items()} if rows is None else rows,
            tokens=len(self.q),
            prefill_rows=len(self.case.prefill),
            tilings=tilings,
        )


def make_step(case: Case, seed: int = 0) -> Step:
    """Random queries, keys and values. All that no query sees is NaN, pages and places alike."""
    rng = np.random.default_rng(seed)
    part, dtype = case.part, DTYPES[case.dtype]
    per_word = 4 // dtype.itemsize
    token_words = part.cached_values // per_word
    block_size = case.page_bytes // 4 // token_words
    block_size = block_size // 8 * 8 if block_size >= 8 else block_size
    rows = (*case.prefill, *case.decode)
    blocks = -(-case.longest // block_size)
    table_rows = rng.permutation(len(rows) + 3)[: len(rows)].astype(np.int32)
    lengths, cached = (np.array(n, np.int32) for n in zip(*rows, strict=True))
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    tokens = int(lengths.sum()) + case.pad_tokens

    num_blocks = 4 + sum(-(-(n + c) // block_size) for n, c in rows)
    num_pages = num_blocks + 7
    pages = np.full((num_pages, case.page_bytes // 4), POISON_WORD, np.uint32)
    block_pages = (1 + rng.permutation(num_pages - 1)[:num_blocks]).astype(np.int32)
    block_pages[0] = 0
    # The last block belongs to nobody.
    free = (1 + rng.permutation(num_blocks - 2)).tolist()
    block_tables = np.where(rng.random((len(rows) + 3, blocks)) < 0.5, num_blocks - 1, 0)
    kv = []
    for (length, before), row in zip(rows, table_rows, strict=True):
        values = rng.standard_normal((length + before, part.cached_values)).astype(dtype)
        kv.append(values.astype(np.float64))
        if length == 0:
            continue
        oldest = max(0, int(part.reach.oldest(before)))
        for token in range(oldest, length + before):
            block, place = divmod(token, block_size)
            if token == oldest or place == 0:
                block_tables[row, block] = free.pop()
            page = pages[block_pages[block_tables[row, block]]]
            page[place * token_words :][:token_words] = values[token].view(np.uint32)
    size = part.cached_values if isinstance(part, Mla) else part.head_size
    sinks = None
    if isinstance(part, Attention) and part.sinks:
        sinks = rng.standard_normal(part.num_heads).astype(dtype)
    return Step(
        case=case,
        q=rng.standard_normal((tokens, part.num_heads, size)).astype(dtype),
        sinks=sinks,
        pages=pages,
        block_pages=np.stack([np.zeros_like(block_pages), block_pages]),
        block_tables=block_tables.astype(np.int32),
        block_size=block_size,
        rows={"table_rows": table_rows, "starts": starts, "lengths": lengths, "cached": cached},
        kv=kv,
    )


def expected(step: Step) -> np.ndarray:
    """Query by query, in float64; zeros for tokens of no row."""
    part = step.case.part
    if isinstance(part, Mla):
        heads, size, value_size = 1, part.cached_values, part.latent_size
    else:
        heads, size, value_size = part.num_kv_heads, part.head_size, part.head_size
    found = np.zeros((len(step.q), part.num_heads, value_size))
    for row, kv in enumerate(step.kv):
        k = kv[:, : heads * size].reshape(-1, heads, size)
        v = k[..., :value_size]
        if not isinstance(part, Mla):
            v = kv[:, heads * size :].reshape(-1, heads, size)
        start, length, cached = (int(step.rows[n][row]) for n in ("starts", "lengths", "cached"))
        for i in range(length):
            first, end = max(0, int(part.reach.oldest(cached + i))), cached + i + 1
            q = step.q[start + i].astype(np.float64).reshape(heads, -1, size)
            scores = np.einsum("hgd,khd->hgk", q, k[first:end]) * part.scale
            if step.sinks is not None:
                sinks = step.sinks.astype(np.float64).reshape(heads, -1, 1)
                scores = np.concatenate([scores, sinks], axis=2)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            o = np.einsum("hgk,khd->hgd", weights[..., : end - first], v[first:end])
            found[start + i] = o.reshape(part.num_heads, -1)
    return found


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of norms; NaN where anything found is."""
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / (norm or 1))
