"""What quality is measured on: texts in windows, last words, and multiple choice.

All of it is the log-probability of given tokens after given ones, so all of it is `Item`s.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

Encode = Callable[[str], list[int]]
LONGEST = 1024
"""Tokens of an item; the beginning of a longer context is cut off."""
MULTIPLE_CHOICE = ("arc_easy", "piqa", "openbook_qa", "copa", "boolq")


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """Tokens, of which those from `start` on are scored."""

    tokens: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Items, and what they say of a model."""

    name: str
    kind: str
    """windows, last_word or choice."""
    items: tuple[Item, ...]
    questions: tuple[tuple[int, int, int], ...] = ()
    """Of multiple choice: first item, number of choices, which of them is right."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Of one item."""

    logprob: float
    """Sum over its scored tokens."""
    is_greedy: bool
    """Whether each of them was the most probable one."""
    divergence: float
    """Sum over the scored places of the Kullback-Leibler divergence from the plain model, nats."""


def windows(name: str, text: str, encode: Encode, *, characters: int, size: int) -> Task:
    """Consecutive full windows of a text's beginning; all but the first token are scored."""
    ids = encode(text[:characters])
    parts = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    return Task(name=name, kind="windows", items=tuple(Item(tuple(part), 1) for part in parts))


def last_words(path: pathlib.Path, encode: Encode, *, limit: int, longest: int) -> Task:
    """LAMBADA: the last word after its context."""
    items = []
    for row in _rows(path)[:limit]:
        items.append(_item(row["context"], " " + row["continuation"].strip(), encode, longest))
    return Task(name=path.stem, kind="last_word", items=tuple(items))


def choices(path: pathlib.Path, encode: Encode, *, limit: int, longest: int) -> Task:
    """Every choice of every question, each after the question."""
    items: list[Item] = []
    questions = []
    for row in _rows(path)[:limit]:
        questions.append((len(items), len(row["choices"]), row["gold"]))
        items += [_item(row["query"], " " + c.strip(), encode, longest) for c in row["choices"]]
    return Task(name=path.stem, kind="choice", items=tuple(items), questions=tuple(questions))


def losses(task: Task, scores: Sequence[Score]) -> np.ndarray:
    """Nats: per token of each window, of each last word, or of each question's right choice.

    The probability of a choice is its share among those of all choices of the question.
    """
    if task.kind == "choice":
        found = []
        for first, count, gold in task.questions:
            logprobs = np.array([score.logprob for score in scores[first : first + count]])
            top = logprobs.max()
            found.append(top + math.log(np.exp(logprobs - top).sum()) - logprobs[gold])
        return np.array(found)
    if task.kind == "last_word":
        return np.array([-score.logprob for score in scores])
    counts = [len(item.tokens) - item.start for item in task.items]
    return np.array([-s.logprob / n for s, n in zip(scores, counts, strict=True)])


def divergences(task: Task, scores: Sequence[Score]) -> np.ndarray:
    """Nats per token of each item: how far predictions moved, for better or worse.

    A loss alone can fall where a model was too sure of itself; this cannot.
    """
    counts = [len(item.tokens) - item.start for item in task.items]
    return np.array([s.divergence / n for s, n in zip(scores, counts, strict=True)])


def accuracy(task: Task, scores: Sequence[Score]) -> float | None:
    """The share of right answers, where there are answers."""
    if task.kind == "choice":
        right = [
            int(np.argmax([score.logprob for score in scores[first : first + count]])) == gold
            for first, count, gold in task.questions
        ]
        return float(np.mean(right))
    if task.kind == "last_word":
        return float(np.mean([score.is_greedy for score in scores]))
    return None


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Mean of paired differences, and half of its 95 % interval (normal approximation)."""
    half = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences))
    return float(differences.mean()), float(half)


def _item(context: str, continuation: str, encode: Encode, longest: int) -> Item:
    """As lm-eval: context and continuation are tokenised together; too long a context is cut."""
    before, whole = encode(context.rstrip()), encode(context.rstrip() + continuation)
    first = min(len(before), len(whole) - 1)
    cut = max(0, len(whole) - longest)
    return Item(tuple(whole[cut:]), max(1, first - cut))


def _rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
