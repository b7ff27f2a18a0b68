"""Attention of queries over cached tokens: the plain computation, whole and by parts.

What a token caches is one row of values; `join_kv` makes it and `split_kv` reads keys and values
from it. Multi-head latent attention caches one key for all heads, whose start is the value too
(DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2): grouped-query attention with one KV head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import AnyAttention, Mla, Reach
from moejax.layers.linear import precision_of


class Qkv(NamedTuple):
    """Queries, keys and values of the tokens of a step, rotated to their positions."""

    q: Float[Array, "tokens heads size"]
    k: Float[Array, "tokens kv_heads size"]
    v: Float[Array, "tokens kv_heads size"] | None
    """None: the values are the start of the keys."""
    sinks: Float[Array, " heads"] | None = None
    """A score per head that joins the softmax without a value."""


def join_kv(qkv: Qkv) -> Float[Array, "tokens values"]:
    """What each token caches."""
    parts = (qkv.k,) if qkv.v is None else (qkv.k, qkv.v)
    return jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def split_kv(
    values: Float[Array, "*n values"], part: AnyAttention
) -> tuple[Float[Array, "*n kv_heads size"], Float[Array, "*n kv_heads size2"]]:
    """Keys and values of what tokens have cached."""
    if isinstance(part, Mla):
        k = values[..., None, :]
        return k, k[..., : part.latent_size]
    heads = values.reshape(*values.shape[:-1], 2 * part.num_kv_heads, part.head_size)
    k, v = jnp.split(heads, 2, axis=-2)
    return k, v


def num_kv_heads(part: AnyAttention) -> int:
    """KV heads of what is cached."""
    return 1 if isinstance(part, Mla) else part.num_kv_heads


def value_size(part: AnyAttention) -> int:
    """Size of a cached value, and of what attention gives per head."""
    return part.latent_size if isinstance(part, Mla) else part.head_size


def visible(
    query_positions: Int32[Array, " queries"],
    key_positions: Int32[Array, " keys"],
    reach: Reach,
) -> Bool[Array, "queries keys"]:
    """Which keys a query sees: those up to itself, as far back as it reaches."""
    query, key = query_positions[:, None], key_positions[None, :]
    seen: Bool[Array, "queries keys"] = (key <= query) & (key >= reach.oldest(query))
    return seen


def attend(
    q: Float[Array, "queries heads size"],
    k: Float[Array, "keys kv_heads size"],
    v: Float[Array, "keys kv_heads size2"],
    mask: Bool[Array, "queries keys"],
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "queries heads size2"]:
    """Softmax attention of one sequence. Keys and values that nobody sees may hold anything.

    Scores and softmax are in float32; probabilities are rounded to the dtype of v. A query that
    sees no key gives zeros. `sinks`: a score per head whose share of the softmax is lost.
    """
    queries, heads, size = q.shape
    groups = k.shape[1]
    q = q.reshape(queries, groups, heads // groups, size)
    scores = jnp.einsum(
        "qghd,sgd->ghqs",
        q,
        k,
        precision=precision_of(q),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask[None, None], scores * scale, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    lost = jnp.float32(0.0)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(groups, -1, 1, 1)
        top = jnp.maximum(top, sink)
        lost = jnp.exp(sink - top)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True) + lost
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(v.dtype)
    # Zero times the NaN of a page that nobody owns would still be NaN.
    v = jnp.where(jnp.any(mask, axis=0)[:, None, None], v, jnp.zeros((), v.dtype))
    o = jnp.einsum(
        "ghqs,sgd->qghd",
        weights,
        v,
        precision=precision_of(q),
        preferred_element_type=jnp.float32,
    )
    return o.reshape(queries, heads, -1).astype(q.dtype)


attend_rows = jax.vmap(attend, in_axes=(0, 0, 0, 0, None, None))


class Partial(NamedTuple):
    """Attention of one sequence's queries over a part of the keys."""

    top: Float[Array, "kv_heads group queries"]
    """The largest score so far."""
    total: Float[Array, "kv_heads group queries"]
    """The sum of the weights, relative to `top`."""
    o: Float[Array, "kv_heads group queries size"]
    """The weighted values, in float32."""


def start_partial(
    q: Float[Array, "queries heads size"],
    part: AnyAttention,
    sinks: Float[Array, " heads"] | None = None,
) -> Partial:
    """Attention over no key, or over the sinks alone."""
    queries, heads, _ = q.shape
    groups = num_kv_heads(part)
    shape = (groups, heads // groups, queries)
    o = jnp.zeros((*shape, value_size(part)), jnp.float32)
    if sinks is None:
        return Partial(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), o)
    top = sinks.astype(jnp.float32).reshape(groups, -1, 1)
    return Partial(jnp.broadcast_to(top, shape), jnp.ones(shape, jnp.float32), o)


def add_keys(
    partial: Partial,
    q: Float[Array, "queries heads size"],
    k: Float[Array, "keys kv_heads size"],
    v: Float[Array, "keys kv_heads size2"],
    mask: Bool[Array, "queries keys"],
    scale: float,
) -> Partial:
    """Attention over further keys: the online softmax of Milakov and Gimelshein (2018).

    As `attend`: keys and values that nobody sees may hold anything.
    """
    queries, heads, size = q.shape
    groups = k.shape[1]
    scores = jnp.einsum(
        "qghd,sgd->ghqs",
        q.reshape(queries, groups, heads // groups, size),
        k,
        precision=precision_of(q),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask[None, None], scores * scale, -jnp.inf)
    top = jnp.maximum(partial.top, jnp.max(scores, axis=-1))
    finite = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - finite[..., None])
    kept = jnp.exp(partial.top - finite)
    v = jnp.where(jnp.any(mask, axis=0)[:, None, None], v, jnp.zeros((), v.dtype))
    o = jnp.einsum(
        "ghqs,sgd->ghqd",
        weights.astype(v.dtype),
        v,
        precision=precision_of(q),
        preferred_element_type=jnp.float32,
    )
    return Partial(
        top,
        partial.total * kept + jnp.sum(weights, axis=-1),
        partial.o * kept[..., None] + o,
    )


def finish_partial(partial: Partial) -> Float[Array, "queries heads size"]:
    """The result, in float32; a query that saw no key gives zeros."""
    total = jnp.where(partial.total == 0, 1.0, partial.total)
    o = partial.o / total[..., None]
    groups, heads, queries, size = o.shape
    return o.reshape(groups * heads, queries, size).swapaxes(0, 1)
