"""Which kernels a program runs: the one place that decides, by device, dtype and shape."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ceil_div
from moejax.arena.geometry import Runs
from moejax.config import Activation, AnyAttention
from moejax.errors import ConfigError
from moejax.pallas.attention_tiling import choose_tilings as choose_attention_tilings
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.portable import linear_portable, run_experts_portable
from moejax.pallas.prefill import (
    find_refusal,
    permuted_columns,
    product_prefill,
    run_experts_prefill,
)
from moejax.pallas.product import product, run_experts_paged, to_fragments
from moejax.pallas.tuning import choose_prefill_tile, choose_tiling, choose_tilings, tile_tokens

Products = Literal["reference", "triton", "gluon", "mosaic"]
CHOICES = ("auto", "reference", "triton", "gluon", "mosaic")
"""What a user may ask for."""
MANY_TOKENS = 32
"""Tokens of an expert on average from which `Kernels.many` multiplies.

With 32 tokens for every expert the kernel for few is 1.1 times as fast on an H200, but then half of
the experts have more than one of its tiles holds, and each is read twice.
"""
MANY_TOKENS_OF_LINEAR = 256
"""The same of a matrix that all tokens pass: it has programs enough for a GPU later."""

_LEAST_CAPABILITY = 80
# wgmma is an instruction of Hopper alone.
_MOSAIC_CAPABILITY = 90
# Of a program, by compute capability (CUDA C++ Programming Guide, technical specifications).
_SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What multiplies tokens with weights in pages, attends, and writes KV."""

    products: Products = "reference"
    """reference: plain jax.numpy; triton: any dtype and GPU; gluon: bfloat16, fastest with few
    tokens; mosaic: bfloat16 on Hopper, fastest with many, no pages on the host."""
    many: Literal["mosaic"] | None = None
    """What multiplies instead where an expert has many tokens, if it can; None: nothing."""
    attention: Literal["reference", "triton"] = "reference"
    device_kind: str = "cpu"
    """What tuned tilings are looked up by, such as `NVIDIA H200`."""
    shared_bytes: int = _SHARED_BYTES[90]
    """Shared memory that a program may have."""

    def line(self) -> str:
        """For a log."""
        many = "" if self.many is None else f" ({self.many} with many tokens)"
        return f"kernels: products {self.products}{many}, attention {self.attention}"

    def of(self, tokens: float, many: int, refusal: str | None) -> Products:
        """What multiplies.

        Args:
            tokens: of an expert, on average.
            many: from how many `self.many` multiplies.
            refusal: why it cannot, or None.
        """
        if self.many is None or tokens < many or refusal is not None:
            return self.products
        return self.many


REFERENCE = Kernels()
"""Plain jax.numpy everywhere."""


def find_kernels(
    dtype: str, wanted: str = "auto", attentions: Collection[AnyAttention] = ()
) -> Kernels:
    """The kernels of an engine on the first device of this process. Raises ConfigError.

    `attentions`: those of the model's layers.
    """
    device = jax.devices()[0]
    return choose_kernels(
        platform=device.platform,
        device_kind=device.device_kind,
        capability=round(10 * float(getattr(device, "compute_capability", 0))),
        dtype=dtype,
        wanted=wanted,
        attentions=attentions,
    )


def choose_kernels(
    *,
    platform: str,
    device_kind: str,
    capability: int,
    dtype: str,
    wanted: str = "auto",
    attentions: Collection[AnyAttention] = (),
) -> Kernels:
    """The kernels of an engine.

    Args:
        platform: `cpu` or `gpu`.
        device_kind: as jax names the device.
        capability: compute capability as a number, 90 for Hopper; 0 where there is none.
        dtype: what the engine computes in.
        wanted: one of CHOICES; anything but `auto` is taken or refused.
        attentions: those of the model's layers. Where keys are too large for the shared memory of
            a device, `auto` leaves attention to the reference.

    Raises:
        ConfigError: what is wanted does not work here.
    """
    if wanted not in CHOICES:
        raise ConfigError(f"kernel '{wanted}' is not known: {', '.join(CHOICES)}")
    if wanted == "reference":
        return dataclasses.replace(REFERENCE, device_kind=device_kind)
    reason = _find_reason(platform, capability, dtype, wanted)
    if reason is not None:
        if wanted != "auto":
            raise ConfigError(f"kernel '{wanted}' cannot be used: {reason}")
        return dataclasses.replace(REFERENCE, device_kind=device_kind)
    products: Products = "gluon" if dtype == "bfloat16" else "triton"
    many: Literal["mosaic"] | None = None
    if wanted == "auto" and products == "gluon" and capability == _MOSAIC_CAPABILITY:
        many = "mosaic"
    if wanted in ("triton", "gluon", "mosaic"):
        products = cast(Products, wanted)
    shared_bytes = _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)
    reason = _find_too_large(attentions, dtype, shared_bytes)
    if reason is not None and wanted != "auto":
        raise ConfigError(f"kernel '{wanted}' cannot be used: {reason}")
    return Kernels(
        products=products,
        many=many,
        attention="triton" if reason is None else "reference",
        device_kind=device_kind,
        shared_bytes=shared_bytes,
    )


