"""The task of the CPU default: integer sums with a hidden answer, in four levels, split so that held-out means unseen.

A prompt is an expression and an equals sign, `12+34=`. The completion that passes is `<answer>46</answer>`. Nothing in
a prompt tells the answer, and no held-out expression, nor one that only orders its terms differently, is in the
training split or in the warm start of the policy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

TRAIN_SIZE = 4096
HELDOUT_SIZE = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of signed terms; the first is not negative and none of the others is zero."""

    terms: tuple[int, ...]
    level: str

    @property
    def prompt(self) -> str:
        """The expression as written: `12-34=`."""
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:]) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.terms))

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for problems that differ only in the order of their terms."""
        return tuple(sorted(self.terms))


def _one_digit(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(0, 99), rng.choice((1, -1)) * rng.randint(1, 9)


def _addition(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(10, 99), rng.randint(10, 99)


def _subtraction(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(10, 99), -rng.randint(10, 99)


def _three_terms(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(1, 40), rng.choice((1, -1)) * rng.randint(1, 40), rng.choice((1, -1)) * rng.randint(1, 40)


LEVELS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "1": _one_digit,  # add or take away one digit
    "2": _addition,  # two numbers of two digits
    "3": _subtraction,  # two numbers of two digits, half of the results negative
    "4": _three_terms,  # three numbers up to 40, mixed signs
}

# Shares in the warm start; the splits have as many of each.
LEVEL_SHARES = {"1": 0.2, "2": 0.2, "3": 0.25, "4": 0.35}


def sample_problem(rng: random.Random, level: str) -> Problem:
    """Draw one problem of `level`, a key of LEVELS."""
    return Problem(LEVELS[level](rng), level)


def wanted_completion(answer: str) -> str:
    """The text that passes, without the end token."""
    return f"<answer>{answer}</answer>"


def build_splits(
    seed: int = 20, train_size: int = TRAIN_SIZE, heldout_size: int = HELDOUT_SIZE
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, as many of each level, in random order; no `key` occurs twice in both together.

    The sizes are multiples of the number of levels and small against the problems there are (1800 at level 1).
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
    """Endless problems, the harder levels more often, none whose key is in `excluded`."""
    rng = random.Random(seed)
    while True:
        problem = sample_problem(rng, rng.choices(list(LEVEL_SHARES), list(LEVEL_SHARES.values()))[0])
        if problem.key not in excluded:
            yield problem


def write_jsonl(path: Path, split: str, problems: list[Problem]) -> None:
    """One line a problem: id (`split-00000`), prompt, answer, level."""
    with path.open("w", encoding="ascii") as file:
        for number, problem in enumerate(problems):
            row = {"id": f"{split}-{number:05d}", "prompt": problem.prompt, "answer": problem.answer}
            file.write(json.dumps(row | {"level": problem.level}) + "\n")
