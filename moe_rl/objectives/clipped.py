"""Implements the losses that clip each token's ratio, as PPO does, or fade its gradient out.

`losses.py` describes shapes, dtypes, errors and the denominator. All losses here use
r_t = exp(l_t - l_old_t) and c_t = min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i).
They differ in the weight of a token. A clip event is a token whose clipped branch is strictly smaller, so that it has
no gradient.

This c_t has no bound where A_i < 0 and r_t is large: one token can outweigh all others. With dual_clip (arXiv
1912.09729, equation 5) such a token has c_t = max(c_t, dual_clip A_i). Where the second argument is larger, the token
has no gradient and is a clip event too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import LossInputs, PolicyLoss, check_positive, clipped_surrogate, own_length


def grpo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """Compute the loss of Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, equation 3, without KL).

    loss = -(1 / denominator) sum_i (1 / n_i) sum_t c_t

    The denominator is the number of non-empty sequences. The loss is the mean over sequences of means over tokens.
    """
    return _clipped(inputs, clip_low, clip_high, dual_clip, scale=lambda: 1 / own_length(inputs.sequence_ids))


def dr_grpo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """Compute the loss of Dr. GRPO (arXiv 2503.20783): GRPO without the division by the sequence length.

    loss = -(1 / denominator) sum_i sum_t c_t

    The denominator is the number of sequences, empty ones included, times the longest completion allowed. This constant
    keeps the weight of a token independent of the length of its sequence. The method uses the advantages R - mean,
    without the std.
    """
    return _clipped(inputs, clip_low, clip_high, dual_clip)


def dapo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """Compute the loss of DAPO (arXiv 2503.14476), with clip-higher and a mean over tokens.

    loss = -(1 / denominator) sum_i sum_t c_t

    The denominator is the number of tokens, so every token of the batch weighs the same. The paper uses clip_low 0.2
    and clip_high 0.28. DAPO's dynamic sampling and its penalty for long completions are not part of the loss.
    """
    return _clipped(inputs, clip_low, clip_high, dual_clip)


def decoupled(
    inputs: LossInputs, *, clip_low: float, clip_high: float, weight_cap: float, dual_clip: float | None = None
) -> PolicyLoss:
    """Compute the decoupled PPO loss (AReaL, arXiv 2505.24298): clip around a proximal policy, weight by the sampler.

    loss = -(1 / denominator) sum_i sum_t w_t c_t,   w_t = sg[min(exp(l_old_t - l_rollout_t), weight_cap)]

    old_logprobs are those of the proximal policy: the trainer before the step. rollout_logprobs are those of the
    sampler. The denominator is the number of tokens, including those with a truncated weight. Clip events and ratio
    statistics use r_t, without w_t.
    """
    check_positive(weight_cap=weight_cap)
    assert inputs.rollout_logprobs is not None
    old, rollout = inputs.old_logprobs.detach().double(), inputs.rollout_logprobs.detach().double()
    return _clipped(inputs, clip_low, clip_high, dual_clip, scale=lambda: (old - rollout).exp().clamp(max=weight_cap))


def _clipped(
    inputs: LossInputs,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    scale: Callable[[], Tensor] | None = None,
) -> PolicyLoss:
    """Return -sum(scale * c) / denominator with its counts. scale returns [T] float64; None: 1."""
    check_positive(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    surrogate, ratio, clipped = clipped_surrogate(
        inputs.log_ratio(), inputs.token_advantages(), clip_low, clip_high, dual_clip
    )
    return inputs.loss(surrogate if scale is None else surrogate * scale(), ratio, clipped)


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """Compute the loss of Soft Adaptive Policy Optimization (arXiv 2511.20347).

    loss = -(1 / denominator) sum_i (1 / n_i) sum_t (4 / tau) sigmoid(tau (r_t - 1)) A_i,   r_t = exp(l_t - l_old_t)
    tau  = tau_positive where A_i > 0, tau_negative where A_i < 0

    The gradient at token t is the gradient of r_t A_i times the gate 4 sigmoid (1 - sigmoid), which is 1 at r_t = 1.
    The denominator is the number of non-empty sequences: the loss is the mean over sequences of means over tokens. A
    clip event is a token whose gate is below 1/2 and whose A_i is not 0. The paper uses tau 1.0 and 1.05.
    """
    check_positive(tau_positive=tau_positive, tau_negative=tau_negative)
    of_token, log_ratio = inputs.token_advantages(), inputs.log_ratio()
    tau = torch.where(of_token > 0, torch.full_like(of_token, tau_positive), tau_negative)
    level = torch.sigmoid(tau * torch.expm1(log_ratio.detach()))
    # Where the gate has closed, autograd must not see an exp that overflowed, as in the clipped losses.
    flat = (level == 1) | (of_token == 0)
    live = torch.sigmoid(tau * torch.expm1(torch.where(flat, 0.0, log_ratio)))
    surrogate = 4 / tau * torch.where(flat, level, live) * of_token
    faded = (4 * level * (1 - level) < 0.5) & (of_token != 0)
    return inputs.loss(surrogate / own_length(inputs.sequence_ids), log_ratio.detach().exp(), faded)
