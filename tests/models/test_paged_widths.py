"""Steps over experts and other linears as nested codes, whose widths change between steps."""

import dataclasses
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.coded_model import CodedArena, make_coded
from models.small_configs import VOCAB
from models.small_model import (
    Arena,
    jit_forward,
    log_softmax,
    prefill_bucket,
    row_of,
    whole_logprobs,
)
from moejax.arena.control import Control, pack
from moejax.arena.widths import Widths, uniform
from moejax.models.step import Bucket

TOLERANCE = 1e-4
EDITS = 150
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 20).tolist()


def bucket() -> Bucket:
    plain = prefill_bucket("bcbc")
    return dataclasses.replace(plain, layout=dataclasses.replace(plain.layout, expert_edits=EDITS))


@cache
def program() -> Any:
    return jit_forward(make_coded().model, bucket())


def run(arena: Arena, row: int, edits: list[tuple[int, int, int, int]] = ()) -> np.ndarray:
    """Log-probabilities after each token of a new row, in a step with these edits."""
    control: Control = arena.control([row_of(row, TOKENS)])
    array = pack(control._replace(expert_edits=list(edits)), bucket().layout)
    arena.state, logits = program()(
        arena.model.params, arena.state, arena.rows.last_tokens, jnp.asarray(array)
    )
    return log_softmax(logits[: len(TOKENS)])


def wanted(widths: Widths) -> np.ndarray:
    return whole_logprobs(make_coded().decoded(widths), TOKENS)


def mixed_widths() -> Widths:
    """All widths, and others for gate_up than for down, in layers, experts and other linears."""
    geometry = make_coded().model.geometry
    choices = np.array([2, 3, 4, 16], np.int32)
    rng = np.random.default_rng(5)
    shape = (geometry.num_moe_layers, geometry.num_experts, 2)
    return Widths(
        choices[rng.integers(0, 4, shape)], choices[rng.integers(0, 4, geometry.num_linears)]
    )


def changed(widths: Widths, experts: dict[tuple, int], linears: dict[int, int]) -> Widths:
    found = Widths(widths.experts.copy(), widths.linears.copy())
    for at, width in experts.items():
        found.experts[at] = width
    for n, width in linears.items():
        found.linears[n] = width
    return found


def test_the_model_has_coded_linears_of_all_kinds() -> None:
    names = [tensor.name for tensor in make_coded().model.geometry.linears]
    assert [name.split(".", 3)[3] for name in names if name.startswith("segments.0.0.")] == [
        *(f"attention.{part}.weight" for part in ("k", "o", "q", "v")),
        *(f"feed_forward.shared.{part}.weight" for part in ("down", "gate", "up")),
    ]
    assert all(tensor.repeats == 2 for tensor in make_coded().model.geometry.linears)


@pytest.mark.shows("quantised experts", "widths are data: mixed, and changed between steps")
def test_mixed_widths_give_what_their_weights_give_and_edits_change_them() -> None:
    widths = mixed_widths()
    arena = CodedArena(widths)
    experts = arena.model.geometry.num_experts
    np.testing.assert_allclose(run(arena, 0), wanted(widths), atol=TOLERANCE)

    # Down by one: the width changes and nothing else, for planes and table are there.
    lower_experts = {
        tuple(map(int, at)): int(widths.experts[tuple(at)]) - 1
        for at in np.argwhere((widths.experts > 2) & (widths.experts < 16))
    }
    lower_linears = {
        n: width - 1 for n, width in enumerate(widths.linears.tolist()) if 2 < width < 16
    }
    edits = [(at[2], at[0] * experts + at[1], -1, w) for at, w in lower_experts.items()]
    edits += [(2, n, -1, w) for n, w in lower_linears.items()]
    lower = changed(widths, lower_experts, lower_linears)
    assert len(lower_experts) > 5 and len(lower_linears) > 5
    found = run(arena, 1, edits)
    np.testing.assert_allclose(found, wanted(lower), atol=TOLERANCE)
    assert np.abs(found - wanted(widths)).max() > 0.01

    # From codes to the dense run, and back to all planes: pages and width.
    expert = tuple(map(int, np.argwhere(lower.experts < 4)[0]))
    linear = int(np.argmax(lower.linears < 4))
    for row, width in ((2, 16), (3, 4)):
        edits = [
            (expert[2], expert[0] * experts + expert[1], slot, page)
            for slot, page in arena.slots(arena.number(*expert), width).items()
        ]
        edits += [(expert[2], expert[0] * experts + expert[1], -1, width)]
        edits += [
            (2, linear, slot, page)
            for slot, page in arena.slots(arena.number(None, linear, 0), width).items()
        ]
        edits += [(2, linear, -1, width)]
        assert len(edits) <= EDITS
        higher = changed(lower, {expert: width}, {linear: width})
        np.testing.assert_allclose(run(arena, row, edits), wanted(higher), atol=TOLERANCE)
    assert program()._cache_size() == 1


def test_uniform_widths_differ_from_each_other() -> None:
    geometry = make_coded().model.geometry
    found = [wanted(uniform(geometry, width)) for width in geometry.widths]
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(found) for b in found[:i])
