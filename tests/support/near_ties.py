"""Compares recorded routes and log-probabilities with an independent model, except where rounding may choose.

Two engines that compute one model in float32 differ in the last bits of their router logits. Where the gap between the
last chosen expert and the next one is smaller than that, either choice is right. `transformers` chooses by
probabilities, and so may even choose otherwise than its own logits say. The row of such a near tie, and all later rows
of its sequence, which attend to it, have other values then: they are not compared. The independent model's scores alone
say where that is, whatever the results are. A result that differs in any other row is a fault.

Legend for shapes: T rows (forwarded tokens), L layers with experts, E experts, K of them chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # tests/conftest.py imports this file, and torch takes seconds
    import torch

# In units of the largest score's last place in float32. Against float64, one engine errs by up to 8 of them in a gap
# (24,000 gaps of the tiny model), so two engines differ by up to 16. The other half is for CPUs that add up in another
# order.
NEAR = 32 * float(np.finfo(np.float32).eps)
# At least three quarters of a test's rows are compared. With random tokens 1 of 10,000 choices is a near tie.
MOST_LEFT_OUT = 0.25


@dataclass
class Rows:
    """Counts the rows that an independent model computed, and those left out because of near ties."""

    computed: int = 0
    left_out: int = 0

    def clear(self) -> None:
        self.computed = self.left_out = 0

    def add(self, other: Rows) -> None:
        self.computed, self.left_out = self.computed + other.computed, self.left_out + other.left_out

    def check(self) -> None:
        """Check that most rows were compared."""
        assert self.left_out <= MOST_LEFT_OUT * self.computed, f"near ties leave out {self}"

    def __str__(self) -> str:
        return f"{self.left_out} of {self.computed} rows"


# Those of the test that runs: tests/conftest.py clears, checks and shows them.
ROWS = Rows()


def gaps_of(scores: torch.Tensor, top_k: int) -> np.ndarray:
    """Return the gap between the last of the `top_k` best scores and the next one, as a share of the largest score.

    Args:
        scores: What the router takes the best of, [..., E]; -inf for an expert that it may not choose.
    """
    best = scores.topk(top_k + 1, -1).values
    return ((best[..., -2] - best[..., -1]) / scores[scores.isfinite()].abs().max()).numpy()


def clear_rows(gaps: np.ndarray) -> int:
    """Return how many rows of a sequence come before its first near tie, and count the others as left out.

    Args:
        gaps: Those of the independent model, [T, L].
    """
    near = (gaps < NEAR).any(-1)
    clear = int(near.argmax()) if near.any() else len(near)
    ROWS.computed += len(near)
    ROWS.left_out += len(near) - clear
    return clear


@dataclass(frozen=True, eq=False)
class Computed:
    """Holds what an independent model computes for the forwarded tokens of a sequence.

    Attributes:
        sets: The chosen experts, sorted, [T, L, K].
        gaps: See `gaps_of`, [T, L].
        logprobs: Log-probability of each row's next token, [T].
    """

    sets: np.ndarray
    gaps: np.ndarray
    logprobs: np.ndarray

    @cached_property
    def clear(self) -> int:
        """How many rows may be compared, see `clear_rows`."""
        return clear_rows(self.gaps)

    def check(self, key: str, routes: np.ndarray, logprobs: np.ndarray, *, atol: float, first: int = 0) -> None:
        """Check recorded routes and log-probabilities as far as no near tie allows another choice."""
        self.check_routes(key, routes, first=first)
        self.check_logprobs(key, logprobs, atol=atol)

    def check_routes(self, key: str, routes: np.ndarray, *, first: int = 0) -> None:
        """Check the routes [T - first, L, K] of the rows from `first` on. key: Names the sequence in a failure."""
        assert len(routes) == len(self.sets) - first, f"{key}: {len(routes)} rows from row {first} on"
        wrong = (np.sort(routes, -1)[: max(self.clear - first, 0)] != self.sets[first : self.clear]).any(-1)
        assert not wrong.any(), f"{key}: other experts in row, layer {(np.argwhere(wrong) + [first, 0]).tolist()[:5]}"

    def check_logprobs(self, key: str, logprobs: np.ndarray, *, atol: float) -> None:
        """Check the log-probabilities of the last tokens of the sequence."""
        first = len(self.logprobs) - len(logprobs)
        ours = logprobs[: max(self.clear - first, 0)]
        np.testing.assert_allclose(ours, self.logprobs[first : self.clear], rtol=0, atol=atol, err_msg=key)