def _find_too_large(
    attentions: Collection[AnyAttention], dtype: str, shared_bytes: int
) -> str | None:
    """Why the attention kernel cannot have its tiles, if so."""
    try:
        for part in attentions:
            choose_attention_tilings(
                part, dtype, rows=1, longest=1, max_query=1, shared_bytes=shared_bytes
            )
    except NotImplementedError as error:
        return f"attention: {error}"
    return None


def _find_reason(platform: str, capability: int, dtype: str, wanted: str) -> str | None:
    """Why what is wanted does not work; `auto` does where the portable kernel does."""
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and jax runs on {platform}"
    if wanted == "mosaic" and capability != _MOSAIC_CAPABILITY:
        return f"it needs compute capability 9.0 exactly, and the GPU has {capability / 10:.1f}"
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability 8.0, and the GPU has {capability / 10:.1f}"
    if dtype not in ("bfloat16", "float32"):
        return f"kernels compute in bfloat16 and float32, and the engine in {dtype}"
    if wanted in ("gluon", "mosaic") and dtype != "bfloat16":
        return f"it computes in bfloat16, and the engine in {dtype}"
    return find_obstacle()


def run_experts(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens k"],
    topk_weights: Float[Array, "tokens k"],
    valid: Bool[Array, " tokens"],
    experts: Paged,
    kernels: Kernels,
    *,
    activation: Activation = "silu",
    weights_input: bool = False,
    bias: ExpertBias | None = None,
) -> Float[Array, "tokens hidden"]:
    """What `moejax.layers.experts.run_experts` gives, by the kernels that were chosen."""
    tokens, k = topk_ids.shape
    if tokens == 0:
        return x
    arrays = (x, topk_ids, topk_weights, valid, experts)
    options: Any = {"activation": activation, "weights_input": weights_input, "bias": bias}
    refusal = find_refusal(
        x.dtype, experts.host is not None, None if bias is None else bias.down.dtype
    )
    products = kernels.of(tokens * k / experts.num_experts, MANY_TOKENS, refusal)
    if products == "reference":
        raise ValueError("the reference is not a kernel")
    sizes = (tokens, k, experts.num_experts)
    if products == "gluon":
        tilings = choose_tilings(*sizes, (experts.gate_up, experts.down), kernels.device_kind)
        return run_experts_paged(*arrays, tilings=tilings, **options)
    if products == "mosaic":
        size = choose_prefill_tile(*sizes, experts.down, kernels.device_kind)
        return run_experts_prefill(*arrays, tile_tokens=size, **options)
    return run_experts_portable(*arrays, **options)


def run_linear(
    x: Float[Array, "tokens columns"],
    bias: Float[Array, " rows"] | None,
    pages: UInt32[Array, "pages words"],
    host: UInt32[Array, "host_pages words"] | None,
    tables: Int32[Array, "matrices slots"],
    widths: Int32[Array, " matrices"],
    row: Int32[Array, ""],
    runs: Runs,
    kernels: Kernels,
) -> Float[Array, "tokens rows"]:
    """x times the transpose of a matrix in pages, plus a bias, in the dtype of x.

    `row`: of the matrix, in tables that are not copied for it.
    """
    tokens, width = len(x), widths[row]
    if tokens == 0:
        return jnp.zeros((0, runs.shape.rows), x.dtype)
    if kernels.products == "triton":
        y = linear_portable(x, pages, host, tables[row], width, runs)
        return y if bias is None else y + bias[None, :]
    refusal = find_refusal(x.dtype, host is not None, None if bias is None else bias.dtype)
    products = kernels.of(float(tokens), MANY_TOKENS_OF_LINEAR, refusal)
    if products == "mosaic":
        size = choose_prefill_tile(tokens, 1, 1, runs, kernels.device_kind)
    else:
        size = tile_tokens(tokens, 1, 1)
    first = jnp.arange(ceil_div(tokens, size), dtype=jnp.int32) * size
    zero = jnp.zeros_like(first)
    count = jnp.minimum(size, tokens - first)
    tiles = jnp.stack([zero + row, first, count, zero + width, zero + width, *[zero] * 3], axis=1)
    both = jnp.stack([widths, widths], axis=1)
    one = Paged(pages, host, tables, tables, both, runs, runs)
    options: Any = {"bias": None if bias is None else bias[None], "places": tokens}
    if products == "mosaic":
        padded = jnp.pad(x, ((0, len(first) * size - tokens), (0, 0)))
        return product_prefill(permuted_columns(padded), tiles, one, 1, size, **options)
    tiling = choose_tiling(1, runs, size, 1, tokens, kernels.device_kind)
    return product(to_fragments(x), tiles, one, 1, tiling, **options)
