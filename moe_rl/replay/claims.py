"""Holds the claims of the alignment test, and the statistics that find each proven, weak or refused.

A test has values x in [-1, 1], one for each cluster of rows. In a healthy pass their mean is at least 0, whatever was
seen before. Neither a noise level nor independence is assumed. The e-value of a test is the mean over some bets b of
prod(1 - b x). It exceeds 1 / alpha with probability at most alpha (Ville's inequality), so a claim is refused when one
of its tests does. ALPHA is shared by all claims, by the tests of each, and by the passes whose evidence is added up.

What a claim can see is measured, not assumed: its fault is planted into the pass at hand. The claim is proven if 95%
of the planted faults would be refused with a quarter more evidence than is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
from torch import Tensor

ALPHA = 1e-6
"""Upper bound on the probability that one pass of a rank is refused although its routes are right."""

CORE = ("layer", "shift", "prompts", "completions", "no rows")
"""Claims about the origin of rows: not another layer, token, prompt or completion, and not nothing at all."""

FINE = (
    "last prompt row",
    "first completion row",
    "every 16th row",
    "stuck rows",
    "pieces",
    "single ids",
    "some rows",
    "labels",
)
"""Claims about few rows, or few ids of each row."""

CLAIMS = CORE + FINE

PASSES = 4
"""Largest number of passes over which evidence is added up."""

FAR = 5e-3
"""Distance of weights from which on healthy routes may be unrelated to their rows: a quarter of a usual weight. An
update of Adam moves a weight by about the learning rate. Without this limit, healthy rollouts of tiny models are
refused from 1e-2 on, and none up to 8e-3."""

# A fresh pass is refused if the mean regret of its records is this many times the median of at least three earlier
# passes of the run, and above _LEAST_JUMP. Engines with equal weights differ by rounding, which changes slowly.
_JUMP, _LEAST_JUMP, _PASSES_KNOWN = 8.0, 0.05, 3

_BETS = (0.3, 0.6, 0.9)
RARE = 0.05
"""Largest share of rows that fit a clearly different row twice as well as their own. Measured: at most 0.027 where a
row has at least 16 recorded ids in all layers."""

_DEAD = 0.1  # differences of regret below this count nothing, so noise below it cannot raise an alarm
_SURE = 1.25
_PROVEN = 0.95

Status = Literal["proven", "weak", "refused"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds the result of a claim in one pass.

    Attributes:
        status: See the module.
        power: Share of the planted faults that would be refused, from this pass alone.
        evidence: Largest log e-value of a test in this pass minus the value that refuses the claim, in nats.
        found: One text for each refused test.
    """

    name: str
    status: Status = "weak"
    power: float = 0.0
    evidence: float = -math.inf
    found: tuple[str, ...] = ()


@dataclass(slots=True)
class Bets:
    """Holds the tests of a claim on one pass.

    Attributes:
        name: One of CLAIMS.
        record: float64 [T], log e-values of the record.
        planted: float64 [P], log e-values with the claim's fault planted, one for each place.
        describe: Returns the text of a test.
        count: Bets that share the alarm rate.
        weights: [P], how much each planted fault counts; None if all count alike.
        lasting: The same tests are made in every pass, so evidence of passes may be added up.
    """

    name: str
    record: Tensor
    planted: Tensor
    describe: Callable[[int], str]
    count: int
    weights: Tensor | None = None
    lasting: bool = True


