"""A loss that fades a token's gradient out with its ratio, instead of cutting it off."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.loss_parts import PolicyLoss, check_loss, own_length, token_advantages, with_counts


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
    gate is below 1/2 and A_i is not 0. Shapes, dtypes and errors: see `policy.py`. Published: 1.0 and 1.05.
    """
    check_loss(
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
    return with_counts(loss.to(logprobs.dtype), log_ratio.detach().exp(), faded, torch.ones_like(faded))
