"""Generates the task of the CPU demo: integer sums with a hidden answer, in four levels.

A prompt is an expression and an equals sign, `12+34=`. The completion that passes is `<answer>46</answer>`. The prompt
does not contain the answer. No held-out expression occurs in the training split or in the policy's warm start, not even
with its terms in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

TRAIN_SIZE = 4096
HELDOUT_SIZE = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """Holds a sum of signed terms. The first is not negative, and no other is zero."""

    terms: tuple[int, ...]
    level: str

    @property
    def prompt(self) -> str:
        """Return the expression as written: `12-34=`."""
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:]) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.terms))

    @property
    def key(self) -> tuple[int, ...]:
        """Return a key that is equal for problems that differ only in the order of their terms."""
        return tuple(sorted(self.terms))

    @property
    def row(self) -> dict[str, Any]:
        """Return its row of the task, without the id."""
        return {"prompt": self.prompt, "answer": self.answer, "level": self.level}


def _one_digit(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(0, 99), rng.choice((1, -1)) * rng.randint(1, 9)


def _addition(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(10, 99), rng.randint(10, 99)


def _subtraction(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(10, 99), -rng.randint(10, 99)


def _three_terms(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(1, 40), rng.choice((1, -1)) * rng.randint(1, 40), rng.choice((1, -1)) * rng.randint(1, 40)


LEVELS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "one_digit": _one_digit,  # add or subtract one digit
    "addition": _addition,  # two numbers of two digits
    "subtraction": _subtraction,  # two numbers of two digits, half of the results negative
    "three_terms": _three_terms,  # three numbers up to 40, mixed signs
}

# Fraction of each level in the warm start. The splits have the same number of each.
LEVEL_SHARES = {"one_digit": 0.2, "addition": 0.2, "subtraction": 0.25, "three_terms": 0.35}


def sample_problem(rng: random.Random, level: str) -> Problem:
    """Draw one problem of `level`, a key of LEVELS."""
    return Problem(LEVELS[level](rng), level)


def wanted_completion(answer: str) -> str:
    """Return the text that passes, without the end token."""
    return f"<answer>{answer}</answer>"


def build_splits(
    seed: int = 20, train_size: int = TRAIN_SIZE, heldout_size: int = HELDOUT_SIZE
) -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems with the same number of each level, in random order.

    No `key` occurs twice, within or across the splits. The sizes must be multiples of the number of levels, and small
    compared with the number of possible problems (1800 of one_digit).
    """
    rng = random.Random(seed)
    train: list[Problem] = []
    heldout: list[Problem] = []
    seen: set[tuple[int, ...]] = set()
    per_level = (train_size + heldout_size) // len(LEVELS)
    for level in LEVELS:
        problems: list[Problem] = []
        while len(problems) < per_level:
            problem = sample_problem(rng, level)
            if problem.key not in seen:
                seen.add(problem.key)
                problems.append(problem)
        heldout += problems[: heldout_size // len(LEVELS)]
        train += problems[heldout_size // len(LEVELS) :]
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def problem_stream(seed: int, excluded: Collection[tuple[int, ...]]) -> Iterable[Problem]:
    """Yield problems without end, harder levels more often, and none whose key is in `excluded`."""
    rng = random.Random(seed)
    while True:
        problem = sample_problem(rng, rng.choices(list(LEVEL_SHARES), list(LEVEL_SHARES.values()))[0])
        if problem.key not in excluded:
            yield problem
