"""Implements the losses with one ratio per sequence, the geometric mean of its token ratios.

`losses.py` describes shapes, dtypes, errors and the denominator. The mean over sequences is part of these methods, so
there is no choice of aggregation: `denominator` is always the number of non-empty sequences. gspo and gmpo have one
term per sequence, so their `weights` must be constant in a sequence. gspo_token takes any weights.
"""

from __future__ import annotations

import math

import torch

from moe_rl.objectives.loss_parts import (
    LossInputs,
    PolicyLoss,
    check_positive,
    clipped_surrogate,
    mean_by_sequence,
    own_length,
)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Compute the loss of Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 and 7).

    loss = -(1 / denominator) sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i  = exp((1 / n_i) sum_t (l_t - l_old_t)), the length-normalised likelihood ratio of sequence i

    A clip event is a sequence whose clipped branch is strictly smaller. The paper uses clip_low 3e-4 and clip_high
    4e-4.
    """
    check_positive(clip_low=clip_low, clip_high=clip_high)
    log_ratio = mean_by_sequence(inputs.log_ratio(), inputs.advantages, inputs.sequence_ids)
    nonempty = inputs.nonempty()
    surrogate, ratio, clipped = clipped_surrogate(log_ratio, inputs.sequence_advantages(), clip_low, clip_high)
    return inputs.loss(torch.where(nonempty, surrogate, 0.0), ratio, clipped, nonempty)


def gspo_token(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Compute the loss of GSPO-token (arXiv 2507.18071, section 4.3), which verl calls gspo.

    loss    = -(1 / denominator) sum_i (1 / n_i) sum_t min(s_{i,t} A_i, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A_i)
    s_{i,t} = sg[s_i] exp(l_t - sg[l_t]), with the s_i of GSPO

    All tokens of a sequence have the same advantage here, so value and gradient equal those of GSPO. Clip events and
    ratio statistics count tokens, each with the ratio of its sequence. Long sequences therefore weigh more in the clip
    fraction than under gspo.
    """
    check_positive(clip_low=clip_low, clip_high=clip_high)
    current, ids = inputs.logprobs.double(), inputs.sequence_ids
    of_sequence = mean_by_sequence(inputs.log_ratio().detach(), inputs.advantages, ids)[ids]
    log_ratio = of_sequence + (current - current.detach())
    surrogate, ratio, clipped = clipped_surrogate(log_ratio, inputs.token_advantages(), clip_low, clip_high)
    return inputs.loss(surrogate / own_length(ids), ratio, clipped)


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Compute the loss of Geometric-Mean Policy Optimization (arXiv 2507.20673), which clips tokens before taking the
    mean.

    loss = -(1 / denominator) sum_i A_i exp((1 / n_i) sum_t b_t),   d_t = l_t - l_old_t
    b_t  = min(d_t, log(1 + clip_high)) where A_i > 0, max(d_t, log(1 - clip_low)) where A_i < 0

    The paper's range of the ratio is [e^-0.4, e^0.4]: clip_low 0.33, clip_high 0.49. A clip_low of 1 or more sets no
    lower bound. A clip event is a token whose b_t differs from its d_t: its sequence still counts, but the token has no
    gradient. The ratio statistics use exp(d_t) of each token.
    """
    check_positive(clip_low=clip_low, clip_high=clip_high)
    low, high = math.log(1 - clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    advantages, log_ratio = inputs.sequence_advantages(), inputs.log_ratio()
    of_token = advantages[inputs.sequence_ids]
    clipped = ((of_token > 0) & (log_ratio > high)) | ((of_token < 0) & (log_ratio < low))
    # With advantage 0 the ratio is bounded above and gets no gradient, so that an overflow without effect leaves no
    # NaN.
    bounded = torch.where(
        of_token > 0,
        log_ratio.clamp(max=high),
        torch.where(of_token < 0, log_ratio.clamp(min=low), log_ratio.detach().clamp(max=high)),
    )
    surrogate = mean_by_sequence(bounded, advantages, inputs.sequence_ids).exp() * advantages
    return inputs.loss(torch.where(inputs.nonempty(), surrogate, 0.0), log_ratio.detach().exp(), clipped)
