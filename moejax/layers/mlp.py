"""The gated MLP, dense or shared by all tokens, and its activations."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moejax.config import Activation, ClampedSwiglu, SharedExpert
from moejax.layers.linear import Linear, Stack, run_linears


def activate(
    gate: Float[Array, "*n width"], up: Float[Array, "*n width"], activation: Activation
) -> Float[Array, "*n width"]:
    """What goes into the down projection."""
    if isinstance(activation, ClampedSwiglu):
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * activation.alpha)
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up


class MlpLayer(nnx.Module):
    """down(activation(gate x) * up x)."""

    def __init__(
        self, hidden_size: int, width: int, activation: Activation, *, stack: Stack, dtype: str
    ) -> None:
        self.activation = activation
        self.gate = Linear(hidden_size, width, stack=stack, dtype=dtype)
        self.up = Linear(hidden_size, width, stack=stack, dtype=dtype)
        self.down = Linear(width, hidden_size, stack=stack, dtype=dtype)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        gate, up = run_linears(x, [self.gate, self.up])
        return self.down(activate(gate, up, self.activation))


class SharedExpertLayer(MlpLayer):
    """An MLP for every token, times the sigmoid of a learned projection where it is gated."""

    def __init__(self, hidden_size: int, part: SharedExpert, *, stack: Stack, dtype: str) -> None:
        super().__init__(hidden_size, part.width, part.activation, stack=stack, dtype=dtype)
        self.router = Linear(hidden_size, 1, stack=stack, dtype=dtype) if part.gated else None

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        router = [] if self.router is None else [self.router]
        gate, up, *routed = run_linears(x, [self.gate, self.up, *router])
        y = self.down(activate(gate, up, self.activation))
        return y * jax.nn.sigmoid(routed[0]) if routed else y
