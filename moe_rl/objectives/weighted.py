"""Implements the losses that weight the log-likelihood by A and by a ratio through which no gradient flows.

`losses.py` describes shapes, dtypes, errors and the denominator. The gradient of such a loss is -w_t A_i at token t.
Its value contains l_t itself and has no meaning. sg[...] is a constant for the gradient.

With `inputs.head`, cispo and dppo_tv center their score (see `centering.py`). old_logprobs must then be the sampler's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.centering import centering
from moe_rl.objectives.loss_parts import LossInputs, PolicyLoss, check_positive, sum_by_sequence


def cispo(inputs: LossInputs, *, weight_cap: float) -> PolicyLoss:
    """Compute the loss of Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    loss = -(1 / denominator) sum_i sum_t sg[min(r_t, weight_cap)] A_i l_t,   r_t = exp(l_t - l_old_t)

    weight_cap is the cap itself, the paper's 1 + epsilon_high, not the distance from 1. There is no lower bound, as in
    the paper's own runs. The denominator is the number of tokens. A clip event is a token whose weight is the cap and
    whose A_i is not 0. Its gradient is reduced, not removed.
    """
    check_positive(weight_cap=weight_cap)
    of_token, ratio = inputs.token_advantages(), inputs.log_ratio().detach().exp()
    capped = (ratio > weight_cap) & (of_token != 0)
    center = None if inputs.head is None else centering(inputs.head, weight_cap)
    return _weighted(inputs, of_token, ratio.clamp(max=weight_cap), ratio, capped, center)


def dppo_tv(inputs: LossInputs, *, delta_low: float, delta_high: float, weight_cap: float) -> PolicyLoss:
    """Compute the loss of Divergence Proximal Policy Optimization with binary total variation (arXiv 2602.04879).

    loss = -(1 / denominator) sum_i sum_t M_t sg[min(r_t, weight_cap)] A_i l_t,   r_t = exp(l_t - l_old_t)
    M_t  = 0 where A_i > 0 and p_t - p_old_t > delta_high, or A_i < 0 and p_t - p_old_t < -delta_low; else 1

    p = exp(l). The loss limits the change of the probability, not of the ratio, so rare tokens can move far. The
    method's old policy is the sampler: pass the sampler's logprobs as old_logprobs. The denominator is the number of
    tokens, masked ones included, as in TRL. A clip event is a token with M_t = 0. The paper uses weight_cap 20.
    """
    check_positive(delta_low=delta_low, delta_high=delta_high, weight_cap=weight_cap)
    of_token, ratio = inputs.token_advantages(), inputs.log_ratio().detach().exp()

    def is_masked(p: Tensor, p_old: Tensor) -> Tensor:
        moved = p - p_old
        return ((of_token > 0) & (moved > delta_high)) | ((of_token < 0) & (moved < -delta_low))

    masked = is_masked(inputs.logprobs.detach().double().exp(), inputs.old_logprobs.detach().double().exp())
    scale = torch.where(masked, 0.0, ratio.clamp(max=weight_cap))
    center = None if inputs.head is None else centering(inputs.head, weight_cap, is_masked)
    return _weighted(inputs, of_token, scale, ratio, masked, center)


def minirl(inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float) -> PolicyLoss:
    """Compute the loss of MiniRL (arXiv 2512.01374, equation 7): mask by staleness, weight by staleness and mismatch.

    loss = -(1 / denominator) sum_i sum_t M_t sg[min(exp(l_t - l_rollout_t), weight_cap)] A_i l_t
    M_t  = 0 where A_i > 0 and r_t > 1 + clip_high, or A_i < 0 and r_t < 1 - clip_low; else 1;  r_t = exp(l_t - l_old_t)

    old_logprobs are the trainer's before the step, rollout_logprobs the sampler's. The cap applies to the whole weight.
    The denominator is the number of sequences, empty ones included: the loss is the mean over sequences of sums over
    tokens, without a division by length. A clip event is a token with M_t = 0. The ratio statistics use r_t. The method
    uses the advantages R - mean. The paper uses clip_low 0.2, clip_high 0.27 and weight_cap 5.
    """
    check_positive(clip_low=clip_low, clip_high=clip_high, weight_cap=weight_cap)
    assert inputs.rollout_logprobs is not None
    of_token, ratio = inputs.token_advantages(), inputs.log_ratio().detach().exp()
    masked = ((of_token > 0) & (ratio > 1 + clip_high)) | ((of_token < 0) & (ratio < 1 - clip_low))
    weight = (inputs.logprobs.detach().double() - inputs.rollout_logprobs.detach().double()).exp()
    scale = torch.where(masked, 0.0, weight.clamp(max=weight_cap))
    return _weighted(inputs, of_token, scale, ratio, masked)


def topr(inputs: LossInputs, *, weight_cap: float) -> PolicyLoss:
    """Compute the loss of Tapered Off-Policy REINFORCE (arXiv 2503.14286).

    loss = -(1 / denominator) sum_i sum_t w_i A_i l_t
    w_i  = sg[min(exp(sum_t (l_t - l_old_t)), weight_cap)] where A_i < 0, else 1

    Good completions are imitated with full weight however old they are; bad ones count only as far as the policy would
    still write them. So nothing grows without bound, and no bound keeps the policy near the sampler. The method's old
    policy is the sampler: pass the sampler's logprobs as old_logprobs. The denominator is the number of sequences,
    empty ones included. A clip event is a token of a sequence with A_i < 0 whose ratio is above weight_cap. The ratio
    statistics use the token's own ratio. The paper uses weight_cap 1.
    """
    check_positive(weight_cap=weight_cap)
    of_token, log_ratio = inputs.token_advantages(), inputs.log_ratio().detach()
    of_sequence = sum_by_sequence(log_ratio, inputs.advantages, inputs.sequence_ids).exp()[inputs.sequence_ids]
    bad = of_token < 0
    scale = torch.where(bad, of_sequence.clamp(max=weight_cap), 1.0)
    return _weighted(inputs, of_token, scale, log_ratio.exp(), bad & (of_sequence > weight_cap))


def _weighted(
    inputs: LossInputs, of_token: Tensor, scale: Tensor, ratio: Tensor, clipped: Tensor, center: Tensor | None = None
) -> PolicyLoss:
    """Return the loss -sum(A * (scale * l - center)) / denominator with its counts.

    Args:
        of_token: [T] float64, the advantages A.
        scale: [T] float64, factor of each token's A l before the division by the denominator.
        center: [T] float64, from `centering`. None: 0.
    """
    terms = scale * of_token * inputs.logprobs.double()
    return inputs.loss(terms if center is None else terms - of_token * center, ratio, clipped)