@dataclass(slots=True)
class History:
    """Adds up the evidence of the last passes of a rank. Passes with another number of tests are left out.

    It is not part of a checkpoint, so only refusals depend on it, and no logged value.
    """

    _passes: dict[str, deque[Tensor]] = field(default_factory=dict)
    _regrets: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def exceeded(self, regret: float) -> float | None:
        """Return the median regret of the last fresh passes if that of this one is far above it, or else None. Keep it
        then."""
        usual = median(self._regrets) if len(self._regrets) >= _PASSES_KNOWN else math.inf
        if regret > max(_LEAST_JUMP, _JUMP * usual):
            return usual
        self._regrets.append(regret)
        return None

    def largest(self, name: str, record: Tensor) -> Tensor:
        """Return for each test the largest log e-value of this pass and of its sums with earlier passes. Keep this
        pass."""
        passes = self._passes.setdefault(name, deque(maxlen=PASSES - 1))
        total = best = record
        for earlier in reversed(passes):
            if earlier.shape == total.shape:
                total = total + earlier
                best = torch.maximum(best, total)
        passes.append(record)
        return best

    def forget(self) -> None:
        """Drop the evidence against these passes."""
        self._passes.clear()


def judge(tests: Bets, history: History) -> Claim:
    """Judge a claim from the tests of this pass and of earlier passes."""
    record, planted = tests.record, tests.planted
    summed = (history.largest(tests.name, record) if tests.lasting else record).tolist()
    needed = math.log(len(CLAIMS) * PASSES * tests.count / ALPHA)
    texts = tuple(tests.describe(test) for test, value in enumerate(summed) if value >= needed)
    power = 0.0
    if len(planted):
        refused = (planted >= _SURE * needed).double()
        total = float(len(refused) if tests.weights is None else tests.weights.sum())
        power = float(refused.sum() if tests.weights is None else refused @ tests.weights.double()) / max(total, 1e-30)
    evidence = float(record.max()) - needed if len(record) else -math.inf
    return Claim(tests.name, "refused" if texts else "proven" if power >= _PROVEN else "weak", power, evidence, texts)


def log_e(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return the log e-values of the values x [U, ...] over axis 0, float64. scale: each of them stands for as many."""
    logs = (x * -_bets(x[None])).log1p_().sum(1).double() * scale
    return torch.logsumexp(logs, 0) - math.log(len(_BETS))


def log_e_by(x: Tensor, of: Tensor, count: int) -> Tensor:
    """Return the log e-values [count, T] of the values x [N, T]; `of` [N] is the test of each value."""
    x = x.double()[:, None]
    logs = (x * -_bets(x[0])).log1p_()  # [N, bets, T]
    total = logs.new_zeros(count, *logs.shape[1:]).index_add_(0, of, logs)
    return torch.logsumexp(total, 1) - math.log(len(_BETS))


def _bets(x: Tensor) -> Tensor:
    """Return the bets, [bets, 1, ...] for values x [N, ...]."""
    return x.new_tensor(_BETS).view(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Says which rows count as one.

    Attributes:
        of: int64 [N], the cluster of each row.
        size: float32 [U], its number of rows.
    """

    of: Tensor
    size: Tensor

    def mean(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the means of x [N, ...] by cluster. A cluster without a valid row has 0."""
        empty = x.new_zeros(self.size.shape[0], *x.shape[1:])
        if valid is None:
            return empty.index_add_(0, self.of, x) / self.size.view(-1, *[1] * (x.ndim - 1))
        weights = valid.to(x.dtype)
        rows = torch.zeros_like(empty).index_add_(0, self.of, weights)
        return empty.index_add_(0, self.of, x * weights) / rows.clamp_(min=1)


def no_noise(x: Tensor) -> Tensor:
    """Return differences of regret, clamped to [-1, 1]; those that noise may cause become 0."""
    x = x.clamp(-1, 1)
    return torch.where(x.abs() < _DEAD, torch.zeros_like(x), x)


def rarely(mine: Tensor, other: Tensor, told: Tensor) -> Tensor:
    """Return test values v, float64, with the e-value prod(1 + v): high for rows that do not fit their own row, and fit
    a clearly different one twice as well. At most RARE of all rows do so by noise."""
    hit = (mine > _DEAD) & (other < mine / 2)
    return (0.5 / RARE * hit - 0.5).double() * told
