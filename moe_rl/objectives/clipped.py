"""Losses that clip each token's ratio, as PPO does, or fade its gradient out. They differ in what a token weighs.

Shapes, dtypes, errors and what `denominator` is: see `losses.py`. In all of them
r_t = exp(l_t - l_old_t) and c_t = min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i).
A token is a clip event where the clipped branch is strictly the smaller one, so that it gives no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import (
    PolicyLoss,
    check_loss,
    clipped_surrogate,
    own_length,
    token_advantages,
    with_counts,
)


def grpo(
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
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, equation 3, without its KL term).

    loss = -(1 / denominator) sum_i (1 / n_i) sum_t c_t

    denominator: non-empty sequences: a mean over sequences of means over tokens.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    scale = 1 / own_length(sequence_ids)
    return _clipped(logprobs, old_logprobs, of_token, scale, clip_low, clip_high, denominator, broken)


def dr_grpo(
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
    """Dr. GRPO (arXiv 2503.20783): GRPO without the division by a sequence's own length.

    loss = -(1 / denominator) sum_i sum_t c_t

    denominator: sequences, empty ones too, x the longest completion allowed: a constant of the run's shape, so that
    no token's weight depends on how long its sequence became. The method's advantages are R - mean, without std.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    return _clipped(
        logprobs, old_logprobs, of_token, torch.ones_like(of_token), clip_low, clip_high, denominator, broken
    )


def dapo(
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
    """The loss of DAPO (arXiv 2503.14476): clip-higher and token-level. Its other parts are no part of a loss.

    loss = -(1 / denominator) sum_i sum_t c_t

    denominator: tokens: every token of the batch weighs the same. Published: clip_low 0.2, clip_high 0.28.
    """
    broken = check_loss(
        logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, clip_low=clip_low, clip_high=clip_high
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    return _clipped(
        logprobs, old_logprobs, of_token, torch.ones_like(of_token), clip_low, clip_high, denominator, broken
    )


def decoupled(
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
    """Decoupled PPO (AReaL, arXiv 2505.24298): clipped around a proximal policy, weighted for the one that sampled.

    loss = -(1 / denominator) sum_i sum_t w_t c_t,   w_t = sg[min(exp(l_old_t - l_rollout_t), weight_cap)]

    old_logprobs are the proximal policy's: the trainer's before the step. rollout_logprobs are the sampler's.
    denominator: tokens, those with a truncated weight among them. The ratio counted and clipped is r_t, without w_t.
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
    scale = (old_logprobs.detach().double() - rollout_logprobs.detach().double()).exp().clamp(max=weight_cap)
    return _clipped(logprobs, old_logprobs, of_token, scale, clip_low, clip_high, denominator, broken)


def _clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    of_token: Tensor,
    scale: Tensor,
    clip_low: float,
    clip_high: float,
    denominator: int,
    broken: Tensor,
) -> PolicyLoss:
    """of_token [T]: see `token_advantages`. scale [T] float64: of each token's c_t, before the denominator. broken: see
    `check_loss`."""
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    surrogate, ratio, clipped = clipped_surrogate(log_ratio, of_token, clip_low, clip_high)
    loss = -(surrogate * scale).sum() / denominator
    return with_counts((loss - broken).to(logprobs.dtype), ratio, clipped, torch.ones_like(clipped))


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
    denominator: int,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv 2511.20347).

    loss = -(1 / denominator) sum_i (1 / n_i) sum_t (4 / tau) sigmoid(tau (r_t - 1)) A_i,   r_t = exp(l_t - l_old_t)
    tau  = tau_positive where A_i > 0, tau_negative where A_i < 0

    Its gradient at token t is that of r_t A_i times a gate 4 sigmoid (1 - sigmoid), which is 1 at r_t = 1.
    denominator: non-empty sequences: a mean over sequences of means over tokens. A token is a clip event where its
    gate is below 1/2 and A_i is not 0. Shapes, dtypes and errors: see `losses.py`. Published: 1.0 and 1.05.
    """
    broken = check_loss(
        logprobs,
        old_logprobs,
        advantages,
        sequence_ids,
        denominator,
        weights,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
    )
    of_token = token_advantages(advantages, sequence_ids, weights)
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    tau = torch.where(of_token > 0, torch.full_like(of_token, tau_positive), tau_negative)
    level = torch.sigmoid(tau * torch.expm1(log_ratio.detach()))
    # As in the clipped losses: where nothing is left of the slope, autograd must not see an exp that overflowed.
    flat = (level == 1) | (of_token == 0)
    live = torch.sigmoid(tau * torch.expm1(torch.where(flat, 0.0, log_ratio)))
    surrogate = 4 / tau * torch.where(flat, level, live) * of_token
    loss = -(surrogate / own_length(sequence_ids)).sum() / denominator
    faded = (4 * level * (1 - level) < 0.5) & (of_token != 0)
    return with_counts((loss - broken).to(logprobs.dtype), log_ratio.detach().exp(), faded, torch.ones_like(faded))
