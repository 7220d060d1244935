"""Log-likelihoods weighted by A and by a ratio through which no gradient flows.

Shapes, dtypes, errors and what `denominator` is: see `losses.py`. The gradient of such a loss is -w_t A_i at token t;
its value, which contains l_t itself, says nothing. sg[...] is a constant to the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import PolicyLoss, check_loss, token_advantages, with_counts


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    weight_cap: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5), bounded above only.

    loss = -(1 / denominator) sum_i sum_t sg[min(r_t, weight_cap)] A_i l_t,   r_t = exp(l_t - l_old_t)

    weight_cap is the cap itself, the paper's 1 + epsilon_high, not its distance from 1. The paper's lower bound is left
    off, as the paper does in its runs. denominator: tokens. A token is a clip event where its weight is the cap and
    A_i is not 0: its gradient is smaller, not gone.
    """
    broken = check_loss(logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, weight_cap=weight_cap)
    of_token = token_advantages(advantages, sequence_ids, weights)
    ratio = (logprobs.detach().double() - old_logprobs.detach().double()).exp()
    capped = (ratio > weight_cap) & (of_token != 0)
    return _weighted(logprobs, of_token, ratio.clamp(max=weight_cap), ratio, capped, denominator, broken)


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    delta_low: float,
    delta_high: float,
    weight_cap: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Divergence Proximal Policy Optimization, binary total variation (arXiv 2602.04879).

    loss = -(1 / denominator) sum_i sum_t M_t sg[min(r_t, weight_cap)] A_i l_t,   r_t = exp(l_t - l_old_t)
    M_t  = 0 where A_i > 0 and p_t - p_old_t > delta_high, or A_i < 0 and p_t - p_old_t < -delta_low; else 1

    p = exp(l): the probabilities, not their ratio, may not move far, so that rare tokens can. The method's old policy
    is the one that sampled: pass the sampler's logprobs as old_logprobs. denominator: tokens, masked ones among them,
    as in TRL. A token is a clip event where M_t is 0. Published weight_cap: 20.
    """
    broken = check_loss(
        logprobs,
        old_logprobs,
        advantages,
        sequence_ids,
        denominator,
        weights,
        delta_low=delta_low,
        delta_high=delta_high,
        weight_cap=weight_cap,
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    current, old = logprobs.detach().double(), old_logprobs.detach().double()
    ratio, moved = (current - old).exp(), current.exp() - old.exp()
    masked = ((of_token > 0) & (moved > delta_high)) | ((of_token < 0) & (moved < -delta_low))
    scale = torch.where(masked, 0.0, ratio.clamp(max=weight_cap))
    return _weighted(logprobs, of_token, scale, ratio, masked, denominator, broken)


def minirl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    rollout_logprobs: Tensor,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """MiniRL (arXiv 2512.01374, equation 7): masked by staleness, weighted by staleness and sampler mismatch together.

    loss = -(1 / denominator) sum_i sum_t M_t sg[min(exp(l_t - l_rollout_t), weight_cap)] A_i l_t
    M_t  = 0 where A_i > 0 and r_t > 1 + clip_high, or A_i < 0 and r_t < 1 - clip_low; else 1;  r_t = exp(l_t - l_old_t)

    old_logprobs are the trainer's before the step, rollout_logprobs the sampler's. What is truncated is the whole
    weight. denominator: sequences, empty ones too: a mean over sequences of sums over tokens, without any division by
    length. A token is a clip event where M_t is 0; the ratio counted is r_t. The method's advantages are R - mean.
    Published: clip_low 0.2, clip_high 0.27, weight_cap 5.
    """
    broken = check_loss(
        logprobs,
        old_logprobs,
        advantages,
        sequence_ids,
        denominator,
        weights,
        rollout_logprobs=rollout_logprobs,
        clip_low=clip_low,
        clip_high=clip_high,
        weight_cap=weight_cap,
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    current = logprobs.detach().double()
    ratio = (current - old_logprobs.detach().double()).exp()
    masked = ((of_token > 0) & (ratio > 1 + clip_high)) | ((of_token < 0) & (ratio < 1 - clip_low))
    scale = torch.where(masked, 0.0, (current - rollout_logprobs.detach().double()).exp().clamp(max=weight_cap))
    return _weighted(logprobs, of_token, scale, ratio, masked, denominator, broken)


def _weighted(
    logprobs: Tensor, of_token: Tensor, scale: Tensor, ratio: Tensor, clipped: Tensor, denominator: int, broken: Tensor
) -> PolicyLoss:
    """of_token [T]: see `token_advantages`. scale [T] float64: of each token's A l, before the denominator. broken: see
    `check_loss`."""
    loss = -(scale * of_token * logprobs.double()).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), ratio, clipped, torch.ones_like(clipped))
