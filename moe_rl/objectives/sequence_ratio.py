"""Losses with one ratio per sequence, the geometric mean of its tokens' ratios.

Shapes, dtypes, errors and what `denominator` is: see `losses.py`. The mean over sequences is part of these methods, so
there is no choice of aggregation: in all of them `denominator` is the number of non-empty sequences. gspo and gmpo have
one term per sequence, so that their `weights` must be constant in a sequence; gspo_token takes any.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import (
    PolicyLoss,
    check_loss,
    clipped_surrogate,
    mean_by_sequence,
    own_length,
    sequence_advantages,
    token_advantages,
    with_counts,
)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 and 7).

    loss = -(1 / denominator) sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i  = exp((1 / n_i) sum_t (l_t - l_old_t)), the length-normalised likelihood ratio of sequence i

    A sequence is a clip event where the clipped branch is strictly the smaller one. Published: 3e-4 and 4e-4.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    advantages = sequence_advantages(advantages, sequence_ids, weights)
    log_ratio = mean_by_sequence(logprobs.double() - old_logprobs.detach().double(), advantages, sequence_ids)
    nonempty = torch.zeros_like(advantages, dtype=torch.bool).index_fill(0, sequence_ids, True)
    surrogate, ratio, clipped = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    loss = -torch.where(nonempty, surrogate, 0.0).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), ratio, clipped, nonempty)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """GSPO-token (arXiv 2507.18071, section 4.3), the form that verl calls gspo.

    loss    = -(1 / denominator) sum_i (1 / n_i) sum_t min(s_{i,t} A_i, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A_i)
    s_{i,t} = sg[s_i] exp(l_t - sg[l_t]), with the s_i of GSPO

    With one advantage per sequence, all there is here, value and gradient are GSPO's. Counted are tokens, each with the
    ratio of its sequence: long sequences weigh more in the clip fraction than under gspo.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    current, old = logprobs.double(), old_logprobs.detach().double()
    of_sequence = mean_by_sequence(current.detach() - old, advantages, sequence_ids)[sequence_ids]
    log_ratio = of_sequence + (current - current.detach())
    surrogate, ratio, clipped = clipped_surrogate(log_ratio, of_token, clip_low, clip_high)
    loss = -(surrogate / own_length(sequence_ids)).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), ratio, clipped, torch.ones_like(clipped))


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Geometric-Mean Policy Optimization (arXiv 2507.20673): tokens are clipped before the mean, not the mean after.

    loss = -(1 / denominator) sum_i A_i exp((1 / n_i) sum_t b_t),   d_t = l_t - l_old_t
    b_t  = min(d_t, log(1 + clip_high)) where A_i > 0, max(d_t, log(1 - clip_low)) where A_i < 0

    The published range is [e^-0.4, e^0.4] for the ratio: clip_low 0.33, clip_high 0.49. A clip_low of 1 or more bounds
    nothing. A token is a clip event where its b_t is not its d_t: the sequence still counts, this token has no
    gradient. The ratio counted is exp(d_t) of each token.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    low, high = math.log(1 - clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    advantages = sequence_advantages(advantages, sequence_ids, weights)
    of_token = advantages[sequence_ids]
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    clipped = ((of_token > 0) & (log_ratio > high)) | ((of_token < 0) & (log_ratio < low))
    # Advantage 0: bounded above, so that an overflow that does not count leaves no NaN, and without a gradient.
    bounded = torch.where(
        of_token > 0,
        log_ratio.clamp(max=high),
        torch.where(of_token < 0, log_ratio.clamp(min=low), log_ratio.detach().clamp(max=high)),
    )
    surrogate = mean_by_sequence(bounded, advantages, sequence_ids).exp() * advantages
    nonempty = torch.zeros_like(advantages, dtype=torch.bool).index_fill(0, sequence_ids, True)
    loss = -torch.where(nonempty, surrogate, 0.0).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), log_ratio.detach().exp(), clipped, torch.ones_like(clipped))
