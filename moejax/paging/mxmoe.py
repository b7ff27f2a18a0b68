"""A rival to `allocation`: widths as MxMoE (arXiv 2505.05799) chooses them, for accuracy alone.

Per layer an integer program: one width per linear, gate and up of an expert the same, the least sum
of losses within the layer's bytes. A loss is the L2 norm of the change of the layer's output where
only that matrix is quantised, as in the released code; gate_up has the sum of its two. The norm
grows with the tokens of an expert by itself: the released code weights it no further, and
`frequency` is for those who want to. What is done for speed (the cost of tiles) is left out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer, Shaped

from moejax.errors import CapacityError
from moejax.paging.allocation import Choices, total

TIME_LIMIT_S = 60.0
RELATIVE_GAP = 1e-4


class Matrices(NamedTuple):
    """One expert, or with a leading axis all of a layer."""

    gate_up: Float32[np.ndarray, "*experts 2 width hidden"]
    down: Float32[np.ndarray, "*experts hidden width"]


def swiglu(
    gate: Float32[np.ndarray, "tokens width"], up: Float32[np.ndarray, "tokens width"]
) -> Float32[np.ndarray, "tokens width"]:
    """silu(gate) * up."""
    # Through tanh, since exp overflows.
    product: Float32[np.ndarray, "tokens width"] = gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up
    return product


def layer_losses(
    x: Float32[np.ndarray, "tokens hidden"],
    topk_ids: Integer[np.ndarray, "tokens k"],
    topk_weights: Float32[np.ndarray, "tokens k"],
    experts: Matrices,
    decode: Callable[[int, int], Matrices],
    widths: Sequence[int],
    activate: Callable[..., np.ndarray] = swiglu,
) -> Float64[np.ndarray, "experts 2 widths"]:
    """By how much the outputs of the calibration tokens change: gate_up, then down, at each width.

    Only tokens of an expert change with it, so the other experts are not computed. The layer is the
    plain one: experts without biases, and weights that multiply their outputs.

    Args:
        x: what the experts read.
        topk_ids, topk_weights: the experts of each token, and how much each counts.
        experts: all of the layer, as they were.
        decode: an expert and a width → that expert as quantised.
        activate: of gate x and up x.

    Raises:
        ValueError: an id that is no expert.
    """
    count = len(experts.down)
    if np.any((topk_ids < 0) | (topk_ids >= count)):
        bad = topk_ids[(topk_ids < 0) | (topk_ids >= count)][0]
        raise ValueError(f"a token has expert {bad} of {count}")
    losses = np.zeros((count, 2, len(widths)))
    for expert in range(count):
        chosen = np.where(topk_ids == expert, topk_weights, np.float32(0)).sum(axis=1)
        tokens = np.nonzero(np.any(topk_ids == expert, axis=1))[0]
        if len(tokens) == 0:
            continue
        rows, share = x[tokens], chosen[tokens][:, None]
        gate, up = (rows @ matrix.T for matrix in experts.gate_up[expert])
        inner, down = activate(gate, up), experts.down[expert]
        for column, width in enumerate(widths):
            stored = decode(expert, width)
            of_gate = activate(rows @ stored.gate_up[0].T, up) - inner
            of_up = activate(gate, rows @ stored.gate_up[1].T) - inner
            losses[expert, 0, column] = _norm(of_gate @ down.T * share)
            losses[expert, 0, column] += _norm(of_up @ down.T * share)
            losses[expert, 1, column] = _norm(inner @ (stored.down - down).T * share)
    return losses


def allocate_mxmoe(
    loss: Float64[np.ndarray, "layers experts 2 widths"],
    sizes: Int64[np.ndarray, "layers experts 2 widths"] | Int64[np.ndarray, "2 widths"],
    budget: int,
    *,
    frequency: Float64[np.ndarray, "layers experts"] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    relative_gap: float = RELATIVE_GAP,
) -> Int64[np.ndarray, "layers experts 2"]:
    """The columns of least loss in each layer, all layers having the same share of the budget.

    Args:
        loss: finite, not negative.
        sizes: bytes; below 0: there is no such width.
        budget: bytes of all layers.
        frequency: a factor on the losses of an expert; None: 1.
        time_limit_s: for one layer.
        relative_gap: how far above the optimum a result may be.

    Raises:
        CapacityError: the fewest bytes of a layer are more than its share.
        RuntimeError: the solver found no result so near to the optimum in time.
    """
    weighted = loss if frequency is None else loss * frequency[..., None, None]
    every_size = np.broadcast_to(sizes, loss.shape)
    share = budget // len(loss)
    picks = np.zeros(loss.shape[:-1], np.int64)
    for layer in range(len(loss)):
        choices = Choices(
            sizes=every_size[layer].reshape(-1, loss.shape[-1]),
            damage=weighted[layer].reshape(-1, loss.shape[-1]),
        )
        least = int(np.sum(_least(choices)))
        if least > share:
            raise CapacityError(
                f"layer {layer} needs at least {least} bytes, its share of the budget is {share}"
            )
        picks[layer] = _solve(choices, share, layer, time_limit_s, relative_gap).reshape(-1, 2)
    return picks


def _least(choices: Choices) -> Int64[np.ndarray, " linears"]:
    """The fewest bytes of each linear."""
    sizes = np.where(choices.available, choices.sizes, np.iinfo(np.int64).max)
    least: Int64[np.ndarray, " linears"] = np.min(sizes, axis=1)
    return least


def _solve(
    choices: Choices, budget: int, layer: int, time_limit_s: float, relative_gap: float
) -> Int64[np.ndarray, " linears"]:
    # HiGHS takes a while to load, and only this rival needs it.
    from scipy import optimize, sparse  # type: ignore[import-untyped]

    linears, widths = choices.sizes.shape
    available = choices.available
    # Tolerances are absolute: what is left of the bytes is counted in the largest unit, and losses
    # in the largest of them.
    added = np.where(available, choices.sizes - _least(choices)[:, None], 0)
    unit = max(1, int(np.gcd.reduce(added, axis=None)))
    losses = np.where(available, choices.damage, 0.0)
    spare = (budget - int(np.sum(_least(choices)))) // unit
    one_each = sparse.kron(sparse.eye_array(linears), np.ones((1, widths)), format="csr")
    result = optimize.milp(
        losses.reshape(-1) / (np.max(losses) or 1.0),
        integrality=np.ones(linears * widths),
        bounds=optimize.Bounds(0, available.reshape(-1).astype(np.float64)),
        constraints=[
            optimize.LinearConstraint((added // unit).reshape(1, -1), ub=spare),
            optimize.LinearConstraint(one_each, 1, 1),
        ],
        options={"time_limit": time_limit_s, "mip_rel_gap": relative_gap},
    )
    if not result.success:
        raise RuntimeError(
            f"layer {layer}: no widths within {relative_gap} of the optimum in {time_limit_s} s: "
            f"{result.message}"
        )
    picks: Int64[np.ndarray, " linears"] = np.argmax(result.x.reshape(linears, widths), axis=1)
    if total(choices, picks)[0] > budget:
        raise RuntimeError(f"layer {layer}: the solver exceeds the layer's {budget} bytes")
    return picks


def _norm(change: Shaped[np.ndarray, "tokens hidden"]) -> float:
    return float(np.sqrt(np.sum(np.square(change, dtype=np.float64))))
