"""Other ways to store experts at the same bytes: affine codes, and widths chosen as MxMoE does."""

import concurrent.futures
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from quality_model import Stored

from moejax.config import DENSE_WIDTH
from moejax.layers.every_token import EveryToken
from moejax.models.decoder import bind_block, nest_params
from moejax.models.fisher_weights import Weights
from moejax.models.whole import WholeMemory
from moejax.paging.mxmoe import Matrices, allocate_mxmoe, layer_losses
from moejax.quant.affine import affine_bits, affine_round

# Columns that share a scale and an offset; None: the whole row.
GROUPS = {"affine per row": None, "affine per 128": 128, "affine per 32": 32}
WIDTHS = (3, 4, 5, 6)

Layers = dict[int, tuple[jax.Array, jax.Array]]


class Importance(NamedTuple):
    """Of the weights of a layer's experts."""

    gate_up: np.ndarray
    down: np.ndarray


def affine_schemes(
    plain: Stored, importance: Mapping[int, Importance]
) -> Iterator[tuple[str, int, int, Layers]]:
    """(name, bits, bytes, experts) of round-to-nearest with the best of several clippings."""
    for name, group in GROUPS.items():
        for bits in WIDTHS:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                rounded = pool.map(
                    lambda layer, bits=bits, group=group: [
                        affine_round(np.asarray(weights[0], np.float32), bits, group, of)
                        for weights, of in zip(plain.layers[layer], importance[layer], strict=True)
                    ],
                    plain.layers,
                )
                found = dict(zip(plain.layers, rounded, strict=True))
            num_bytes = sum(
                part.size * affine_bits(part.shape[-1], bits, group) / 8
                for parts in found.values()
                for part in parts
            )
            experts = {n: (jnp.asarray(p[0]), jnp.asarray(p[1])) for n, p in found.items()}
            yield name, bits, round(num_bytes), experts


def mxmoe_widths(
    plain: Stored, stored: Stored, sequences: np.ndarray, budgets: list[int]
) -> Iterator[np.ndarray]:
    """Widths [layers, experts, 2] of each budget (MxMoE, Duanmu et al. 2025, accuracy only).

    The loss of a linear at a width is by how much the output of its layer changes if it alone is
    quantised, times how often its expert is chosen; an integer program per layer.
    """
    losses, frequencies = [], []
    for layer, (x, ids, weights) in layer_inputs(plain, sequences).items():
        gate_up, down = (np.asarray(part[0], np.float32) for part in plain.layers[layer])
        of_width = [
            tuple(np.asarray(part[w], np.float32) for part in stored.layers[layer])
            for w in range(len(stored.widths))
        ]

        def decode(
            expert: int, width: int, of_width: list[tuple[np.ndarray, ...]] = of_width
        ) -> Matrices:
            both = of_width[stored.widths.index(width)]
            return Matrices(both[0][expert], both[1][expert])

        losses.append(layer_losses(x, ids, weights, Matrices(gate_up, down), decode, stored.widths))
        counts = np.bincount(ids.reshape(-1), minlength=len(down))
        frequencies.append(counts / counts.sum())
    for budget in budgets:
        picks = allocate_mxmoe(
            np.stack(losses),
            stored.sizes().astype(np.int64),
            budget,
            frequency=np.stack(frequencies),
        )
        yield np.array(stored.widths)[picks]


def layer_inputs(
    plain: Stored, sequences: np.ndarray
) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each layer with experts: what they read [tokens, hidden], ids and weights [tokens, k]."""
    config = plain.checkpoint.config
    weights = Weights(plain.checkpoint, "float32")
    rows, length = sequences.shape
    x = jnp.take(weights.ends["embed"]["weight"], jnp.asarray(sequences.reshape(-1)), axis=0)
    of_layer = plain.at(plain.uniform(DENSE_WIDTH))
    found = {}
    for number, kind in enumerate(config.layers):
        experts = of_layer.get(number)
        stacked = None if experts is None else EveryToken(*experts)
        block = bind_block(kind, config, "float32", nest_params(weights.dense(number)))
        memory = WholeMemory(config, rows, length, {})
        middle, carry = block.add_attention(x, None, stacked, memory)
        if experts is not None:
            routing = block.route(middle)
            read = block.feed_forward_norm(middle)
            found[number] = (
                np.asarray(read),
                np.asarray(routing.topk_ids),
                np.asarray(routing.topk_weights, np.float32),
            )
        x = block.add_feed_forward(middle, carry, stacked, memory)
    return found
