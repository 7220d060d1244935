"""How far apart sampler and trainer are on the very tokens that were sampled, from their logprobs alone.

d_t = l_train_t - l_rollout_t in nats, over completion tokens; tokens are drawn from the rollout policy. Means are over
tokens, so long sequences weigh more, but for the quantities that are said to be of sequences. Sums are float64 and
merge exactly across microbatches and ranks; means of ranks' means would be biased by unequal token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import describe
from moe_rl.objectives.penalties import k3

EXTREME_RATIOS = (2.0, 5.0)
"""Each tau of F(tau): a token is extreme when its probability differs by more than this factor, either way."""

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
)
# |d| is counted in bins whose bounds grow by 10^(1/100) from 1e-7 to 100 nats, one bin below and one above.
_PER_DECADE, _LEAST, _DECADES = 100, 1e-7, 9
_BINS = _PER_DECADE * _DECADES + 2
_WIDTH = len(_SUMS) + _BINS + 1


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Mergeable sums over one set of sequences. The empty set is `MismatchSums.empty()`.

    values float64: sums in the order of _SUMS, how many tokens have |d| in each bin, max |d|. All but the last add up;
    the last takes the maximum (0 when there is no token). A logprob that is not finite makes every sum that it enters
    NaN.
    """

    values: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> MismatchSums:
        return cls(torch.zeros(_WIDTH, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, logprobs: Tensor, rollout_logprobs: Tensor, sequence_ids: Tensor, sequences: int) -> MismatchSums:
        """Sums over one microbatch, on its device, without a host sync.

        logprobs [T] (trainer), rollout_logprobs [T] (sampler): float32 or float64, natural log, completion tokens only,
        both at the sampling temperature. sequence_ids [T] int64 in 0..sequences-1: whose token each is; a sequence lies
        whole in one microbatch, and one without a token counts nowhere.
        Raises TypeError for another dtype, ValueError for another shape.
        """
        for name, tensor in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    describe(
                        "too coarse to compare",
                        where={"argument": name},
                        got=tensor.dtype,
                        expected="torch.float32",
                        do="keep logprobs in float32 from where they arise",
                    )
                )
        if logprobs.ndim != 1 or not logprobs.shape == rollout_logprobs.shape == sequence_ids.shape:
            shapes = [tuple(t.shape) for t in (logprobs, rollout_logprobs, sequence_ids)]
            raise ValueError(
                describe(
                    "logprobs and sequence ids must belong to the same tokens",
                    got=" and ".join(map(str, shapes)),
                    expected="[T] each",
                    do="cut all to the completion tokens",
                    fault="tokens",
                )
            )
        # x - (x - x): an infinity becomes NaN, which no exp turns into 0, and no bit of anything else changes.
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

        sums = {
            "tokens": d.new_full((), len(d)),
            "minus_d": -d.sum(),
            "k3": k3(d).sum(),
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
        }
        bins = torch.bucketize(size, _bounds(size.device))
        counts = size.new_zeros(_BINS).index_add(0, bins, torch.ones_like(size))
        peak = torch.cat((size, size.new_zeros(1))).amax()
        return cls(torch.cat((torch.stack([sums[name] for name in _SUMS]), counts, peak[None])))

    def merge(self, other: MismatchSums) -> MismatchSums:
        """Sums over both sets of sequences."""
        return MismatchSums.from_tensor(torch.stack((self.values, other.values)))

    def to_tensor(self) -> Tensor:
        """[W] float64, to send to other ranks. All-gather it and give the stacked rows to `from_tensor`."""
        return self.values

    @classmethod
    def from_tensor(cls, rows: Tensor) -> MismatchSums:
        """From one `to_tensor` [W], or merged from several, [N, W] with N >= 1 (one row a rank, in rank order)."""
        if rows.dtype != torch.float64 or rows.ndim not in (1, 2) or rows.shape[-1] != _WIDTH or not rows.numel():
            raise ValueError(
                describe(
                    "this is no tensor of mismatch sums",
                    got=f"{tuple(rows.shape)} {rows.dtype}",
                    expected=f"[{_WIDTH}] or [N, {_WIDTH}] torch.float64",
                    do="pass what to_tensor returned, one row a rank",
                    fault="sums",
                )
            )
        rows = rows.reshape(-1, _WIDTH)
        return cls(torch.cat((rows[:, :-1].sum(0), rows[:, -1:].amax(0))))

    def metrics(self) -> dict[str, float]:
        """The numbers to log; reads the device once. All but the two counts are nan when there is no token.

        k1: mean(-d), nats per token. Unbiased for KL(rollout || trainer), may be negative on few tokens.
        k3: mean(exp(d) - 1 - d), nats per token. The same KL, never negative, 0 only if every d is 0.
        extreme_fraction_2, _5: F(tau), share of tokens with max(p_train / p_rollout, p_rollout / p_train) > tau.
        abs_mean, abs_max: of |d|, nats. abs_p50, abs_p99: quantiles of |d|, too high by at most 2.4%; at most 1e-7
        counts as 0.
        perplexity_train, perplexity_rollout: mean over sequences of exp(-mean_t l_t). log_perplexity_diff: mean over
        sequences of mean_t(l_rollout) - mean_t(l_train); log_perplexity_abs_diff: of its absolute value.
        chi2_token: mean(exp(2 d)) - 1. chi2_sequence_product: mean over sequences of exp(2 sum_t d) - 1;
        chi2_sequence_geometric: of exp(2 mean_t d) - 1. They estimate chi^2(trainer || rollout), the first and second
        of tokens and of whole sequences; the third is of no distribution, but bounded where the second explodes.
        effective_sample_fraction: (sum w)^2 / (tokens sum w^2), w = exp(d) untruncated: 1 when all are equal.
        tokens, sequences: how many; sequences without a token are not counted.
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

    @staticmethod
    def _quantile(q: float, tokens: float, counts: list[float], peak: float) -> float:
        """The upper bound of the first bin with which at least a fraction q of the tokens is counted."""
        if not tokens or not math.isfinite(peak):
            return math.nan
        number = int(np.searchsorted(np.cumsum(counts), q * tokens))
        return min(peak, _LEAST * 10 ** (number / _PER_DECADE)) if number else 0.0


def _bounds(device: torch.device) -> Tensor:
    exponents = torch.arange(_BINS - 1, dtype=torch.float64, device=device) / _PER_DECADE
    return _LEAST * 10**exponents
