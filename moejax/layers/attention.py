"""Grouped-query attention: projections, and the plain computation over cached keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from moejax.config import Attention
from moejax.layers.linear import Linear, RmsNorm, Stack, precision_of
from moejax.layers.rope import rotate


class Qkv(NamedTuple):
    """Queries, keys and values of the tokens of a step, rotated to their positions."""

    q: Float[Array, "tokens heads size"]
    k: Float[Array, "tokens kv_heads size"]
    v: Float[Array, "tokens kv_heads size"]


class AttentionLayer(nnx.Module):
    """The projections around attention. What it attends to is the caller's."""

    def __init__(
        self, part: Attention, hidden_size: int, *, epsilon: float, stack: Stack, dtype: str
    ) -> None:
        q_size = part.num_heads * part.head_size
        kv_size = part.num_kv_heads * part.head_size
        options: Any = {"stack": stack, "dtype": dtype}
        self.part = part
        self.q = Linear(hidden_size, q_size, bias=part.qkv_bias, **options)
        self.k = Linear(hidden_size, kv_size, bias=part.qkv_bias, **options)
        self.v = Linear(hidden_size, kv_size, bias=part.qkv_bias, **options)
        self.o = Linear(q_size, hidden_size, bias=part.output_bias, **options)
        if part.qk_norm != "none":
            per_head = part.qk_norm == "head"
            q_norm = part.head_size if per_head else q_size
            k_norm = part.head_size if per_head else kv_size
            self.q_norm = RmsNorm(q_norm, epsilon=epsilon, **options)
            self.k_norm = RmsNorm(k_norm, epsilon=epsilon, **options)

    def project(self, x: Float[Array, "tokens hidden"], positions: Int32[Array, " tokens"]) -> Qkv:
        """Queries, keys and values: norm, clip, then rotation."""
        part = self.part
        q, k, v = self.q(x), self.k(x), self.v(x)
        if part.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(len(x), -1, part.head_size) for y in (q, k, v))
        if part.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if part.qkv_clip is not None:
            q, k, v = (jnp.clip(y, -part.qkv_clip, part.qkv_clip) for y in (q, k, v))
        return Qkv(rotate(q, positions, part.rope), rotate(k, positions, part.rope), v)

    def output(self, o: Float[Array, "tokens heads size"]) -> Float[Array, "tokens hidden"]:
        """The output projection."""
        return self.o(o.reshape(len(o), -1))


def visible(
    query_positions: Int32[Array, " queries"],
    key_positions: Int32[Array, " keys"],
    window: int | None,
) -> Bool[Array, "queries keys"]:
    """Which keys a query sees: those up to itself, within the window."""
    behind = query_positions[:, None] - key_positions[None, :]
    seen = behind >= 0
    return seen if window is None else seen & (behind < window)


def attend(
    q: Float[Array, "queries heads size"],
    k: Float[Array, "keys kv_heads size"],
    v: Float[Array, "keys kv_heads size"],
    mask: Bool[Array, "queries keys"],
    scale: float,
) -> Float[Array, "queries heads size"]:
    """Softmax attention of one sequence. Keys and values that nobody sees may hold anything.

    Scores and softmax are in float32; probabilities are rounded to the dtype of v. A query that
    sees no key gives zeros.
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
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
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
    return o.reshape(queries, heads, size).astype(q.dtype)


attend_rows = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))


class Partial(NamedTuple):
    """Attention of one sequence's queries over a part of the keys."""

    top: Float[Array, "kv_heads group queries"]
    """The largest score so far."""
    total: Float[Array, "kv_heads group queries"]
    """The sum of the weights, relative to `top`."""
    o: Float[Array, "kv_heads group queries size"]
    """The weighted values, in float32."""


def start_partial(q: Float[Array, "queries heads size"], kv_heads: int) -> Partial:
    """Attention over no key."""
    queries, heads, size = q.shape
    shape = (kv_heads, heads // kv_heads, queries)
    return Partial(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, size), jnp.float32),
    )


def add_keys(
    partial: Partial,
    q: Float[Array, "queries heads size"],
    k: Float[Array, "keys kv_heads size"],
    v: Float[Array, "keys kv_heads size"],
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
