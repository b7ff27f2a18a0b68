"""The weights of a calibration: the dense ones of all layers, and the experts of one at a time."""

import concurrent.futures

import numpy as np
from jaxtyping import Array, Shaped

from moejax.arena.geometry import linear_shapes
from moejax.checkpoint import Checkpoint
from moejax.checkpoint.layout import LINEARS
from moejax.errors import CheckpointError
from moejax.layers.every_token import EveryToken
from moejax.models import fisher_steps as steps
from moejax.models.decoder import abstract_params, flatten_params, nest_params

_SHARED = tuple(
    f"feed_forward.{shared}.{part}.weight"
    for shared in ("shared", "moe.shared")
    for part in ("gate", "up", "down")
)


def is_linear(name: str, weight: Shaped[Array, "..."]) -> bool:
    """Whether a weight of a layer is a matrix of attention or of a shared expert."""
    is_attention = name.startswith("attention.") and name.endswith(".weight") and weight.ndim == 2
    return is_attention or name in _SHARED


class Weights:
    """Those of a checkpoint at width 16. The dense ones are read at once, and stay."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        """`dtype`: that the model computes in. Raises CheckpointError."""
        self._checkpoint = checkpoint
        named = _read_dense(checkpoint, dtype)
        self._stacked = {n: w for n, w in named.items() if n.startswith("segments.")}
        self.ends = nest_params({n: w for n, w in named.items() if n not in self._stacked})
        """Embedding, norm and head."""

    def dense(self, layer: int) -> dict[str, Array]:
        """Those of a layer that are not experts, by their names in it."""
        place = self._checkpoint.config.places[layer]
        prefix = f"segments.{place.segment}.{place.index}."
        of_kind = {
            name.removeprefix(prefix): w
            for name, w in self._stacked.items()
            if name.startswith(prefix)
        }
        found: dict[str, Array] = steps.take_layer(of_kind, np.int32(place.repeat))
        return found

    def experts(self, layer: int, *, verify: bool = False) -> EveryToken | None:
        """Those of a layer in float32, if it has any. `verify`: check their CRC-32."""
        config = self._checkpoint.config
        if layer not in config.moe_layers:
            return None
        # What was read of a file that stays mapped counts as memory of this process.
        checkpoint = Checkpoint.open(self._checkpoint.folder)
        if verify:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                numbers = range(config.moe.router.num_experts)
                list(pool.map(lambda expert: checkpoint.verify_expert(layer, expert), numbers))
        runs = checkpoint.expert_runs(layer)
        gate_up, down = (
            steps.decode_experts(runs[f"{linear}.dense"], shape=shape, dtype=config.dtype)
            for linear, shape in zip(LINEARS, linear_shapes(config), strict=True)
        )
        return EveryToken(gate_up, down[:, 0])


def _read_dense(checkpoint: Checkpoint, dtype: str) -> dict[str, Array]:
    """The weights that are not experts, by name, in the dtype that the model computes in."""
    wanted = flatten_params(abstract_params(checkpoint.config, dtype))
    for name in sorted(set(wanted) ^ set(checkpoint.dense_names())):
        what = "is missing" if name in wanted else "is not of this model"
        raise CheckpointError(f"{checkpoint.folder}: tensor '{name}' {what}")
    for name, leaf in wanted.items():
        if checkpoint.dense_shape(name) != leaf.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is {checkpoint.dense_shape(name)}, "
                f"the model needs {leaf.shape}"
            )
    return {name: checkpoint.read_dense(name, leaf.dtype) for name, leaf in wanted.items()}
