"""Which kernels a program runs: the one place that decides, by device, dtype and shape."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.format import ceil_div
from moejax.arena.geometry import Runs
from moejax.config import Activation
from moejax.errors import ConfigError
from moejax.pallas.bridge import find_obstacle
from moejax.pallas.portable import linear_portable, run_experts_portable
from moejax.pallas.product import product, run_experts_paged, to_fragments
from moejax.pallas.tuning import choose_tiling, choose_tilings, tile_tokens

Products = Literal["reference", "triton", "gluon"]
CHOICES = ("auto", "reference", "triton", "gluon")
"""What a user may ask for."""

_LEAST_CAPABILITY = 80
# Of a program, by compute capability (CUDA C++ Programming Guide, technical specifications).
_SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_LEAST_SHARED_BYTES = 99 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What multiplies tokens with weights in pages, attends, and writes KV."""

    products: Products = "reference"
    """reference: plain jax.numpy; triton: any dtype and GPU; gluon: bfloat16, fastest."""
    attention: Literal["reference", "triton"] = "reference"
    device_kind: str = "cpu"
    """What tuned tilings are looked up by, such as `NVIDIA H200`."""
    shared_bytes: int = _SHARED_BYTES[90]
    """Shared memory that a program may have."""

    def line(self) -> str:
        """For a log."""
        return f"kernels: products {self.products}, attention {self.attention}"


REFERENCE = Kernels()
"""Plain jax.numpy everywhere."""


def find_kernels(dtype: str, wanted: str = "auto") -> Kernels:
    """The kernels of an engine on the first device of this process. Raises ConfigError."""
    device = jax.devices()[0]
    return choose_kernels(
        platform=device.platform,
        device_kind=device.device_kind,
        capability=round(10 * float(getattr(device, "compute_capability", 0))),
        dtype=dtype,
        wanted=wanted,
    )


def choose_kernels(
    *, platform: str, device_kind: str, capability: int, dtype: str, wanted: str = "auto"
) -> Kernels:
    """The kernels of an engine.

    Args:
        platform: `cpu` or `gpu`.
        device_kind: as jax names the device.
        capability: compute capability as a number, 90 for Hopper; 0 where there is none.
        dtype: what the engine computes in.
        wanted: one of CHOICES; anything but `auto` is taken or refused.

    Raises:
        ConfigError: what is wanted does not work here.
    """
    if wanted not in CHOICES:
        raise ConfigError(f"kernel '{wanted}' is not known: {', '.join(CHOICES)}")
    if wanted == "reference":
        return dataclasses.replace(REFERENCE, device_kind=device_kind)
    reason = _find_reason(platform, capability)
    if wanted == "gluon" and reason is None and dtype != "bfloat16":
        reason = f"it computes in bfloat16, and the engine in {dtype}"
    if reason is not None:
        if wanted != "auto":
            raise ConfigError(f"kernel '{wanted}' cannot be used: {reason}")
        return dataclasses.replace(REFERENCE, device_kind=device_kind)
    products: Products = "gluon" if dtype == "bfloat16" else "triton"
    if wanted != "auto":
        products = "gluon" if wanted == "gluon" else "triton"
    return Kernels(
        products=products,
        attention="triton",
        device_kind=device_kind,
        shared_bytes=_SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES),
    )


def _find_reason(platform: str, capability: int) -> str | None:
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and jax runs on {platform}"
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability 8.0, and the GPU has {capability / 10:.1f}"
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
    if kernels.products == "triton":
        return run_experts_portable(
            x,
            topk_ids,
            topk_weights,
            valid,
            experts,
            activation=activation,
            weights_input=weights_input,
            bias=bias,
        )
    if kernels.products == "reference":
        raise ValueError("the reference is not a kernel")
    return run_experts_paged(
        x,
        topk_ids,
        topk_weights,
        valid,
        experts,
        tilings=choose_tilings(
            topk_ids.shape[0],
            topk_ids.shape[1],
            experts.num_experts,
            (experts.gate_up, experts.down),
            kernels.device_kind,
        ),
        activation=activation,
        weights_input=weights_input,
        bias=bias,
    )


def run_linear(
    x: Float[Array, "tokens columns"],
    bias: Float[Array, " rows"] | None,
    pages: UInt32[Array, "pages words"],
    host: UInt32[Array, "host_pages words"] | None,
    slots: Int32[Array, " slots"],
    width: Int32[Array, ""],
    runs: Runs,
    kernels: Kernels,
) -> Float[Array, "tokens rows"]:
    """x times the transpose of a matrix in pages, plus a bias, in the dtype of x."""
    tokens = len(x)
    if kernels.products == "triton":
        y = linear_portable(x, pages, host, slots, width, runs)
        return y if bias is None else y + bias[None, :]
    size = tile_tokens(tokens, 1, 1)
    tiling = choose_tiling(1, runs, size, 1, tokens, kernels.device_kind)
    first = jnp.arange(ceil_div(tokens, size), dtype=jnp.int32) * size
    zero = jnp.zeros_like(first)
    tiles = jnp.stack(
        [zero, first, jnp.minimum(size, tokens - first), zero + width, zero + width, *[zero] * 3],
        axis=1,
    )
    padded = jnp.pad(x, ((0, len(first) * size - tokens), (0, 0)))
    both = jnp.broadcast_to(width, (1, 2))
    one = Paged(pages, host, slots[None], slots[None], both, runs, runs)
    return product(
        to_fragments(padded.reshape(len(first), size, -1)),
        tiles,
        one,
        1,
        tiling,
        bias=None if bias is None else bias[None],
        places=tokens,
    )
