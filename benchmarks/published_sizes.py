"""What the published sizes occupy, and how well pages fit them: two tables.

    python benchmarks/published_sizes.py

Everything in the dtype of the checkpoints, bfloat16. No weights are made.
"""

import argparse
import dataclasses
from collections.abc import Mapping

import numpy as np
from published import names, published_config

from moejax.arena.format import DTYPES
from moejax.arena.geometry import (
    Geometry,
    choose_geometry,
    kv_kinds,
    linear_shapes,
    waste_by_use,
    width_bytes,
)
from moejax.arena.kinds import KvKind
from moejax.config import DENSE_WIDTH, ModelConfig, Quantization
from moejax.models.decoder import abstract_params, flatten_params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters and bytes of a model."""

    expert_params: int
    """Of the matrices of all routed experts, without biases: those are dense tensors."""
    expert_bytes: int
    dense_params: Mapping[str, int]
    """Dense tensor → its values."""
    dense_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]
    """Reach of the layers, in words → bytes that a token takes in all of these."""

    def params_of(self, *endings: str) -> int:
        """Values of the dense tensors whose names end so."""
        return sum(n for name, n in self.dense_params.items() if name.endswith(endings))


def sizes_of(config: ModelConfig) -> Sizes:
    """The sizes of a model in its own dtype."""
    itemsize = DTYPES[config.dtype].itemsize
    expert_params = (
        len(config.moe_layers)
        * config.moe.router.num_experts
        * (3 * config.hidden_size * config.moe.expert_width)
    )
    dense = flatten_params(abstract_params(config, config.dtype))
    kv: dict[str, int] = {}
    for kind in kv_kinds(config, config.dtype, page_bytes=1 << 16):
        name = reach_name(kind)
        kv[name] = kv.get(name, 0) + kind.token_bytes * len(kind.layers)
    return Sizes(
        expert_params=expert_params,
        expert_bytes=expert_params * itemsize,
        dense_params={name: leaf.size for name, leaf in dense.items()},
        dense_bytes={
            name: leaf.size * np.dtype(leaf.dtype).itemsize for name, leaf in dense.items()
        },
        kv_bytes=kv,
    )


def reach_name(kind: KvKind) -> str:
    """How far the layers of a kind see, in words: all, window 1024, chunk 8192."""
    if kind.reach.window is not None:
        return f"window {kind.reach.window}"
    return "all" if kind.reach.chunk is None else f"chunk {kind.reach.chunk}"


def step_bytes(
    config: ModelConfig, batch: int, length: int, bits: int = DENSE_WIDTH
) -> dict[str, float]:
    """Bytes that a decode step must read, by kind; of KV by the reach of its layers.

    Args:
        config: the model; what has no width is in its dtype.
        batch: sequences.
        length: tokens of each, the new one included.
        bits: the width of the experts; below 16 planes count, and one table of each row.
    """
    sizes, router = sizes_of(config), config.moe.router
    # A batch of independent tokens with uniform routing.
    touched = 1 - (1 - router.experts_per_token / router.num_experts) ** batch
    found = {"dense": 0.0, "experts": touched * _expert_bytes(config, sizes, bits)}
    for name, size in sizes.dense_bytes.items():
        if ".expert_bias." in name:
            found["experts"] += touched * size
        elif config.tie_embeddings or not name.startswith("embed"):
            found["dense"] += size
    for kind in kv_kinds(config, config.dtype, page_bytes=1 << 16):
        seen = length - max(0, kind.reach.oldest(length - 1))
        name = f"kv {reach_name(kind)}"
        size = batch * seen * kind.token_bytes * len(kind.layers)
        found[name] = found.get(name, 0.0) + size
    return found


def _expert_bytes(config: ModelConfig, sizes: Sizes, bits: int) -> int:
    """Bytes of all routed experts at a width."""
    if bits == DENSE_WIDTH:
        return sizes.expert_bytes
    stored = Quantization(seed_bits=bits, parent_bits=bits)
    each = sum(width_bytes(s, config.dtype, stored, bits) for s in linear_shapes(config, stored))
    return len(config.moe_layers) * config.moe.router.num_experts * each


def size_row(name: str, sizes: Sizes) -> str:
    """A line of the table of sizes."""
    dense = sum(sizes.dense_bytes.values())
    params = sizes.expert_params + sum(sizes.dense_params.values())
    kv = " + ".join(f"{size} ({reach})" for reach, size in sizes.kv_bytes.items())
    return (
        f"| {name} | {params / 1e9:.2f} | {sizes.expert_bytes / 1e9:.2f} | {dense / 1e9:.2f} "
        f"| {kv} |"
    )


def waste_row(name: str, geometry: Geometry) -> str:
    """A line of the table of pages."""
    waste = waste_by_use(geometry)
    widths = [f"{100 * waste[use]:.2f}" for use in waste if use.startswith("width")]
    kv = ", ".join(
        f"{kind.block_size} of {kind.token_bytes} B ({reach_name(kind)}): "
        f"{100 * waste[f'KV of {kind.token_bytes} bytes']:.2f}"
        for kind in geometry.kinds
    )
    return f"| {name} | {geometry.page_bytes >> 10} KiB | {' | '.join(widths)} | {kv} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    configs = {name: published_config(name) for name in names()}
    print("| model | parameters, 1e9 | routed experts, GB | the rest, GB | KV, bytes per token |")
    print("|---|---|---|---|---|")
    for name, config in configs.items():
        print(size_row(name, sizes_of(config)))
    print()
    print("Padding of pages in %: of experts at a width, of KV where a page is full of tokens.")
    print()
    geometries = {name: choose_geometry(config, "bfloat16") for name, config in configs.items()}
    uses = waste_by_use(next(iter(geometries.values())))
    widths = [use for use in uses if use.startswith("width")]
    print(f"| model | page | {' | '.join(widths)} | tokens of KV in a page of one layer |")
    print("|---" * (len(widths) + 3) + "|")
    for name, geometry in geometries.items():
        print(waste_row(name, geometry))


if __name__ == "__main__":
    main()
