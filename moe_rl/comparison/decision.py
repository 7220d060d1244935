"""Decides whether replay lowers the policy KL, from the paired difference of k3, native less replayed.

The difference is tested in a few looks, each with about twice as many tokens. Repeated looks raise the chance of a
false decision, so their number is planned before the first one, and each interval has confidence 1 - 5% / looks
(Bonferroni). Whichever look decides, the decision is wrong with a probability of about 5% at most.

Whole prompts are resampled, because completions of a prompt are correlated. A bootstrap interval of few prompts is too
narrow, so it is widened by the ratio of Student's quantile to the normal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_rl.comparison.passes import TokenOwners
from moe_rl.comparison.quantities import CONFIDENCE, Bootstrap, Estimate, widening

# The limits of a high-confidence interval are far out, where 2,000 resamples would leave only a handful.
RESAMPLES = 10_000

Outcome = Literal["lower", "higher", "undecided"]


@dataclass(frozen=True, slots=True)
class Sums:
    """Holds one sequence's sums over its completion tokens, as a look needs them.

    Attributes:
        prompt: token ids.
        less: k3 natively routed less k3 under replay, in nats.
    """

    prompt: tuple[int, ...]
    tokens: int
    less: float


@dataclass(frozen=True, slots=True)
class Look:
    """Holds the paired difference over all tokens so far, in nats per token. difference: with its interval."""

    sequences: int
    prompts: int
    tokens: int
    difference: Estimate

    @property
    def outcome(self) -> Outcome:
        """Return whether the interval shows that replay lowers or raises k3."""
        return "lower" if self.difference.low > 0 else "higher" if self.difference.high < 0 else "undecided"


@dataclass(frozen=True, slots=True)
class Decision:
    """Describes how the question was decided.

    Attributes:
        confidence: confidence of each interval.
        planned: token counts of the planned looks.
        budget: maximum number of tokens to compare.
    """

    outcome: Outcome
    looks: list[Look]
    planned: list[int]
    confidence: float
    budget: int


def plan_looks(tokens: int, budget: int) -> list[int]:
    """Return the token counts of the looks: first all existing tokens, then doubled each time, last the budget."""
    planned = [tokens]
    while 2 * planned[-1] < budget:
        planned.append(2 * planned[-1])
    return [*planned, budget] if budget > planned[-1] else planned


def decide(first: Sequence[Sums], budget: int, more: Callable[[int], Sequence[Sums]], *, seed: int) -> Decision:
    """Look, and get more sequences until the difference is decided or the budget is spent.

    Args:
        first: the existing sequences.
        budget: number of completion tokens, including those of `first`.
        more: samples and scores about this many further tokens.
        seed: seed of the bootstrap.
    """
    planned = plan_looks(sum(one.tokens for one in first), budget)
    confidence = 1 - (1 - CONFIDENCE) / len(planned)
    sequences, looks = list(first), [look(first, confidence, seed)]
    for target in planned[1:]:
        if looks[-1].outcome != "undecided" or not math.isfinite(looks[-1].difference.value):
            break
        missing = target - looks[-1].tokens
        if missing > 0:  # otherwise the last round was longer than planned
            sequences += more(missing)
        looks.append(look(sequences, confidence, seed))
    return Decision(looks[-1].outcome, looks, planned, confidence, budget)


def look(sequences: Sequence[Sums], confidence: float, seed: int) -> Look:
    """Estimate the difference from these sequences. With a single prompt its sequences are resampled, and the interval
    covers no other prompts."""
    by_prompt: dict[tuple[int, ...], list[Sums]] = {}
    for one in sequences:
        by_prompt.setdefault(one.prompt, []).append(one)
    groups = list(by_prompt.values()) if len(by_prompt) > 1 else [[one] for one in sequences]
    less = np.array([sum(one.less for one in group) for group in groups])
    tokens = np.array([sum(one.tokens for one in group) for group in groups])
    found = Bootstrap(len(groups), seed=seed, resamples=RESAMPLES, confidence=confidence).mean(less, tokens)
    wider = widening(len(groups), confidence)
    low, high = (found.value + wider * (end - found.value) for end in (found.low, found.high))
    return Look(len(sequences), len(by_prompt), int(tokens.sum()), Estimate(found.value, low, high))


def sums_of(
    prompts: Sequence[tuple[int, ...]], owners: TokenOwners, before: np.ndarray, after: np.ndarray
) -> list[Sums]:
    """Return one entry per sequence. before, after: sums [B] of k3, natively routed and under replay."""
    return [
        Sums(prompt, int(tokens), float(less))
        for prompt, tokens, less in zip(prompts, owners.lengths, before - after, strict=True)
    ]
