"""Computes token weights that correct the mismatch of sampler and trainer, or keep tokens out of the loss.

d_t = l_old_t - l_rollout_t, in nats, compares the trainer's old policy with the sampler at each sampled token. A
correction uses a ratio of one of three levels. All tokens of a sequence share a ratio of the last two levels:

    token       rho_t = exp(d_t)
    sequence    exp(sum_t d_t): the product of the token ratios, which is the true ratio of the sequence. Its variance
                grows with the length.
    geometric   exp((1 / n_i) sum_t d_t): the geometric mean of the token ratios, comparable between lengths

The rule gives each token a weight, through which no gradient flows:

    truncate    min(ratio, high)                                        (TIS)
    vtrace      as truncate, at level sequence; `train.credit` puts the ratios of later turns into the advantages
                (V-trace, arXiv 1802.01561)
    mask        ratio where low <= ratio <= high, else 0; low may be left out    (at token level IcePop; MIS)
    reject      1 where low <= ratio <= high, else 0; low or high may be left out
    veto        0 for the whole sequence when the ratio of any of its tokens is below low, else 1

The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556) compares the sampler with the CURRENT policy. It
therefore sees mismatch and staleness together. Its weight is 0 for a sequence with A_i < 0 and
(1 / n_i) sum_t (l_rollout_t - l_t) > delta, and 1 for all others.

The second-moment mask of M2PO looks at a whole update (see `second_moment.py`). Its weight is 0 for the tokens that it
does not trust, and 1 for all others.

Several corrections are multiplied, as sums of logarithms: the ratio of a long sequence cannot overflow, and no 0 is
multiplied by inf. A token with a logprob or an advantage that is not finite gets the weight NaN, even if a rule rejects
the token, and the step then refuses the loss.

Every sequence is whole in one microbatch (see `losses.py`), so no weight depends on how the batch was divided. Rejected
tokens stay in the denominator of the loss: the step becomes smaller, and the weight of the other tokens stays.

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
    """Holds one section of objective.corrections. moe_rl/config/objective.py explains its keys."""

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
    """Holds the token weights of one microbatch, with sums for the metrics.

    Attributes:
        values: [T] float64, the weight of each token, without gradient.
        sums: [7] float64, to be added over microbatches and ranks and passed to `metrics`: the number of tokens; the
            sum of weights; the sum of squared weights; tokens of weight 0; tokens with a truncated ratio; sequences
            with at least one token; sequences among those with weight 0 at every token.
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
    trusted: Tensor | None = None,
) -> TokenWeights:
    """Multiply the weights of all corrections and masks, for the tokens of one microbatch.

    The host does not wait for the device. `policy_loss` checks the tensors.

    Args:
        off_policy_delta: the limit of the off-policy mask in nats per token. None: no mask.
        logprobs: [T] float32 or float64, of the current policy. old_logprobs and rollout_logprobs have the same shape.
        advantages: [B].
        sequence_ids: [T] int64 in 0..B-1.
        trusted: [T] bool, False where the second-moment mask gives weight 0. None: no mask.
    """
    now, old, rollout = (tensor.detach().double() for tensor in (logprobs, old_logprobs, rollout_logprobs))
    of_token = old - rollout
    log_weights = torch.zeros_like(of_token)
    truncated = torch.zeros_like(sequence_ids, dtype=torch.bool)
    for correction in corrections:
        low = -math.inf if correction.low is None else math.log(correction.low)
        high = math.inf if correction.high is None else math.log(correction.high)
        log_ratio = _at(correction.level, of_token, advantages, sequence_ids)
        outside = (log_ratio < low) | (log_ratio > high)
        if correction.rule in ("truncate", "vtrace"):
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
    if trusted is not None:
        log_weights = log_weights.masked_fill(~trusted, -torch.inf)
    weights = log_weights.exp()
    for values in (now, old, rollout, advantages.detach()[sequence_ids]):
        weights = weights - (values - values)  # 0 or NaN; added because comparisons pass over NaN
    return TokenWeights(weights, _sums(weights, truncated, advantages, sequence_ids))


def metrics(sums: Seq[float]) -> dict[str, float]:
    """Compute the correction metrics from the sums of all microbatches and ranks (see `TokenWeights`).

    A metric is nan when there is no token to average over, and all are when a weight is not finite.

    Returns:
        weight_mean: mean weight of a token, zeros included.
        zero_token_fraction: fraction of tokens with weight 0.
        truncated_token_fraction: fraction of tokens whose ratio a truncate rule lowered, even if another rule rejected
        them.
        zero_sequence_fraction: fraction of the non-empty sequences in which all weights are 0.
        ess_token_fraction: effective sample size (sum w)^2 / sum w^2 of the final weights, zeros included, as a
        fraction of the tokens. 1 when all weights are equal, 0 when all are 0.
    """
    tokens, total, squares, zero, truncated, sequences, zero_sequences = sums
    hidden = total - total  # NaN if a weight is not finite, which counts of other weights do not show

    def mean(of: float, among: float) -> float:
        return of / among + hidden if among else math.nan

    return {
        "weight_mean": mean(total, tokens),
        "zero_token_fraction": mean(zero, tokens),
        "truncated_token_fraction": mean(truncated, tokens),
        "zero_sequence_fraction": mean(zero_sequences, sequences),
        "ess_token_fraction": 0.0 if tokens and squares == 0 else mean(total * total, tokens * squares),
    }


def _at(level: str, of_token: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return [T] float64: the logarithm of each token's ratio at this level."""
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
