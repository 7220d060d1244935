"""Computes the four quantities: from per-token values to means with intervals. Pure numpy, float64.

Every mean is a sum over sequences divided by the number of tokens or of (token, layer) positions. Its interval is the
percentile interval of a bootstrap over sequences (Efron & Tibshirani 1993, chapter 13): sequences are drawn with
replacement, and both sums are computed again. Before and after use the same draws, so a difference is paired by
sequence.

Legend: B sequences, N completion tokens, R forwarded tokens (rows), L layers, S resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from moe_rl.errors import describe

TAUS = (2, 5)
RESAMPLES = 2000
CONFIDENCE = 0.95
PARTS = ("all", "prompt", "completion")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds a mean over all tokens or positions, with its 95% interval over sequences."""

    value: float
    low: float
    high: float


class Bootstrap:
    """Draws S seeded resamples of B sequences. All compared values use the same resamples.

    Args:
        clusters: int [B], 0 to C - 1. Sequences of a cluster are drawn together. None draws each sequence by itself.
        confidence: confidence of the intervals.

    Raises:
        ValueError: There are fewer than two clusters, so their variation is unknown.
    """

    def __init__(
        self,
        sequences: int,
        *,
        seed: int,
        resamples: int = RESAMPLES,
        clusters: np.ndarray | None = None,
        confidence: float = CONFIDENCE,
    ):
        clusters = np.arange(sequences) if clusters is None else np.asarray(clusters)
        drawn = len(np.unique(clusters))
        if drawn < 2:
            raise ValueError(describe("too few sequences for an interval", got=drawn, expected="at least 2"))
        rng = np.random.default_rng(seed)
        # How often each sequence is drawn, [S, B]. No count exceeds 65,535. Drawn in parts, because 64-bit counts of
        # all resamples would need four times the memory.
        parts = [len(part) for part in np.array_split(np.arange(resamples), 20)]
        share = np.full(drawn, 1 / drawn)
        times = np.concatenate([rng.multinomial(drawn, share, size=part).astype(np.uint16) for part in parts])
        self._times = times if drawn == len(clusters) else times[:, clusters]
        self._tail = 50 * (1 - confidence)

    def mean(self, sums: np.ndarray, counts: np.ndarray) -> Estimate:
        """Return sum(sums) / sum(counts), both [B]; NaN if the counts are all 0."""
        sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
        if not counts.sum():
            return Estimate(math.nan, math.nan, math.nan)
        resampled_sums, resampled_counts = self._resample(sums), self._resample(counts)
        drawn = resampled_counts > 0
        limits = [self._tail, 100 - self._tail]
        low, high = np.percentile(resampled_sums[drawn] / resampled_counts[drawn], limits)
        return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))

    def difference(self, before: np.ndarray, after: np.ndarray, counts: np.ndarray) -> Estimate:
        """Return mean(before) - mean(after), paired by sequence. Positive means that the value decreased."""
        return self.mean(before - after, counts)

    def _resample(self, values: np.ndarray) -> np.ndarray:
        """Return the sums [S] of the values [B] of the drawn sequences."""
        return np.concatenate([rows.astype(np.float64) @ values for rows in np.array_split(self._times, 20)])


def widening(groups: int, confidence: float) -> float:
    """Return how much wider Student's interval of a mean over `groups` values is than the bootstrap's.

    Uses two terms of the expansion of Student's quantile (Abramowitz and Stegun 26.7.5), and the deviation with
    groups - 1 instead of groups.
    """
    z, freedom = NormalDist().inv_cdf((1 + confidence) / 2), max(1, groups - 1)
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return student / z * math.sqrt(1 + 1 / freedom)


def by_sequence(values: np.ndarray, owners: np.ndarray, sequences: int) -> np.ndarray:
    """Return the sums [B] of the values of each sequence. `owners` gives the sequence of each value, 0 to B - 1."""
    return np.bincount(owners, np.asarray(values, np.float64), sequences)


