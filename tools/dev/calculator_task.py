"""Generates the task of the tool demo: questions such as `What is 27*46-19?`, in four levels.

A level is the number of calls that a calculator needs which computes one operation at a time. Level 0 adds a number of
one digit to a round one, as in `340+7`, which a small model can do by itself. No held-out expression occurs in the
training split or in the policy's warm start, not even with its factors or terms in another order.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

TRAIN_SIZE = 4096
HELDOUT_SIZE = 256

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Problem:
    """Holds an expression: numbers, and the operations between them."""

    numbers: tuple[int, ...]
    signs: tuple[str, ...]
    level: str

    @property
    def expression(self) -> str:
        """Return the expression as written: `27*46-19`."""
        return str(self.numbers[0]) + "".join(f"{s}{n}" for s, n in zip(self.signs, self.numbers[1:], strict=True))

    @property
    def question(self) -> str:
        return f"What is {self.expression}?"

    @cached_property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Return the single operations in their order, products first, and the result of each."""
        numbers, signs, found = list(self.numbers), list(self.signs), []
        while signs:
            at = signs.index("*") if "*" in signs else 0
            result = _OPERATIONS[signs[at]](numbers[at], numbers[at + 1])
            found.append((f"{numbers[at]}{signs[at]}{numbers[at + 1]}", str(result)))
            numbers[at : at + 2] = [result]
            del signs[at]
        return tuple(found)

    @property
    def answer(self) -> str:
        return self.steps[-1][1]

    @property
    def key(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return a key that is equal for expressions that differ only in the order of factors or terms."""
        terms = [("+", [self.numbers[0]])]
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            if sign == "*":
                terms[-1][1].append(number)
            else:
                terms.append((sign, [number]))
        return tuple(sorted((sign, tuple(sorted(factors))) for sign, factors in terms))

    @property
    def row(self) -> dict[str, Any]:
        """Return its row of the task, without the id."""
        return {
            "question": self.question,
            "answer": self.answer,
            "level": self.level,
            "calls": int(self.level),
        }


def _round_sum(rng: random.Random) -> Problem:
    return Problem((10 * rng.randint(1, 99), rng.randint(1, 9)), ("+",), "0")


def _product(rng: random.Random) -> Problem:
    return Problem((rng.randint(12, 99), rng.randint(12, 99)), ("*",), "1")


def _product_and_more(rng: random.Random) -> Problem:
    sign = rng.choice("+-*")
    more = rng.randint(3, 9) if sign == "*" else rng.randint(100, 999)
    return Problem((rng.randint(12, 99), rng.randint(12, 99), more), ("*", sign), "2")


def _two_products(rng: random.Random) -> Problem:
    numbers = tuple(rng.randint(12, 99) for _ in range(4))
    return Problem(numbers, ("*", rng.choice("+-"), "*"), "3")


LEVELS: dict[str, Callable[[random.Random], Problem]] = {
    "0": _round_sum,
    "1": _product,
    "2": _product_and_more,
    "3": _two_products,
}


def build_splits(seed: int = 30) -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems in random order, with the same number of each level.

    No held-out `key` occurs in the training split, nor twice among the held-out problems.
    """
    rng = random.Random(seed)
    train: list[Problem] = []
    heldout: list[Problem] = []
    for make in LEVELS.values():
        kept: dict[object, Problem] = {}
        while len(kept) < HELDOUT_SIZE // len(LEVELS):
            problem = make(rng)
            kept.setdefault(problem.key, problem)
        heldout += kept.values()
        trained: list[Problem] = []
        while len(trained) < TRAIN_SIZE // len(LEVELS):
            if (problem := make(rng)).key not in kept:
                trained.append(problem)
        train += trained
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def problem_stream(seed: int, excluded: Collection[object]) -> Iterator[Problem]:
    """Yield problems without end, each level as often, and none whose key is in `excluded`."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(list(LEVELS.values()))(rng)
        if problem.key not in excluded:
            yield problem
