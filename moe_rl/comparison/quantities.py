"""Computes the four quantities: from per-token values to means with intervals. Pure numpy, float64.

Every mean is a ratio of two sums over sequences: of tokens or of (token, layer) positions. An interval is a percentile
interval of the bootstrap over sequences (Efron & Tibshirani 1993, chapter 13): sequences are drawn with replacement,
both sums are taken anew. Before and after are drawn together, so that a difference is paired sequence by sequence.

Legend: B sequences, N completion tokens, R forwarded tokens (rows), L layers, S resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from moe_rl.errors import describe

TAUS = (2, 5)
RESAMPLES = 2000
CONFIDENCE = 0.95
PARTS = ("all", "prompt", "completion")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over all tokens or positions, and its 95% interval over sequences."""

    value: float
    low: float
    high: float

    def below(self, other: Estimate) -> bool:
        """Whether the whole interval lies below the other one."""
        return self.high < other.low


class Bootstrap:
    """Draws S seeded resamples of B sequences, the same ones for everything that is compared.

    clusters: of each sequence int [B], 0 to C - 1: those of a cluster are drawn together. None: each by itself.
    Raises ValueError for fewer than two to draw from: nothing can be said then of how they vary.
    """

    def __init__(self, sequences: int, *, seed: int, resamples: int = RESAMPLES, clusters: np.ndarray | None = None):
        clusters = np.arange(sequences) if clusters is None else np.asarray(clusters)
        drawn = len(np.unique(clusters))
        if drawn < 2:
            raise ValueError(describe("no interval over so few sequences", got=drawn, expected="at least 2"))
        rng = np.random.default_rng(seed)
        # How often each sequence is drawn, [S, B]. Counts of more than 65,535 do not happen.
        times = rng.multinomial(drawn, np.full(drawn, 1 / drawn), size=resamples).astype(np.uint16)
        self._times = times[:, clusters]

    def mean(self, sums: np.ndarray, counts: np.ndarray) -> Estimate:
        """sum(sums) / sum(counts), both [B]; nan when there is nothing to count."""
        sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
        if not counts.sum():
            return Estimate(math.nan, math.nan, math.nan)
        resampled_sums, resampled_counts = self._resample(sums), self._resample(counts)
        drawn = resampled_counts > 0
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(resampled_sums[drawn] / resampled_counts[drawn], [tail, 100 - tail])
        return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))

    def difference(self, before: np.ndarray, after: np.ndarray, counts: np.ndarray) -> Estimate:
        """mean(before) - mean(after), sequence by sequence: above 0 where it got less."""
        return self.mean(before - after, counts)

    def _resample(self, values: np.ndarray) -> np.ndarray:
        """Sums [S] of the values [B] of the drawn sequences."""
        return np.concatenate([rows.astype(np.float64) @ values for rows in np.array_split(self._times, 20)])


def by_sequence(values: np.ndarray, owners: np.ndarray, sequences: int) -> np.ndarray:
    """Sums [B] of the values of each sequence. owners: of each value, 0 to B - 1."""
    return np.bincount(owners, np.asarray(values, np.float64), sequences)


def policy_sums(logprobs: np.ndarray, rollout_logprobs: np.ndarray, owners: np.ndarray, sequences: int) -> dict:
    """Sums [B] of each sequence, of d = logprobs - rollout_logprobs (trainer less sampler, nats) of its N tokens.

    k1: -d. k3: exp(d) - 1 - d. Both estimate KL(rollout || trainer), in nats. F(tau): 1 where the probabilities differ
    by more than a factor of tau, |d| > ln tau. abs: |d|.
    """
    d = np.asarray(logprobs, np.float64) - np.asarray(rollout_logprobs, np.float64)
    values = {"k1": -d, "k3": np.expm1(d) - d, "abs": np.abs(d)}
    values |= {f"F({tau})": (np.abs(d) > math.log(tau)) + (d - d) for tau in TAUS}  # a NaN is no smaller one
    return {name: by_sequence(value, owners, sequences) for name, value in values.items()}


