"""Widths of all linears: their pages and bytes, and the file that holds them."""

import copy
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from arena.coded import widths_to_json
from models.small_configs import make_config
from moejax.arena.geometry import make_geometry, width_bytes
from moejax.arena.widths import (
    Widths,
    check_width,
    uniform,
    widths_from_json,
)
from moejax.config import Quantization
from moejax.errors import ConfigError

QUERY, OUT = "segments.0.0.attention.q.weight", "segments.0.0.attention.o.weight"
BITS = Quantization(
    seed_bits=3,
    parent_bits=5,
    gate_up_rows_per_table=2,
    down_rows_per_table=64,
    linears=((OUT, 1), (QUERY, 64)),
    has_dense=True,
)
CONFIG = make_config("bb")  # 5 experts: gate_up 2 x 9 x 24, down 24 x 9
TENSORS = {QUERY: (2, 24, 24), OUT: (2, 24, 24)}
GEOMETRY = make_geometry(CONFIG, "float32", 2048, BITS, TENSORS)
PLAIN = make_geometry(CONFIG, "float32", 2048)
CODES = make_geometry(CONFIG, "float32", 2048, dataclasses.replace(BITS, has_dense=False), TENSORS)


# Sizes.


def test_sizes_by_hand() -> None:
    gate_up, down = GEOMETRY.expert_runs
    # A plane of gate_up has 128 rows of 4 words; a table of 3 bits 64 times 8 values.
    assert width_bytes(gate_up.shape, gate_up.dtype, gate_up.quantization, 3) == 3 * 2048 + 1024
    assert (
        width_bytes(gate_up.shape, gate_up.dtype, gate_up.quantization, 5) == 5 * 2048 + 64 * 32 * 2
    )
    assert gate_up.pages_at(3) == 3 + 1
    assert gate_up.pages_at(4) == 4 + 1 + 1  # with the table of 3 bits
    assert gate_up.pages_at(5) == 5 + 2 + 1
    assert (
        width_bytes(gate_up.shape, gate_up.dtype, gate_up.quantization, 16) == 128 * 24 * 4
        and gate_up.pages_at(16) == 6
    )
    assert gate_up.pages_at(0) == 0
    # One table for all rows, of 1 KiB at any width.
    assert width_bytes(down.shape, down.dtype, down.quantization, 4) == 4 * 1024 + 1024
    assert down.pages_at(4) == 4 + 2
    assert gate_up.num_slots == max(6, 5 + 1 + 1 + 2)
    assert [gate_up.first_slot(f"table.{b}") for b in (3, 4, 5)] == [5, 6, 7]
    assert gate_up.first_slot("plane.2") == 2 and gate_up.first_slot("dense") == 0


def test_a_model_that_is_not_quantised_has_one_run_and_one_width() -> None:
    gate_up, _ = PLAIN.expert_runs
    assert dict(gate_up.sizes) == {"dense": 128 * 24 * 4}
    assert gate_up.num_slots == 6 and PLAIN.widths == (16,)
    assert PLAIN.num_linears == PLAIN.linear_slots == 0
    with pytest.raises(ValueError, match="there are no tables"):
        gate_up.table_slot(3)


def test_slots_of_runs_do_not_overlap() -> None:
    for geometry in (GEOMETRY, CODES, PLAIN):
        runs = [*geometry.expert_runs, *(geometry.runs_of(t.shape) for t in geometry.linears)]
        for of_linear in runs:
            for names in ({"dense"}, set(of_linear.sizes) - {"dense"}):
                taken = [
                    of_linear.first_slot(name) + n
                    for name in names & set(of_linear.sizes)
                    for n in range(of_linear.pages(name))
                ]
                assert len(set(taken)) == len(taken)
                assert all(0 <= slot < of_linear.num_slots for slot in taken)


def test_other_linears_are_numbered_by_name_and_layer() -> None:
    assert [(t.name, t.first, t.repeats) for t in GEOMETRY.linears] == [(OUT, 0, 2), (QUERY, 2, 2)]
    assert GEOMETRY.num_linears == 4
    of_o, of_q = (GEOMETRY.runs_of(t.shape) for t in GEOMETRY.linears)
    assert (of_o.shape.rows_per_table, of_q.shape.rows_per_table) == (1, 64)
    assert GEOMETRY.linear_slots == max(of_o.num_slots, of_q.num_slots) > of_q.num_slots


