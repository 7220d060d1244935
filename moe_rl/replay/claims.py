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

    @classmethod
    def none(cls, name: str) -> Bets:
        """Make the empty tests of a claim that a pass cannot test."""
        return cls(name, torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), lambda _: "", 1)


@dataclass(slots=True)
class History:
    """Adds up the evidence of the last passes of a rank. Passes with another number of tests are left out.

    It is not part of a checkpoint, so only refusals depend on it, and no logged value.
    """

    _passes: dict[str, deque[Tensor]] = field(default_factory=dict)

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


def judge(tests: Bets, history: History) -> Claim:
    """Judge a claim from the tests of this pass and of earlier passes."""
    record, planted = tests.record, tests.planted
    summed = history.largest(tests.name, record) if tests.lasting else record
    needed = math.log(len(CLAIMS) * PASSES * tests.count / ALPHA)
    found = tuple(tests.describe(at) for at in torch.nonzero(summed >= needed)[:, 0].tolist())
    power = 0.0
    if len(planted):
        seen = (planted >= _SURE * needed).double()
        weights = torch.ones_like(seen) if tests.weights is None else tests.weights.double()
        power = float((seen * weights).sum() / weights.sum().clamp(min=1e-30))
    evidence = float(record.max()) - needed if len(record) else -math.inf
    return Claim(tests.name, "refused" if found else "proven" if power >= _PROVEN else "weak", power, evidence, found)


def log_e(x: Tensor, sign: float = -1.0) -> Tensor:
    """Return the log e-value of the values x [U, ...] over axis 0, float64. sign 1: of -x."""
    logs = torch.stack([torch.log1p(sign * bet * x).sum(0).double() for bet in _BETS])
    return torch.logsumexp(logs, 0) - math.log(len(_BETS))


def log_e_by(x: Tensor, of: Tensor, count: int, sign: float = -1.0) -> Tensor:
    """Return the log e-values [count] of the values x [N]; `of` [N] is the test of each value."""
    empty = torch.zeros(count, dtype=torch.float64, device=x.device)
    logs = torch.stack([empty.index_add(0, of, torch.log1p(sign * bet * x.double())) for bet in _BETS])
    return torch.logsumexp(logs, 0) - math.log(len(_BETS))


def by_cluster(x: Tensor, cluster: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the means of x [N, ...] by cluster [N]. A cluster without a valid row has 0."""
    count = int(cluster.max()) + 1 if len(cluster) else 0
    weights = x.new_ones(len(x), *[1] * (x.ndim - 1)) if valid is None else valid.to(x.dtype)
    total, rows = (x.new_zeros(count, *one.shape[1:]).index_add_(0, cluster, one) for one in (x * weights, weights))
    return total / rows.clamp(min=1)


def no_noise(x: Tensor) -> Tensor:
    """Return differences of regret, clamped to [-1, 1]; those that noise may cause become 0."""
    x = x.clamp(-1, 1)
    return torch.where(x.abs() < _DEAD, torch.zeros_like(x), x)


def rarely(mine: Tensor, other: Tensor, told: Tensor, unit: Tensor) -> Tensor:
    """Return the log e-value of rows that fit a clearly different row twice as well as their own, and do not fit their
    own. At most RARE of all rows do so by noise. unit: the cluster of each row."""
    hit = told & (mine > _DEAD) & (other < mine / 2)
    value = torch.where(told, hit / RARE, torch.ones_like(mine)).double()
    return torch.log(0.5 + 0.5 * by_cluster(value, unit)).sum()