def policy_sums(logprobs: np.ndarray, rollout_logprobs: np.ndarray, owners: np.ndarray, sequences: int) -> dict:
    """Return sums [B] per sequence, computed from d = logprobs - rollout_logprobs (trainer less sampler, nats) of the N
    tokens.

    Keys: k1 is -d and k3 is exp(d) - 1 - d; both estimate KL(rollout || trainer), in nats. F(tau) is 1 where the
    probabilities differ by more than a factor of tau, |d| > ln tau. abs is |d|.
    """
    d = np.asarray(logprobs, np.float64) - np.asarray(rollout_logprobs, np.float64)
    values = {"k1": -d, "k3": np.expm1(d) - d, "abs": np.abs(d)}
    values |= {f"F({tau})": (np.abs(d) > math.log(tau)) + (d - d) for tau in TAUS}  # d - d makes a NaN stay NaN
    return {name: by_sequence(value, owners, sequences) for name, value in values.items()}


def quantiles(logprobs: np.ndarray, rollout_logprobs: np.ndarray) -> dict[str, float]:
    """Return the median, 99th percentile and maximum of |d|, in nats. An interval of a maximum would be meaningless."""
    size = np.abs(np.asarray(logprobs, np.float64) - np.asarray(rollout_logprobs, np.float64))
    p50, p99 = np.percentile(size, [50, 99])
    return {"abs_p50": float(p50), "abs_p99": float(p99), "abs_max": float(size.max())}


def extreme_fractions(d: np.ndarray, taus: np.ndarray) -> np.ndarray:
    """Return F(tau) for each tau: the share of tokens with |d| > ln tau; NaN if a d is not finite."""
    sizes = np.sort(np.abs(np.asarray(d, np.float64)))
    if not np.isfinite(sizes).all():
        return np.full(len(taus), np.nan)
    return 1 - np.searchsorted(sizes, np.log(taus), side="right") / len(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Compares the routers' own choice with the record.

    Attributes:
        shared: int [L, R], experts in both sets, out of top_k.
        margin: float [L, R], how much the router prefers its own set; 0 where the sets agree.
    """

    shared: np.ndarray
    margin: np.ndarray
    top_k: int

    @property
    def differs(self) -> np.ndarray:
        """Return bool [L, R], whether the sets differ."""
        return self.shared < self.top_k


def routing_sums(choices: Choices, owners: np.ndarray, rows: np.ndarray, sequences: int) -> dict[str, np.ndarray]:
    """Return sums [B] per sequence over the rows selected by bool [R]. Divide by `positions`, but token_* by `tokens`.

    Keys: set_mismatch counts the (token, layer) positions where the sets differ. token_any counts tokens with at least
    one such layer, token_layers counts the layers. overlap is the share of the top-k in both sets. hard_jsd is the
    Jensen-Shannon divergence of the uniform distributions on the two sets, ln 2 * (1 - overlap), in nats.
    replay_margin: see `Choices`.
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
    """Return the means of `routing_sums`."""
    counts = {name: sums["tokens" if name.startswith("token_") else "positions"] for name in ROUTING}
    return {name: bootstrap.mean(sums[name], counts[name]) for name in ROUTING}


def soft_kl(sampler: np.ndarray, trainer: np.ndarray, score_function: str) -> np.ndarray:
    """Return KL(sampler || trainer) of the router distributions over all experts, in nats, [...] from logits [..., E].

    The distribution is the softmax of the logits for score_function "softmax". For "sigmoid" it is the sigmoid scores
    divided by their sum, before the expert bias.
    """
    log_p, log_q = (_log_distribution(np.asarray(x, np.float64), score_function) for x in (sampler, trainer))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _log_distribution(logits: np.ndarray, score_function: str) -> np.ndarray:
    scores = logits if score_function == "softmax" else -np.logaddexp(0, -logits)
    peak = scores.max(-1, keepdims=True)
    return scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))


def by_layer(values: np.ndarray, rows: np.ndarray) -> list[float]:
    """Return the mean [L] of values [L, R] over the selected rows."""
    return [float(value) for value in np.asarray(values, np.float64)[:, rows].mean(1)]


def busiest(differs: np.ndarray, owners: np.ndarray, sequences: Seq[int], limit: int) -> int:
    """Return the sequence of at most `limit` rows with the most differing positions. Ties go to the first."""
    rows = np.bincount(owners)
    count = np.bincount(owners, differs.sum(0))
    fitting = [i for i in sequences if rows[i] <= limit] or [min(sequences, key=lambda i: rows[i])]
    return max(fitting, key=lambda i: (count[i], -i))
