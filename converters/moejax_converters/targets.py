"""The tensors of a model: their names, their shapes, and which of them are stacked.

A target is the tensor of one layer, `layers.N.…`. In a checkpoint, those of the layers that share
a place in a segment's period are stacked: `segments.S.I.…`, with the repeats as first axis.
"""

import functools
import re

from moejax.config import ModelConfig
from moejax.models.decoder import abstract_params, flatten_params

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """The shape of every tensor of a model, by the name of its target."""
    shapes: Shapes = {}
    stored = _dense_shapes(config)
    for name, targets in dense_stacks(config).items():
        is_stacked = name != targets[0]
        shapes |= dict.fromkeys(targets, stored[name][1:] if is_stacked else stored[name])
    hidden = config.hidden_size
    for n, moe in config.moe_layers.items():
        for e in range(moe.router.num_experts):
            shapes[f"layers.{n}.experts.{e}.gate"] = (moe.expert_width, hidden)
            shapes[f"layers.{n}.experts.{e}.up"] = (moe.expert_width, hidden)
            shapes[f"layers.{n}.experts.{e}.down"] = (hidden, moe.expert_width)
    return shapes


def dense_stacks(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Name of each dense tensor of a checkpoint → the targets that it stacks, in order.

    A name without `segments` is not stacked; its one target is the tensor itself.
    """
    layers: dict[tuple[int, int], list[int]] = {}
    for n, place in enumerate(config.places):
        layers.setdefault((place.segment, place.index), []).append(n)
    stacks: dict[str, tuple[str, ...]] = {}
    for name in _dense_shapes(config):
        match = re.fullmatch(r"segments\.(\d+)\.(\d+)\.(.*)", name)
        if match is None:
            stacks[name] = (name,)
        else:
            at = layers[int(match[1]), int(match[2])]
            stacks[name] = tuple(f"layers.{n}.{match[3]}" for n in at)
    return stacks


@functools.lru_cache(maxsize=4)  # a conversion asks twice
def _dense_shapes(config: ModelConfig) -> Shapes:
    params = flatten_params(abstract_params(config, config.dtype))
    return {name: tuple(leaf.shape) for name, leaf in params.items()}
