"""How far apart sampler and trainer are on the very tokens that were sampled, from their logprobs alone.

d_t = l_train_t - l_rollout_t in nats, over completion tokens; tokens are drawn from the rollout policy. Every mean is
over tokens, so long sequences weigh more. Sums are float64 and merge exactly across microbatches and ranks; means of
ranks' means would be biased by unequal token counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.errors import describe
from moe_rl.objectives.kl import k3

EXTREME_RATIO = 2.0
"""tau of F(tau): a token is extreme when its probability differs by more than this factor, either way."""

_WIDTH = 6


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Mergeable sums of one set of tokens. The empty set is `MismatchSums.empty()`.

    values [6] float64: tokens, sum -d, sum k3(d), extreme tokens, sum |d|, max |d|. The first five add up; the last
    takes the maximum (0 when there is no token). A non-finite d makes its sums non-finite: it is shown, not dropped.
    """

    values: Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> MismatchSums:
        return cls(torch.zeros(_WIDTH, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, logprobs: Tensor, rollout_logprobs: Tensor) -> MismatchSums:
        """Sums over the tokens of one microbatch, on their device, without a host sync.

        logprobs [T] (trainer), rollout_logprobs [T] (sampler): float32 or float64, natural log, completion tokens only,
        both at the sampling temperature. Raises TypeError for another dtype, ValueError for another shape.
        """
        for name, tensor in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
            if tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(describe(f"{name} are too coarse to compare", got=tensor.dtype,
                                         expected="torch.float32", do="keep logprobs in float32 from where they arise"))
        if logprobs.ndim != 1 or logprobs.shape != rollout_logprobs.shape:
            raise ValueError(describe("the two sets of logprobs must belong to the same tokens",
                                      got=f"{tuple(logprobs.shape)} and {tuple(rollout_logprobs.shape)}",
                                      expected="[T] and [T]", do="cut both to the completion tokens"))
        d = logprobs.detach().double() - rollout_logprobs.detach().double()
        size = d.abs()
        extreme = (size > math.log(EXTREME_RATIO)).sum()
        peak = torch.cat((size, size.new_zeros(1))).amax()
        tokens = size.new_full((), len(d))
        return cls(torch.stack((tokens, -d.sum(), k3(d).sum(), extreme.double(), size.sum(), peak)))

    def merge(self, other: MismatchSums) -> MismatchSums:
        """Sums over both sets of tokens."""
        return MismatchSums.from_tensor(torch.stack((self.values, other.values)))

    def to_tensor(self) -> Tensor:
        """[6] float64, to send to other ranks. All-gather it and give the stacked rows to `from_tensor`."""
        return self.values

    @classmethod
    def from_tensor(cls, rows: Tensor) -> MismatchSums:
        """From one `to_tensor` [6], or merged from several, [N, 6] with N >= 1 (one row a rank, in rank order)."""
        if rows.dtype != torch.float64 or rows.ndim not in (1, 2) or rows.shape[-1] != _WIDTH or not rows.numel():
            raise ValueError(describe("this is no tensor of mismatch sums", got=f"{tuple(rows.shape)} {rows.dtype}",
                                      expected=f"[{_WIDTH}] or [N, {_WIDTH}] torch.float64",
                                      do="pass what to_tensor returned, one row a rank"))
        rows = rows.reshape(-1, _WIDTH)
        return cls(torch.cat((rows[:, :-1].sum(0), rows[:, -1:].amax(0))))

    def metrics(self) -> dict[str, float]:
        """The numbers to log; reads the device once. All but `tokens` are nan when there is no token.

        k1: mean(-d), nats per token. Unbiased for KL(rollout || trainer), may be negative on few tokens.
        k3: mean(exp(d) - 1 - d), nats per token. The same KL, never negative, 0 only if every d is 0.
        extreme_fraction: F(tau = 2), share of tokens with max(p_train / p_rollout, p_rollout / p_train) > 2.
        abs_mean, abs_max: of |d|, nats. tokens: how many.
        """
        tokens, minus_d, k3_sum, extreme, size, peak = self.values.tolist()

        def mean(total: float) -> float:
            return total / tokens if tokens else math.nan

        return {
            "k1": mean(minus_d),
            "k3": mean(k3_sum),
            "extreme_fraction": mean(extreme),
            "abs_mean": mean(size),
            "abs_max": peak if tokens else math.nan,
            "tokens": int(tokens),
        }
