"""The comparison with references can fail: one wrong rule in a forward pass does not pass it.

shared/tiny_models holds an independent NumPy forward pass and a list of rules to break in it, one
at a time. Each broken one must fail the comparator that judges our logits.
"""

import ast
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import references

# The forward pass over there leaves files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Mutant = tuple[str, str, Callable[[Any], Callable[[], None] | None]]
NUM_MUTANTS = 44


@pytest.fixture(scope="module")
def mutants(shared_dir: pathlib.Path, numpy_forward: ModuleType) -> list[Mutant]:
    """(tiny model, rule, what breaks it and perhaps gives back what mends it)"""
    path = shared_dir / "tiny_models" / "sensitivity.py"
    script = ast.parse(path.read_text())
    # The script's own `run` prints; ours lists.
    script.body = [
        node
        for node in script.body
        if not (isinstance(node, ast.FunctionDef) and node.name == "run")
    ]
    found: list[Mutant] = []
    names = {"run": lambda *mutant: found.append(mutant), "__file__": str(path)}
    before = list(sys.path), list(sys.argv)
    sys.argv = [str(path)]
    try:
        exec(compile(script, str(path), "exec"), names)
    finally:
        sys.path[:], sys.argv = before
    return found


def test_there_are_44(mutants: list[Mutant]) -> None:
    assert len(mutants) == NUM_MUTANTS
    assert len({mutant[:2] for mutant in mutants}) == NUM_MUTANTS


def test_the_unbroken_forward_pass_is_accepted(
    shared_dir: pathlib.Path, numpy_forward: ModuleType, mutants: list[Mutant]
) -> None:
    for name in sorted({name for name, _, _ in mutants}):
        reference = references.read_reference(shared_dir, name)
        model = numpy_forward.Model(str(references.tiny_model(shared_dir, name)))
        references.assert_logits_equal(model(reference["input_ids"]), reference["logits"])


@pytest.mark.parametrize("number", range(NUM_MUTANTS))
def test_a_broken_rule_is_refused(
    shared_dir: pathlib.Path, numpy_forward: ModuleType, mutants: list[Mutant], number: int
) -> None:
    name, rule, break_it = mutants[number]
    reference = references.read_reference(shared_dir, name)
    model = numpy_forward.Model(str(references.tiny_model(shared_dir, name)))
    mend = break_it(model)
    try:
        logits = model(reference["input_ids"])
    finally:
        if mend is not None:
            mend()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        references.assert_logits_equal(logits, reference["logits"])
        pytest.fail(f"{name}: {rule} was not noticed")