def test_pages_are_sums_over_linears() -> None:
    rng = np.random.default_rng(0)
    choices = np.array(GEOMETRY.widths, np.int32)
    widths = Widths(choices[rng.integers(0, 4, (2, 5, 2))], choices[rng.integers(0, 4, 4)])
    pages = 0
    for at in np.ndindex(2, 5, 2):
        runs, width = GEOMETRY.expert_runs[at[2]], int(widths.experts[at])
        pages += runs.pages_at(width)
    for number, width in enumerate(widths.linears.tolist()):
        runs = GEOMETRY.runs_of(GEOMETRY.linears[number // 2].shape)
        pages += runs.pages_at(width)
    assert widths.pages(GEOMETRY) == pages


def test_a_summary_counts_the_linears_of_each_width() -> None:
    assert uniform(GEOMETRY, 4, 16).summary() == "16 bits: 4, 4 bits: 20"
    assert uniform(PLAIN, 16).summary() == "16 bits: 20"


# Refusals.


@pytest.mark.parametrize(
    ("geometry", "width", "message"),
    [
        (GEOMETRY, 6, "expert_bits 6: the model is stored with 5 bits at most, and 16"),
        (
            CODES,
            16,
            "expert_bits 16: the model is stored with 5 bits at most: "
            "moejax-convert --keep-dense stores width 16 too",
        ),
        (CODES, 2, "expert_bits 2: the model is stored with 3 bits at least"),
        (
            PLAIN,
            4,
            "expert_bits 4: the model is not quantised and has width 16 only: "
            "moejax-convert --quantize any-precision stores it at others",
        ),
    ],
)
def test_a_width_that_is_not_stored_is_refused(geometry: Any, width: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_width(geometry, width, "expert_bits")


def test_widths_that_are_stored_are_not_refused() -> None:
    for geometry in (GEOMETRY, CODES, PLAIN):
        for width in geometry.widths:
            check_width(geometry, width, "expert_bits")


# Files.


def some_widths() -> Widths:
    rng = np.random.default_rng(1)
    choices = np.array(GEOMETRY.widths, np.int32)
    return Widths(choices[rng.integers(0, 4, (2, 5, 2))], np.array([3, 16, 4, 5], np.int32))


def test_a_file_of_widths_comes_back() -> None:
    widths = some_widths()
    data = json.loads(json.dumps(widths_to_json(widths, GEOMETRY)))
    assert data["linears"] == {OUT: [3, 16], QUERY: [4, 5]}
    found = widths_from_json(data, GEOMETRY, "w.json")
    np.testing.assert_array_equal(found.experts, widths.experts)
    np.testing.assert_array_equal(found.linears, widths.linears)
    assert found.experts.dtype == found.linears.dtype == np.int32


def test_linears_may_be_left_out_where_there_are_none() -> None:
    only = make_geometry(CONFIG, "float32", 2048, dataclasses.replace(BITS, linears=()))
    data = {"experts": some_widths().experts.tolist()}
    assert widths_from_json(data, only, "w.json").linears.shape == (0,)
    with pytest.raises(ConfigError, match=r"^w\.json: linears must be \['segments"):
        widths_from_json(data, GEOMETRY, "w.json")


def broken(*path: Any, value: Any) -> Any:
    """A file of widths with one place changed."""
    data = copy.deepcopy(widths_to_json(some_widths(), GEOMETRY))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "needs the key experts, and linears where"),
        ({}, "needs the key experts, and linears where"),
        ({"linears": {}}, "needs the key experts, and linears where"),
        (broken("more", value=1), "needs the key experts, and linears where"),
        (broken("experts", value=[[[3, 3]]]), "experts must be lists of 2 x 5 x 2 widths"),
        (broken("experts", 1, value=3), "experts must be lists of 2 x 5 x 2 widths"),
        (broken("experts", 1, 4, value=[3]), "experts must be lists of 2 x 5 x 2 widths"),
        (broken("experts", 1, 4, 0, value=3.0), "experts must hold whole numbers from 2 to 16"),
        (broken("experts", 1, 4, 0, value=True), "experts must hold whole numbers from 2 to 16"),
        (broken("experts", 1, 4, 0, value=-3), "experts must hold whole numbers from 2 to 16"),
        (broken("experts", 1, 4, 0, value=10**30), "experts must hold whole numbers from 2 to"),
        (broken("experts", 1, 4, 0, value=6), "width 6: the model is stored with 5 bits at most"),
        (broken("experts", 1, 4, 0, value=2), "width 2: the model is stored with 3 bits at least"),
        (broken("experts", 0, 0, 1, value=0), "width 0: the model is stored with 3 bits at least"),
        (broken("linears", value=[3, 3]), "linears must be ['segments"),
        (broken("linears", "x", value=[3]), "linears must be ['segments"),
        (broken("linears", QUERY, value=[3]), f"{QUERY} must be lists of 2 widths"),
        (broken("linears", QUERY, 0, value=7), "width 7: the model is stored with 5 bits at most"),
        (broken("linears", QUERY, 0, value="3"), f"{QUERY} must hold whole numbers from 2 to 16"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^w\.json: {re.escape(message)}") as error:
        widths_from_json(data, GEOMETRY, "w.json")
    assert "\n" not in str(error.value)
