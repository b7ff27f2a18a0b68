"""The decoder's weights as a dictionary, and back."""

import jax
import jax.numpy as jnp
import numpy as np

from models.small_configs import HIDDEN, VOCAB, make_config
from models.small_model import make_model
from moejax.models.decoder import (
    abstract_params,
    bind,
    flatten_params,
    params_bytes,
    unflatten_params,
)


def test_names_say_segment_kind_and_part() -> None:
    shapes = {
        name: leaf.shape
        for name, leaf in flatten_params(abstract_params(make_config("abcbc"), "float32")).items()
    }
    assert shapes["embed.weight"] == shapes["head.weight"] == (VOCAB, HIDDEN)
    assert shapes["segments.0.0.feed_forward.gate.weight"] == (1, 14, HIDDEN)
    assert shapes["segments.0.0.attention.q.bias"] == (1, 24)
    assert shapes["segments.1.0.attention.k.weight"] == (2, 6, HIDDEN)  # both repeats
    assert shapes["segments.1.0.attention.k_norm.weight"] == (2, 6)
    assert shapes["segments.1.0.feed_forward.shared.router.weight"] == (2, 1, HIDDEN)
    assert shapes["segments.1.1.attention.q_norm.weight"] == (2, 24)
    assert shapes["segments.1.1.feed_forward.router.weight"] == (2, 5, HIDDEN)
    assert "segments.1.1.feed_forward.shared.gate.weight" not in shapes
    assert len(shapes) == 3 + 13 + 13 + 9


def test_params_come_back_from_their_names() -> None:
    params = make_model("b").params
    named = flatten_params(params)
    shuffled = {name: named[name] for name in sorted(named, reverse=True)}
    found = unflatten_params(shuffled, abstract_params(make_config("b"), "float32"))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert one is other


def test_a_bound_decoder_has_these_weights() -> None:
    model = make_model("b")
    decoder = bind(model.config, model.dtype, model.params)
    assert decoder.embed.weight[...] is model.params["embed"]["weight"]
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, HIDDEN), np.float32))
    wanted = np.asarray(hidden) @ np.asarray(model.params["head"]["weight"]).T
    np.testing.assert_allclose(decoder.logits(hidden), wanted, atol=1e-5)


def test_bytes_are_counted_of_arrays_and_of_shapes() -> None:
    values = sum(leaf.size for leaf in jax.tree.leaves(make_model("b").params))
    assert params_bytes(make_model("b").params) == 4 * values
    assert params_bytes(abstract_params(make_config("b"), "bfloat16")) == 2 * values
