"""Experts in pages at mixed widths, and what they compute in float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from arena.coded import Coded, Placed, Pool, pages_of, place, random_coded
from layers.filled import activated
from moejax.arena import format
from moejax.arena.experts import ExpertBias, Paged
from moejax.arena.geometry import LinearShape, Runs
from moejax.config import Activation, Quantization

BFLOAT16 = format.DTYPES["bfloat16"]


class Case(NamedTuple):
    """A layer of experts and the tokens that go through it."""

    hidden: int = 256
    width: int = 128
    experts: int = 4
    tokens: int = 6
    k: int = 2
    bits: Quantization | None = Quantization(seed_bits=3, parent_bits=5, has_dense=True)
    page_bytes: int = 16384
    host_share: int = 0
    """Every so many-th page lies on the host; 0: none."""
    activation: Activation = "silu"
    has_bias: bool = False
    weights_input: bool = False
    one_expert: bool = False
    """All tokens go to expert 1 first."""
    widths: tuple[tuple[int, int], ...] = ((4, 3), (16, 5), (5, 16), (3, 4))
    """Of gate_up and down, in turn."""


class Experts(NamedTuple):
    """What a case is made of."""

    case: Case
    coded: list[tuple[Coded, Coded]]
    widths: np.ndarray
    paged: dict[str, Any]
    """The arrays of `Paged`."""
    runs: tuple[Runs, Runs]
    bias: ExpertBias | None
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    valid: np.ndarray

    def on_device(self) -> Paged:
        arrays = {k: None if v is None else jnp.asarray(v) for k, v in self.paged.items()}
        if arrays["host"] is not None:
            device = jax.devices()[0]
            pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
            arrays["host"] = jax.device_put(self.paged["host"], pinned)
        return Paged(**arrays, gate_up=self.runs[0], down=self.runs[1])


def make_experts(case: Case, seed: int = 0) -> Experts:
    """Random codes, tables, rows and tokens; pages that nobody owns hold NaN."""
    rng = np.random.default_rng(seed)
    bits = case.bits
    stored = bits or Quantization(seed_bits=3, parent_bits=3, has_dense=True)
    shapes = (
        LinearShape(
            parts=2,
            rows=case.width,
            columns=case.hidden,
            rows_per_table=stored.gate_up_rows_per_table,
        ),
        LinearShape(
            parts=1,
            rows=case.hidden,
            columns=case.width,
            rows_per_table=stored.down_rows_per_table,
        ),
    )
    runs = tuple(
        Runs(shape=shape, dtype="bfloat16", page_bytes=case.page_bytes, quantization=bits)
        for shape in shapes
    )
    pool = Pool(
        1 + case.experts * sum(map(pages_of, runs)) * (2 if case.host_share else 1),
        case.page_bytes // 4,
        host_share=case.host_share,
    )
    coded = [
        tuple(random_coded(shape, stored, 2 * e + n) for n, shape in enumerate(shapes))
        for e in range(case.experts)
    ]
    if bits is None:
        widths = np.full((case.experts, 2), 16, np.int32)
    else:
        widths = np.resize(np.array(case.widths, np.int32), (case.experts, 2))
    slots: list[list[np.ndarray]] = [[], []]
    for e, pair in enumerate(coded):
        for n, (one, of) in enumerate(zip(pair, runs, strict=True)):
            if bits is None:
                placed = Placed(of, {"dense": pool.put(one.runs("bfloat16")["dense"])})
            else:
                placed = place(one, of, pool)
            slots[n].append(placed.slots(int(widths[e, n])))
    topk_ids = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.k]
    if case.one_expert:
        topk_ids[:, 0] = 1
        topk_ids[:, 1:] = np.where(topk_ids[:, 1:] == 1, 0, topk_ids[:, 1:])
    bias = None
    if case.has_bias:
        made = (
            rng.standard_normal((case.experts, n)).astype(BFLOAT16)
            for n in (case.width, case.width, case.hidden)
        )
        bias = ExpertBias(*map(jnp.asarray, made))
    valid = np.ones(case.tokens, np.bool_)
    if case.tokens > 2:
        valid[2] = False
    return Experts(
        case,
        coded,
        widths,
        {
            "pages": pool.arena,
            "host": pool.host if case.host_share else None,
            "gate_up_pages": np.stack(slots[0]),
            "down_pages": np.stack(slots[1]),
            "widths": widths,
        },
        runs,
        bias,
        rng.standard_normal((case.tokens, case.hidden)).astype(BFLOAT16),
        topk_ids.astype(np.int32),
        rng.random((case.tokens, case.k), np.float32),
        valid,
    )


def expected(experts: Experts) -> np.ndarray:
    """The outputs in float64, rounded to bfloat16 between the two products as experts are."""
    case, total = experts.case, np.zeros(experts.x.shape)
    for e, pair in enumerate(experts.coded):
        weight = np.where(experts.topk_ids == e, experts.topk_weights, 0).sum(1).astype(np.float64)
        chosen = ((experts.topk_ids == e).any(1)) & experts.valid
        x = experts.x[chosen].astype(np.float64)
        if case.weights_input:
            narrow = weight[chosen].astype(BFLOAT16).astype(np.float64)
            x = (x * narrow[:, None]).astype(BFLOAT16).astype(np.float64)
        gate_up, down = (
            pair[n].weights(int(experts.widths[e, n]), "bfloat16").astype(np.float64)
            for n in (0, 1)
        )
        gate, up = x @ gate_up[0].T, x @ gate_up[1].T
        if experts.bias is not None:
            gate, up = (
                y + np.asarray(b[e], np.float64)
                for y, b in zip((gate, up), experts.bias[:2], strict=True)
            )
        y = activated(gate, up, case.activation).astype(BFLOAT16).astype(np.float64) @ down[0].T
        if experts.bias is not None:
            y = y + np.asarray(experts.bias.down[e], np.float64)
        total[chosen] += y if case.weights_input else y * weight[chosen][:, None]
    return total


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The norm of the difference over that of what is wanted; NaN stays NaN."""
    found = np.asarray(found, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
