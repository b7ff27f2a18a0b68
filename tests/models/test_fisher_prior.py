"""What stands in for F of experts that few tokens chose."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moejax.models.fisher import LayerFisher, with_prior


def fisher_of(gate_up: np.ndarray, down: np.ndarray, tokens: list[int]) -> LayerFisher:
    return LayerFisher(
        layer=3,
        gate_up=gate_up,
        down=down,
        tokens=np.array(tokens, np.int64),
        linears={"attention.q.weight": np.ones((2, 2), np.float32)},
    )


def test_a_prior_by_hand() -> None:
    # Per token and weight: 6 * 12 / (18 * 12) in gate_up, 3 * 6 / (18 * 6) in down.
    gate_up = np.stack([np.full((2, 2, 3), f, np.float32) for f in (4, 2, 0)])
    down = np.stack([np.full((3, 2), f, np.float32) for f in (1, 2, 0)])
    found, few = with_prior(fisher_of(gate_up, down, [10, 8, 0]), least_tokens=10)
    assert few == [1, 2]
    for values, wanted in (
        (found.gate_up, [4, 2 + 2 / 3, 10 / 3]),
        (found.down, [1, 2 + 2 / 6, 10 / 6]),
    ):
        for expert, value in zip(np.asarray(values), wanted, strict=True):
            np.testing.assert_allclose(expert, value, rtol=1e-6)


# Squares that a float32 holds, and that it still holds divided by the tokens.
squares = st.just(0.0) | st.floats(2.0**-60, 2.0**10, width=32)
small_fishers = st.sampled_from([1, 3]).flatmap(
    lambda experts: st.builds(
        fisher_of,
        *(
            arrays.arrays(np.float32, (experts, *shape), elements=squares)
            for shape in ((2, 2, 3), (3, 2))
        ),
        tokens=st.lists(
            st.sampled_from([0, 0, 1, 63, 64, 500]), min_size=experts, max_size=experts
        ),
    )
)


@given(fisher=small_fishers)
def test_a_prior_makes_up_for_missing_tokens_only(fisher: LayerFisher) -> None:
    found, few = with_prior(fisher)
    assert few == [e for e, n in enumerate(fisher.tokens) if n < 64]
    assert found.layer == fisher.layer and found.linears is fisher.linears
    assert found.tokens.tolist() == fisher.tokens.tolist()
    for values, before in ((found.gate_up, fisher.gate_up), (found.down, fisher.down)):
        after, before = np.asarray(values), np.asarray(before)
        assert after.dtype == np.float32
        if not fisher.tokens.any():
            assert (after == 1).all()
            continue
        enough = fisher.tokens >= 64
        np.testing.assert_array_equal(after[enough], before[enough])
        mean = before.astype(np.float64).sum() / (fisher.tokens.sum() * before[0].size)
        for e in few:
            added = mean * (64 - fisher.tokens[e])
            np.testing.assert_allclose(after[e], before[e] + added, rtol=1e-5)
        if mean > 0:
            assert (after[few] > 0).all()


def test_a_prior_leaves_a_layer_without_experts_alone() -> None:
    shapes = (0, 2, 2, 3), (0, 3, 2)
    fisher = fisher_of(*(np.zeros(shape, np.float32) for shape in shapes), tokens=[])
    assert with_prior(fisher) == (fisher, [])
