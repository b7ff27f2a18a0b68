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
    nest_params,
    params_bytes,
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


def names_of(config_name: str, segment: str) -> dict[str, tuple[int, ...]]:
    """Name → shape, of the first kind of a segment, without what all names begin with."""
    named = flatten_params(abstract_params(make_config(config_name), "float32"))
    start = f"segments.{segment}.0."
    return {
        name[len(start) :]: leaf.shape for name, leaf in named.items() if name.startswith(start)
    }


def test_names_of_latent_attention_and_a_router_with_a_choice_bias() -> None:
    names = names_of("deepseek", "1")
    attention = {
        "q_down.weight": (2, 12, HIDDEN),
        "q_latent_norm.weight": (2, 12),
        "q_up.weight": (2, 4 * 10, 12),
        "kv_down.weight": (2, 14, HIDDEN),
        "latent_norm.weight": (2, 10),
        "k_up": (2, 4, 6, 10),
        "v_up": (2, 4, 5, 10),
        "o.weight": (2, HIDDEN, 4 * 5),
    }
    for name, shape in attention.items():
        assert names.pop(f"attention.{name}") == shape
    assert names.pop("feed_forward.router.choice_bias") == (2, 8)
    assert sorted(names) == [
        "attention_norm.weight",
        "feed_forward.router.weight",
        "feed_forward.shared.down.weight",
        "feed_forward.shared.gate.weight",
        "feed_forward.shared.up.weight",
        "feed_forward_norm.weight",
    ]


def test_names_of_an_mlp_beside_experts() -> None:
    names = names_of("gemma", "1")
    assert sorted(name for name in names if not name.startswith("attention.")) == [
        "attention_norm.weight",
        "attention_post_norm.weight",
        "feed_forward.mlp.down.weight",
        "feed_forward.mlp.gate.weight",
        "feed_forward.mlp.up.weight",
        "feed_forward.mlp_norm.weight",
        "feed_forward.mlp_post_norm.weight",
        "feed_forward.moe.router.expert_scale",
        "feed_forward.moe.router.input_scale",
        "feed_forward.moe.router.weight",
        "feed_forward.moe_norm.weight",
        "feed_forward.moe_post_norm.weight",
        "feed_forward_post_norm.weight",
        "output_scale",
    ]
    assert names["output_scale"] == (1, 1)
    assert "attention.v.weight" not in names and "attention.k_norm.weight" in names


def test_names_of_sinks_and_of_biases_of_experts() -> None:
    names = names_of("gpt-oss", "0")
    assert names["attention.sinks"] == (2, 4)
    assert names["attention.o.bias"] == (2, HIDDEN)
    assert names["feed_forward.router.bias"] == (2, 5)
    assert names["feed_forward.expert_bias.gate"] == (2, 5, 9)
    assert names["feed_forward.expert_bias.up"] == (2, 5, 9)
    assert names["feed_forward.expert_bias.down"] == (2, 5, HIDDEN)


def test_params_come_back_from_their_names() -> None:
    params = make_model("b").params
    named = flatten_params(params)
    shuffled = {name: named[name] for name in sorted(named, reverse=True)}
    found = nest_params(shuffled)
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
