"""Measures the difference of sampler and trainer from their logprobs of the sampled tokens.

d_t = l_train_t - l_rollout_t, in nats, over completion tokens, which are drawn from the rollout policy. Means are over
tokens, so long sequences weigh more; metrics over sequences say so. Sums are float64 and are added exactly across
microbatches and ranks. A mean of the ranks' means would be biased, because ranks have unequal token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import ArgumentError, describe
from moe_rl.objectives.lags import LAGS, sums_by_lag
from moe_rl.objectives.penalties import k3

EXTREME_RATIOS = (2.0, 5.0)
"""Thresholds tau of F(tau). A token is extreme when its two probabilities differ by more than this factor."""

_SUMS = (
    "tokens",
    "minus_d",
    "k3",
    "extreme_2",
    "extreme_5",
    "abs",
    "ratio",
    "ratio_squared",
    "sequences",
    "perplexity_train",
    "perplexity_rollout",
    "log_perplexity_diff",
    "log_perplexity_abs_diff",
    "square_of_product",
    "square_of_geometric",
    *(f"{name}_lag_{lag}" for name in ("tokens", "k3") for lag in LAGS),
)
# |d| is counted in bins whose bounds grow by 10^(1/100) from 1e-7 to 100 nats, with one bin below and one above.
_PER_DECADE, _LEAST, _DECADES = 100, 1e-7, 9
_BINS = _PER_DECADE * _DECADES + 2
_WIDTH = len(_SUMS) + _BINS + 1


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Holds sums over a set of sequences, which can be merged with those of another set.

    Attributes:
        values: float64: the sums in the order of _SUMS, the number of tokens in each bin of |d|, and the largest |d|.
            Merging adds all but the last, of which it takes the maximum (0 without tokens). A logprob that is not
            finite makes every sum that it enters NaN.
    """

    values: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> MismatchSums:
        return cls(torch.zeros(_WIDTH, dtype=torch.float64, device=device))

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        sequence_ids: Tensor,
        sequences: int,
        lags: Tensor | None = None,
    ) -> MismatchSums:
        """Compute the sums of one microbatch, on its device, without a host sync.

        Args:
            logprobs: [T] float32 or float64, natural logarithm, the trainer's, of completion tokens at the sampling
                temperature.
            rollout_logprobs: [T], likewise, the sampler's.
            sequence_ids: [T] int64 in 0..sequences-1, the sequence of each token. A sequence is whole in one
                microbatch. A sequence without a token is not counted.
            lags: [T] int64, how many versions older than the trainer's the weights are that sampled each token. None:
                unknown, and `by_lag` leaves these tokens out.

        Raises:
            TypeError: a dtype is wrong.
            ValueError: a shape is wrong.
        """
        for name, tensor in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    describe(
                        "too coarse to compare",
                        where={"argument": name},
                        got=tensor.dtype,
                        expected="torch.float32",
                        do="keep logprobs in float32 from the softmax on",
                    )
                )
        tensors = (logprobs, rollout_logprobs, sequence_ids, *(() if lags is None else (lags,)))
        if logprobs.ndim != 1 or any(tensor.shape != logprobs.shape for tensor in tensors):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ArgumentError(
                "logprobs and sequence ids must belong to the same tokens",
                got=" and ".join(map(str, shapes)),
                expected="[T] each",
                do="cut all to the completion tokens",
                fault="tokens",
            )
        # x - (x - x) turns an infinity into NaN, which no exp turns into 0. It leaves all other values unchanged.
        train, rollout = (x - (x - x) for x in (logprobs.detach().double(), rollout_logprobs.detach().double()))
        d = train - rollout
        size = d.abs()

        def of_sequences(values: Tensor) -> Tensor:
            return values.new_zeros(sequences).index_add(0, sequence_ids, values)

        lengths = of_sequences(torch.ones_like(d))
        there, per_token = lengths > 0, 1 / lengths.clamp(min=1)
        mean_train, mean_rollout = of_sequences(train) * per_token, of_sequences(rollout) * per_token
        product = of_sequences(d)

        def total(values: Tensor) -> Tensor:
            return torch.where(there, values, 0.0).sum()

        estimate, nothing = k3(d), d.new_zeros(len(LAGS))
        by_lag = {
            f"{name}_lag_{lag}": lag_sum
            for name, values in (("tokens", torch.ones_like(d)), ("k3", estimate))
            for lag, lag_sum in zip(LAGS, nothing if lags is None else sums_by_lag(values, lags), strict=True)
        }
        sums = {
            "tokens": d.new_full((), len(d)),
            "minus_d": -d.sum(),
            "k3": estimate.sum(),
            **{f"extreme_{tau:.0f}": ((size > math.log(tau)) + (d - d)).sum() for tau in EXTREME_RATIOS},
            "abs": size.sum(),
            "ratio": d.exp().sum(),
            "ratio_squared": (2 * d).exp().sum(),
            "sequences": there.sum().double(),
            "perplexity_train": total((-mean_train).exp()),
            "perplexity_rollout": total((-mean_rollout).exp()),
            "log_perplexity_diff": total(mean_rollout - mean_train),
            "log_perplexity_abs_diff": total((mean_rollout - mean_train).abs()),
            "square_of_product": total((2 * product).exp()),
            "square_of_geometric": total((2 * product * per_token).exp()),
            **by_lag,
        }
        bins = torch.bucketize(size, _bounds(size.device))
        counts = size.new_zeros(_BINS).index_add(0, bins, torch.ones_like(size))
        peak = torch.cat((size, size.new_zeros(1))).amax()
        return cls(torch.cat((torch.stack([sums[name] for name in _SUMS]), counts, peak[None])))

    def merge(self, other: MismatchSums) -> MismatchSums:
        """Merge the sums of two sets of sequences."""
        return MismatchSums.from_tensor(torch.stack((self.values, other.values)))

    def to_tensor(self) -> Tensor:
        """Return [W] float64 to send to other ranks. Stack the gathered rows and pass them to `from_tensor`."""
        return self.values

    @classmethod
    def from_tensor(cls, rows: Tensor) -> MismatchSums:
        """Build the sums from one `to_tensor` result [W], or merge several, [N, W] with N >= 1, in rank order."""
        if rows.dtype != torch.float64 or rows.ndim not in (1, 2) or rows.shape[-1] != _WIDTH or not rows.numel():
            raise ArgumentError(
                "the tensor does not hold mismatch sums",
                got=f"{tuple(rows.shape)} {rows.dtype}",
                expected=f"[{_WIDTH}] or [N, {_WIDTH}] torch.float64",
                do="pass what to_tensor returned, one row a rank",
                fault="sums",
            )
        rows = rows.reshape(-1, _WIDTH)
        return cls(torch.cat((rows[:, :-1].sum(0), rows[:, -1:].amax(0))))

    def metrics(self) -> dict[str, float]:
        """Compute the metrics to log. Reads the device once. All but the two counts are nan when there is no token.

        Returns:
            k1: mean(-d), nats per token. Unbiased for KL(rollout || trainer); it may be negative when there are few
            tokens.
            k3: mean(exp(d) - 1 - d), nats per token. Estimates the same KL, is never negative, and is 0 only if every d
            is 0.
            extreme_fraction_2, extreme_fraction_5: F(tau), the fraction of tokens with max(p_train / p_rollout,
            p_rollout / p_train) > tau.
            abs_mean, abs_max: mean and maximum of |d|, nats.
            abs_p50, abs_p99: quantiles of |d|, too high by at most 2.4%. Values up to 1e-7 count as 0.
            perplexity_train, perplexity_rollout: mean over sequences of exp(-mean_t l_t).
            log_perplexity_diff: mean over sequences of mean_t(l_rollout) - mean_t(l_train).
            log_perplexity_abs_diff: mean over sequences of the absolute value of the same difference.
            chi2_token: mean(exp(2 d)) - 1. Estimates chi^2(trainer || rollout) of single tokens.
            chi2_sequence_product: mean over sequences of exp(2 sum_t d) - 1. Estimates chi^2(trainer || rollout) of
            whole sequences.
            chi2_sequence_geometric: mean over sequences of exp(2 mean_t d) - 1. It belongs to no distribution, but
            stays bounded where chi2_sequence_product explodes.
            effective_sample_fraction: (sum w)^2 / (tokens sum w^2) with w = exp(d), not truncated. 1 when all w are
            equal.
            tokens, sequences: how many were counted. Sequences without a token are not counted.
        """
        values = self.values.tolist()
        sums, counts, peak = dict(zip(_SUMS, values, strict=False)), values[len(_SUMS) : -1], values[-1]
        tokens, sequences = sums["tokens"], sums["sequences"]

        def mean(name: str, of: float = tokens) -> float:
            return sums[name] / of if tokens else math.nan

        squares = sums["ratio_squared"]
        effective = sums["ratio"] ** 2 / (tokens * squares) if 0 < squares < math.inf else math.nan
        return {
            "k1": mean("minus_d"),
            "k3": mean("k3"),
            "extreme_fraction_2": mean("extreme_2"),
            "extreme_fraction_5": mean("extreme_5"),
            "abs_mean": mean("abs"),
            "abs_p50": self._quantile(0.5, tokens, counts, peak),
            "abs_p99": self._quantile(0.99, tokens, counts, peak),
            "abs_max": peak if tokens else math.nan,
            "perplexity_train": mean("perplexity_train", sequences),
            "perplexity_rollout": mean("perplexity_rollout", sequences),
            "log_perplexity_diff": mean("log_perplexity_diff", sequences),
            "log_perplexity_abs_diff": mean("log_perplexity_abs_diff", sequences),
            "chi2_token": mean("ratio_squared") - 1,
            "chi2_sequence_product": mean("square_of_product", sequences) - 1,
            "chi2_sequence_geometric": mean("square_of_geometric", sequences) - 1,
            "effective_sample_fraction": effective,
            "tokens": int(tokens),
            "sequences": int(sequences),
        }

    def by_lag(self) -> dict[str, tuple[float, int]]:
        """Return {lag: (mean k3, number of tokens)} for each lag of LAGS that occurs. Reads the device once."""
        sums = dict(zip(_SUMS, self.values.tolist(), strict=False))
        counts = {lag: int(sums[f"tokens_lag_{lag}"]) for lag in LAGS}
        return {lag: (sums[f"k3_lag_{lag}"] / count, count) for lag, count in counts.items() if count}

    @staticmethod
    def _quantile(q: float, tokens: float, counts: list[float], peak: float) -> float:
        """Return the upper bound of the first bin at which the cumulative count reaches the fraction q of the
        tokens.
        """
        if not tokens or not math.isfinite(peak):
            return math.nan
        number = int(np.searchsorted(np.cumsum(counts), q * tokens))
        return min(peak, _LEAST * 10 ** (number / _PER_DECADE)) if number else 0.0


def _bounds(device: torch.device) -> Tensor:
    exponents = torch.arange(_BINS - 1, dtype=torch.float64, device=device) / _PER_DECADE
    return _LEAST * 10**exponents