def quantiles(logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> dict[str, float]:
    """Median, 99th percentile and largest |d|, nats. No interval: that of a largest value would mean nothing."""
    size = np.abs(np.asarray(logprobs, np.float64) - np.asarray(rollout_logprobs, np.float64))
    p50, p99 = np.percentile(size, [50, 99])
    return {"abs_p50": float(p50), "abs_p99": float(p99), "abs_max": float(size.max())}


def extreme_fractions(d: np.ndarray, taus: np.ndarray) -> np.ndarray:
    """F(tau) for each of the taus: share of tokens with |d| > ln tau."""
    sizes = np.sort(np.abs(np.asarray(d, np.float64)))
    return 1 - np.searchsorted(sizes, np.log(taus), side="right") / len(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Compares the routers' own choice with the record.

    shared int [L, R]: experts in both sets, out of top_k. margin float [L, R]: by how much the router prefers its own
    set, 0 where the sets agree.
    """

    shared: np.ndarray
    margin: np.ndarray
    top_k: int

    @property
    def differs(self) -> np.ndarray:
        """bool [L, R]: the sets are not the same."""
        return self.shared < self.top_k


def routing_sums(choices: Choices, owners: np.ndarray, rows: np.ndarray, sequences: int) -> dict[str, np.ndarray]:
    """Sums [B] over the chosen rows, bool [R], of each sequence. Divide by `positions`, but token_* by `tokens`.

    set_mismatch: (token, layer) positions where the sets differ. token_any: tokens with at least one such layer.
    token_layers: such layers. overlap: share of the top-k in both sets. hard_jsd: Jensen-Shannon divergence of the
    uniform distributions on the two sets, ln 2 * (1 - overlap), in nats. replay_margin: see Choices.
    """
    layers = len(choices.shared)
    differs, overlap = choices.differs[:, rows], choices.shared[:, rows] / choices.top_k
    values = {
        "tokens": np.ones(rows.sum()),
        "positions": np.full(rows.sum(), layers),
        "set_mismatch": differs.sum(0),
        "token_any": differs.any(0),
        "token_layers": differs.sum(0),
        "overlap": overlap.sum(0),
        "hard_jsd": math.log(2) * (1 - overlap).sum(0),
        "replay_margin": choices.margin[:, rows].astype(np.float64).sum(0),
    }
    return {name: by_sequence(value, owners[rows], sequences) for name, value in values.items()}


ROUTING = ("set_mismatch", "token_any", "token_layers", "overlap", "hard_jsd", "replay_margin")


def routing(bootstrap: Bootstrap, sums: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """The means of `routing_sums`."""
    counts = {name: sums["tokens" if name.startswith("token_") else "positions"] for name in ROUTING}
    return {name: bootstrap.mean(sums[name], counts[name]) for name in ROUTING}


def soft_kl(sampler: np.ndarray, trainer: np.ndarray, score_function: str) -> np.ndarray:
    """KL(sampler || trainer) of router distributions, nats, [...] from logits [..., E] over all experts.

    score_function "softmax": of the softmax of the logits. "sigmoid": of the sigmoid scores divided by their sum,
    before the expert bias.
    """
    log_p, log_q = (_log_distribution(np.asarray(x, np.float64), score_function) for x in (sampler, trainer))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _log_distribution(logits: np.ndarray, score_function: str) -> np.ndarray:
    scores = logits if score_function == "softmax" else -np.logaddexp(0, -logits)
    peak = scores.max(-1, keepdims=True)
    return scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))


def by_layer(values: np.ndarray, rows: np.ndarray) -> list[float]:
    """Mean [L] of values [L, R] over the chosen rows."""
    return [float(value) for value in np.asarray(values, np.float64)[:, rows].mean(1)]


def busiest(differs: np.ndarray, owners: np.ndarray, sequences: Seq[int], limit: int) -> int:
    """Which of these sequences, of at most `limit` rows, has the most positions that differ; the first of equals."""
    rows = np.bincount(owners)
    count = np.bincount(owners, differs.sum(0))
    fitting = [i for i in sequences if rows[i] <= limit] or [min(sequences, key=lambda i: rows[i])]
    return max(fitting, key=lambda i: (count[i], -i))
