"""From logits to experts and weights: the kernel in the interpreter, against `route`."""

import dataclasses
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from moejax.config import ExpertGroups, Router
from moejax.layers.linear import LayerMatrix, LayerVector
from moejax.layers.router import RouterLayer, Routing
from moejax.pallas import routing
from pallas.interpreted import Call, interpret

LAYERS, LAYER = 3, 2
PLAIN = Router(num_experts=60, experts_per_token=4, renormalize=False, float32_weights=False)
PARTS = {
    "Qwen1.5-MoE": PLAIN,
    "Mixtral": Router(num_experts=8, experts_per_token=2, renormalize=True, float32_weights=False),
    "one of one": Router(
        num_experts=1, experts_per_token=1, renormalize=True, float32_weights=True
    ),
    "Llama-4": dataclasses.replace(PLAIN, num_experts=16, experts_per_token=1, score="sigmoid"),
    "gpt-oss": dataclasses.replace(PLAIN, num_experts=32, bias=True, renormalize=True),
    "choice bias": dataclasses.replace(
        PLAIN, num_experts=100, score="sigmoid", choice_bias=True, renormalize=True, scale=2.5
    ),
    "expert scale": dataclasses.replace(
        PLAIN, num_experts=512, experts_per_token=8, expert_scale=True, float32_weights=True
    ),
}
TOKENS = 13


class Inputs(NamedTuple):
    logits: np.ndarray
    bias: np.ndarray
    choice_bias: np.ndarray
    expert_scale: np.ndarray


