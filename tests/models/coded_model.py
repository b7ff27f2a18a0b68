"""A small model whose experts, attention and shared experts are nested codes, and its arena."""

import re
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from arena.coded import Coded, random_coded
from models.small_model import PAGE_BYTES, Arena, Model, make_model
from moejax.arena import format
from moejax.arena.geometry import Runs, linear_shape, make_geometry
from moejax.arena.widths import Widths
from moejax.config import Quantization
from moejax.layers.experts import Stacked
from moejax.models.decoder import flatten_params, nest_params

NAME = "bcbc"
CODED = re.compile(
    r"segments\.\d+\.\d+\.(attention\.\w+|feed_forward\.shared\.(gate|up|down))\.weight"
)


class CodedModel(NamedTuple):
    """`model` has the geometry of the codes, and only the weights that are not coded."""

    model: Model
    experts: list[list[tuple[Coded, Coded]]]
    """[layer][expert]: gate_up, down"""
    linears: list[Coded]
    """As the geometry numbers them."""

    def decoded(self, widths: Widths) -> Model:
        """The same with plain weights at some widths."""
        plain, geometry = make_model(NAME), self.model.geometry
        named = dict(flatten_params(plain.params))
        for tensor in geometry.linears:
            numbers = range(tensor.first, tensor.first + tensor.repeats)
            matrices = [self.linears[n].weights(int(widths.linears[n]))[0] for n in numbers]
            named[tensor.name] = jnp.asarray(np.stack(matrices))
        stacked = {}
        for number, layer in enumerate(plain.config.moe_layers):
            gate_up, down = (
                np.stack(
                    [
                        pair[which].weights(int(widths.experts[number, e, which]))
                        for e, pair in enumerate(self.experts[number])
                    ]
                )
                for which in (0, 1)
            )
            stacked[layer] = Stacked(jnp.asarray(gate_up), jnp.asarray(down[:, 0]))
        return Model(plain.config, plain.geometry, nest_params(named), stacked)


@cache
def make_coded() -> CodedModel:
    plain = make_model(NAME)
    named = flatten_params(plain.params)
    tensors = {
        name: leaf.shape for name, leaf in named.items() if CODED.fullmatch(name) and leaf.ndim == 3
    }
    bits = Quantization(
        seed_bits=2,
        parent_bits=4,
        gate_up_rows_per_table=2,
        down_rows_per_table=64,
        linears=tuple((name, 4) for name in sorted(tensors)),
        has_dense=True,
    )
    geometry = make_geometry(plain.config, plain.dtype, PAGE_BYTES, bits, tensors)
    rest = {name: leaf for name, leaf in named.items() if name not in tensors}
    model = Model(plain.config, geometry, nest_params(rest), {})
    shapes = geometry.gate_up, geometry.down
    experts = [
        [
            tuple(
                random_coded(shape, bits, 1000 * layer + 2 * e + n)
                for n, shape in enumerate(shapes)
            )
            for e in range(geometry.num_experts)
        ]
        for layer in range(geometry.num_moe_layers)
    ]
    linears = []
    for tensor in geometry.linears:
        shape = linear_shape(bits, tensor.name, tensors[tensor.name])
        assert shape == tensor.shape
        linears += [
            random_coded(shape, bits, 7000 + tensor.first + n) for n in range(tensor.repeats)
        ]
    return CodedModel(model, experts, linears)


class CodedArena(Arena):
    """Holds all runs of all linears; the tables name what is resident at some widths."""

    def __init__(self, widths: Widths) -> None:
        self._widths = widths
        self.coded = make_coded()
        super().__init__(NAME)

    def _make_model(self, name: str, dtype: str) -> Model:
        return self.coded.model

    def _all(self) -> list[tuple[Coded, Runs]]:
        geometry = self.model.geometry
        found = [
            (one, runs)
            for layer in self.coded.experts
            for pair in layer
            for one, runs in zip(pair, geometry.expert_runs, strict=True)
        ]
        return found + [(one, geometry.runs_of(one.shape)) for one in self.coded.linears]

    def _weight_pages(self) -> int:
        return sum(runs.pages(name) for _, runs in self._all() for name in runs.sizes)

    def _store_weights(self, pages: np.ndarray) -> dict[str, np.ndarray]:
        geometry = self.model.geometry
        # Linear → run → its pages, experts' first.
        self.ids: list[dict[str, list[int]]] = []
        for one, runs in self._all():
            of_linear = {}
            for name, run in one.runs(runs.dtype).items():
                values = format.to_pages(run, geometry.page_words)
                ids = [self._free_pages.pop() for _ in values]
                pages[ids] = values
                of_linear[name] = ids
            self.ids.append(of_linear)
        gate_up, down = geometry.expert_runs
        shape = self._widths.experts.shape[:2]
        tables = {
            "gate_up_pages": np.zeros((*shape, gate_up.num_slots), np.int32),
            "down_pages": np.zeros((*shape, down.num_slots), np.int32),
            "widths": self._widths.experts,
            "linear_pages": np.zeros((geometry.num_linears, geometry.linear_slots), np.int32),
            "linear_widths": self._widths.linears,
        }
        for layer, expert in np.ndindex(*shape):
            for which, name in enumerate(("gate_up_pages", "down_pages")):
                width = int(self._widths.experts[layer, expert, which])
                for slot, page in self.slots(self.number(layer, expert, which), width).items():
                    tables[name][layer, expert, slot] = page
        for n, width in enumerate(self._widths.linears.tolist()):
            for slot, page in self.slots(self.number(None, n, 0), width).items():
                tables["linear_pages"][n, slot] = page
        return tables

    def number(self, layer: int | None, expert: int, which: int) -> int:
        """The place in `ids` of a linear; `layer` None: of one that is no expert's."""
        geometry = self.model.geometry
        count = 2 * geometry.num_moe_layers * geometry.num_experts
        if layer is None:
            return count + expert
        return 2 * (layer * geometry.num_experts + expert) + which

    def slots(self, number: int, width: int) -> dict[int, int]:
        """Slot → page, of what is resident at a width."""
        _, runs = self._all()[number]
        return {
            runs.first_slot(name) + n: page
            for name in runs.resident(width)
            for n, page in enumerate(self.ids[number][name])
        }
