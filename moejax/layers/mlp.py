"""The gated MLP, dense or shared by all tokens."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from moejax.config import SharedExpert
from moejax.layers.linear import Linear, Stack


class MlpLayer(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, width: int, *, stack: Stack, dtype: str) -> None:
        self.gate = Linear(hidden_size, width, stack=stack, dtype=dtype)
        self.up = Linear(hidden_size, width, stack=stack, dtype=dtype)
        self.down = Linear(width, hidden_size, stack=stack, dtype=dtype)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class SharedExpertLayer(MlpLayer):
    """An MLP for every token, times the sigmoid of a learned projection where it is gated."""

    def __init__(self, hidden_size: int, part: SharedExpert, *, stack: Stack, dtype: str) -> None:
        super().__init__(hidden_size, part.width, stack=stack, dtype=dtype)
        self.router = Linear(hidden_size, 1, stack=stack, dtype=dtype) if part.gated else None

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        y = super().__call__(x)
        return y if self.router is None else y * jax.nn.sigmoid(self.router(x))