def make_inputs(part: Router, seed: int = 0) -> Inputs:
    """The first token has logits that repeat, so that scores are equal."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((TOKENS, part.num_experts), np.float32)
    logits[0] = np.arange(part.num_experts) % 3
    shape = (LAYERS, part.num_experts)
    return Inputs(
        logits,
        rng.standard_normal(shape, np.float32),
        rng.standard_normal(shape, np.float32),
        rng.random(shape, np.float32),
    )


def make_layer(part: Router, inputs: Inputs, columns: int = 8) -> RouterLayer:
    """A router whose learned parts are read in place."""
    layer = RouterLayer(part, columns, epsilon=1e-6, stack=(), dtype="bfloat16")
    number = jnp.int32(LAYER)
    shape = (LAYERS, part.num_experts, columns)
    layer.weight.set_value(LayerMatrix(jnp.ones(shape, jnp.bfloat16), number))
    for name in ("bias", "choice_bias", "expert_scale"):
        if getattr(part, name):
            dtype = "float32" if name == "choice_bias" else "bfloat16"
            stack = jnp.asarray(getattr(inputs, name), dtype)
            getattr(layer, name).set_value(LayerVector(stack, number))
    return layer


def run_in_place(part: Router, inputs: Inputs) -> Routing:
    layer = make_layer(part, inputs)
    weight = layer.weight[...]
    assert isinstance(weight, LayerMatrix)
    return layer.route_in_place(jnp.asarray(inputs.logits), weight, jnp.bfloat16)


def expected(part: Router, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """In float64, from logits as they are rounded."""
    logits = inputs.logits
    if part.bias:
        logits = logits + np.asarray(inputs.bias[LAYER], jnp.bfloat16).astype(np.float32)
    wide = np.asarray(logits, jnp.bfloat16).astype(np.float64)
    if part.score == "sigmoid":
        scores = 1 / (1 + np.exp(-wide))
    else:
        power = np.exp(wide - wide.max(-1, keepdims=True))
        scores = power / power.sum(-1, keepdims=True)
    choice = scores + inputs.choice_bias[LAYER] if part.choice_bias else wide
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : part.experts_per_token]
    weights = np.take_along_axis(scores, ids, -1)
    if part.renormalize:
        weights /= weights.sum(-1, keepdims=True)
    weights *= part.scale
    if part.expert_scale:
        scale = np.asarray(inputs.expert_scale[LAYER], jnp.bfloat16).astype(np.float64)
        weights *= scale[ids]
    return ids, weights


def check(part: Router, inputs: Inputs, ids: np.ndarray, weights: np.ndarray) -> None:
    wanted_ids, wanted = expected(part, inputs)
    np.testing.assert_array_equal(ids, wanted_ids)
    rounding = 2.0**-18 if part.float32_weights else 2.0**-8
    np.testing.assert_allclose(np.asarray(weights, np.float64), wanted, rtol=rounding)


@pytest.mark.parametrize("name", PARTS)
def test_the_reference(name: str) -> None:
    inputs = make_inputs(PARTS[name])
    check(PARTS[name], inputs, *jax.jit(lambda: run_in_place(PARTS[name], inputs))())


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
def test_the_kernel(name: str) -> None:
    for seed in range(3):
        inputs = make_inputs(PARTS[name], seed)
        check(PARTS[name], inputs, *jax.jit(lambda i=inputs: run_in_place(PARTS[name], i))())


def call_of(part: Router, inputs: Inputs) -> Call:
    shape = (len(inputs.logits), part.experts_per_token)
    arrays = [inputs.bias, inputs.choice_bias, inputs.expert_scale]
    arrays[0], arrays[2] = (
        np.asarray(a, jnp.bfloat16).astype(np.float32) for a in (arrays[0], arrays[2])
    )
    return Call(
        kernel="moejax.pallas.routing_kernel:route_kernel",
        grid=len(inputs.logits),
        arrays=[
            np.array([LAYER], np.int32),
            # The interpreter's NumPy has no bfloat16 to round to.
            np.asarray(inputs.logits, jnp.bfloat16).astype(np.float32),
            *arrays,
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.float32),
        ],
        constants=routing.constants(
            part, jnp.float32, part.bias, part.choice_bias, part.expert_scale
        ),
    )


def test_the_kernel_in_the_interpreter(tmp_path: pathlib.Path) -> None:
    parts = {n: p for n, p in PARTS.items() if not p.bias}
    calls = [call_of(part, make_inputs(part)) for part in parts.values()]
    broken = make_inputs(PLAIN)
    broken.logits[1, 7] = np.nan
    broken.logits[2] = np.nan
    calls.append(call_of(PLAIN, broken))
    *found, strange = interpret(tmp_path, calls)
    for part, arrays in zip(parts.values(), found, strict=True):
        check(part, make_inputs(part), *arrays[-2:])
    ids, weights = strange[-2:]
    assert ids[1, 0] == 7
    np.testing.assert_array_equal(ids[2], range(4))
    assert np.isnan(weights[1:3]).all()
    assert np.isfinite(np.delete(weights, (1, 2), axis=0)).all()


def test_what_is_not_taken() -> None:
    groups = ExpertGroups(count=4, best=2, kept=2)
    grouped = dataclasses.replace(PLAIN, groups=groups, score="sigmoid")
    mixer = Router(
        num_experts=16,
        experts_per_token=2,
        renormalize=False,
        float32_weights=False,
        score="sparsemixer",
        jitter=0.01,
    )
    assert routing.takes(PLAIN)
    for part in (grouped, mixer):
        assert not routing.takes(part)
        logits = jnp.zeros((1, part.num_experts))
        with pytest.raises(NotImplementedError, match="has no groups and no sparsemixer"):
            routing.route_tokens(
                logits, jnp.int32(0), None, None, None, part=part, dtype=jnp.bfloat16
            )
        # They are routed all the same.
        found = run_in_place(part, make_inputs(part))
        assert found.topk_ids.shape == (TOKENS, part.experts_per_token)


def test_one_launch_on_an_h200() -> None:
    part = PARTS["choice bias"]
    shape = jax.ShapeDtypeStruct

    def program(logits, layer, choice_bias):
        return routing.route_tokens(
            logits, layer, None, choice_bias, None, part=part, dtype=jnp.bfloat16
        )

    compiled = aot.compile_for(
        aot.h200_mesh(),
        program,
        shape((16, 100), jnp.float32),
        shape((), jnp.int32),
        shape((24, 100), jnp.float32),
    )
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 1024
