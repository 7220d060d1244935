"""Weights against what separates the sampler from the trainer: they make up for it, or keep tokens away from the loss.

d_t = l_old_t - l_rollout_t in nats: the trainer's old policy against the policy that sampled, for the very tokens that
were sampled. A correction looks at a ratio of one of three levels; those of a sequence are the same for all its tokens:

    token       rho_t = exp(d_t)
    sequence    exp(sum_t d_t): the product of the ratios, hence the true ratio of the whole sequence, and the noisier
                the longer it is
    geometric   exp((1 / n_i) sum_t d_t): their geometric mean, comparable between lengths

and gives each token a weight, a constant to the gradient:

    truncate    min(ratio, high)                                        (TIS)
    mask        ratio where low <= ratio <= high, else 0; low may be left out    (at token level IcePop; MIS)
    reject      1 where low <= ratio <= high, else 0; one of them may be left out
    veto        0 for the whole sequence when the ratio of any of its tokens is below low, else 1

The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556) compares the sampler with the policy as it is NOW, so
that it sees mismatch and staleness together: 0 for a sequence with A_i < 0 and (1 / n_i) sum_t (l_rollout_t - l_t) >
delta, else 1.

Several multiply. They are sums of logarithms until the end: no ratio of a long sequence overflows, and no 0 meets an
inf. A token of which a logprob, or the advantage, is not finite has weight NaN, whatever rejects it: the step refuses
the loss.

Every sequence lies whole in one microbatch (see `losses.py`), so no weight depends on how the batch was cut. Rejected
tokens stay in the denominator of the loss: rejection makes a step smaller, not the tokens that are left louder.

Legend: B sequences, T completion tokens, n_i tokens of sequence i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import mean_by_sequence, sum_by_sequence


class Correction(Protocol):
    """A section of objective.corrections, which says what its keys mean (moe_rl/config/objective.py)."""

    @property
    def level(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """values [T] float64: each token's weight, without gradient.

    sums [7] float64, of one microbatch; over microbatches and ranks they add up, see `metrics`: tokens, their weights,
    the squares of these, tokens of weight 0, tokens whose ratio was truncated, sequences with a token, and of these
    such whose tokens all have weight 0.
    """

    values: Tensor
    sums: Tensor


SUMS = 7


def token_weights(
    corrections: Seq[Correction],
    off_policy_delta: float | None,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
) -> TokenWeights:
    """The product of what each correction, and the off-policy sequence mask, gives the tokens of one microbatch.

    off_policy_delta: in nats per token; None: no such mask. logprobs (of the policy now), old_logprobs,
    rollout_logprobs [T] float32 or float64; advantages [B]; sequence_ids [T] int64 in 0..B-1: as in `policy_loss`,
    which checks them. The host does not wait for the device.
    """
    now, old, rollout = (one.detach().double() for one in (logprobs, old_logprobs, rollout_logprobs))
    of_token = old - rollout
    log_weights = torch.zeros_like(of_token)
    truncated = torch.zeros_like(sequence_ids, dtype=torch.bool)
    for correction in corrections:
        low = -math.inf if correction.low is None else math.log(correction.low)
        high = math.inf if correction.high is None else math.log(correction.high)
        log_ratio = _at(correction.level, of_token, advantages, sequence_ids)
        outside = (log_ratio < low) | (log_ratio > high)
        if correction.rule == "truncate":
            truncated |= outside
            log_weights = log_weights + log_ratio.clamp(max=high)
        elif correction.rule == "mask":
            log_weights = log_weights + torch.where(outside, -torch.inf, log_ratio)
        else:
            if correction.rule == "veto":
                outside = sum_by_sequence(outside.double(), advantages, sequence_ids)[sequence_ids] > 0
            kept = torch.where(log_ratio.isnan(), torch.nan, 0.0)
            log_weights = log_weights + torch.where(outside, -torch.inf, kept)
    if off_policy_delta is not None:
        drift = mean_by_sequence(rollout - now, advantages, sequence_ids)
        masked = (advantages.detach() < 0) & (drift > off_policy_delta)
        log_weights = log_weights.masked_fill(masked[sequence_ids], -torch.inf)
    weights = log_weights.exp()
    for given in (now, old, rollout, advantages.detach()[sequence_ids]):
        weights = weights - (given - given)  # 0, or NaN where it is not finite: comparisons pass over it
    return TokenWeights(weights, _sums(weights, truncated, advantages, sequence_ids))


def metrics(sums: Seq[float]) -> dict[str, float]:
    """From the sums of all microbatches and ranks: see `TokenWeights`. Numbers of no token at all are nan.

    weight_mean: mean weight of a token, zeros among them. zero_token_fraction: tokens of weight 0.
    truncated_token_fraction: tokens whose ratio a truncate rule lowered, rejected by another one or not.
    zero_sequence_fraction: of the sequences with a token, those without any of weight above 0. ess_token_fraction:
    effective sample size (sum w)^2 / sum w^2 of the final weights, zeros among them, as a fraction of the tokens; 1
    when all weights are equal, 0 when all are 0.
    """
    tokens, total, squares, zero, truncated, sequences, zero_sequences = sums

    def mean(of: float, among: float) -> float:
        return of / among if among else math.nan

    return {
        "weight_mean": mean(total, tokens),
        "zero_token_fraction": mean(zero, tokens),
        "truncated_token_fraction": mean(truncated, tokens),
        "zero_sequence_fraction": mean(zero_sequences, sequences),
        "ess_token_fraction": 0.0 if tokens and squares == 0 else mean(total * total, tokens * squares),
    }


def _at(level: str, of_token: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """[T] float64: logarithm of the ratio that this level gives each token."""
    if level == "token":
        return of_token
    of_sequence = sum_by_sequence if level == "sequence" else mean_by_sequence
    return of_sequence(of_token, advantages, sequence_ids)[sequence_ids]


def _sums(weights: Tensor, truncated: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    kept = sum_by_sequence((weights != 0).double(), advantages, sequence_ids)
    nonempty = torch.zeros_like(kept, dtype=torch.bool).index_fill(0, sequence_ids, True)
    counts = ((weights == 0).sum(), truncated.sum(), nonempty.sum(), (nonempty & (kept == 0)).sum())
    tokens = weights.new_full((), len(weights))
    return torch.stack((tokens, weights.sum(), (weights * weights).sum(), *(count.double() for count in counts)))
