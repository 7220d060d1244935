"""Implements the losses with one ratio per sequence, the geometric mean of its token ratios.

`losses.py` describes shapes, dtypes, errors and the denominator. The mean over sequences is part of these methods, so
there is no choice of aggregation: `denominator` is always the number of non-empty sequences. gspo and gmpo have one
term per sequence, so their `weights` must be constant in a sequence. gspo_token takes any weights.
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
    """Compute the loss of Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 and 7).

    loss = -(1 / denominator) sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i  = exp((1 / n_i) sum_t (l_t - l_old_t)), the length-normalised likelihood ratio of sequence i

    A clip event is a sequence whose clipped branch is strictly smaller. The paper uses clip_low 3e-4 and clip_high
    4e-4.
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
    """Compute the loss of GSPO-token (arXiv 2507.18071, section 4.3), which verl calls gspo.

    loss    = -(1 / denominator) sum_i (1 / n_i) sum_t min(s_{i,t} A_i, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A_i)
    s_{i,t} = sg[s_i] exp(l_t - sg[l_t]), with the s_i of GSPO

    All tokens of a sequence have the same advantage here, so value and gradient equal those of GSPO. Clip events and
    ratio statistics count tokens, each with the ratio of its sequence. Long sequences therefore weigh more in the clip
    fraction than under gspo.
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
    """Compute the loss of Geometric-Mean Policy Optimization (arXiv 2507.20673), which clips tokens before taking the
    mean.

    loss = -(1 / denominator) sum_i A_i exp((1 / n_i) sum_t b_t),   d_t = l_t - l_old_t
    b_t  = min(d_t, log(1 + clip_high)) where A_i > 0, max(d_t, log(1 - clip_low)) where A_i < 0

    The paper's range of the ratio is [e^-0.4, e^0.4]: clip_low 0.33, clip_high 0.49. A clip_low of 1 or more sets no
    lower bound. A clip event is a token whose b_t differs from its d_t: its sequence still counts, but the token has no
    gradient. The ratio statistics use exp(d_t) of each token.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    low, high = math.log(1 - clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    advantages = sequence_advantages(advantages, sequence_ids, weights)
    of_token = advantages[sequence_ids]
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    clipped = ((of_token > 0) & (log_ratio > high)) | ((of_token < 0) & (log_ratio < low))
    # With advantage 0 the ratio is bounded above and gets no gradient, so that an overflow without effect leaves no
    # NaN.
    bounded = torch.where(
        of_token > 0,
        log_ratio.clamp(max=high),
        torch.where(of_token < 0, log_ratio.clamp(min=low), log_ratio.detach().clamp(max=high)),
    )
    surrogate = mean_by_sequence(bounded, advantages, sequence_ids).exp() * advantages
    nonempty = torch.zeros_like(advantages, dtype=torch.bool).index_fill(0, sequence_ids, True)
    loss = -torch.where(nonempty, surrogate, 0.0).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), log_ratio.detach().exp(), clipped, torch.ones_like(clipped))
