"""Centers the score of a loss, so that a sampler that differs from the trainer does not push the policy anywhere.

The gradient of a loss that weights tokens is -A_i w_t s_t, with the score s_t = grad log p(token t). Averaged over the
tokens that the sampler could have drawn, w_t s_t is 0 only where w_t is the exact ratio p / q. A truncated or masked
weight leaves a mean that is the same at each step and adds up. Score centering (arXiv 2609.20807, equations 9, 12 and
14) subtracts this mean at every token:

    -A_i [w_t log p(token t) - sum_v sg(q_v f(p_v / q_v)) log p_v],   w_t = f(p / q) of the token

q is the sampler's distribution and p the trainer's. The recorder keeps q of the K likeliest tokens, the head H. For the
tail the sampler is taken to be the trainer's tail times rho = (1 - Q_H) / (1 - P_H), where Q_H and P_H are the head's
probabilities. The scores of a distribution sum to 0, so the sum over all v becomes one over the head, with the
coefficients q_v f(p_v / q_v) - rho f(1 / rho) p_v. The two tail probabilities are at least 1e-6, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_TAIL = 1e-6


@dataclass(frozen=True, slots=True)
class Head:
    """Holds the logprobs of each token's head under trainer and sampler.

    Attributes:
        logprobs: [K, T] float32 or float64, natural logarithm, the trainer's, with gradient.
        rollout_logprobs: [K, T], the sampler's. -inf where the sampler could draw fewer than K tokens.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor


def centering(head: Head, cap: float, masked: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Return [T] float64: sum_v sg(c_v) log p_v over the head. Times A_i it is added to a loss -A_i w_t log p_t.

    It is NaN for a token whose head has a logprob that is not finite, except for -inf of the sampler.

    Args:
        cap: f(r) = min(r, cap).
        masked: Maps p and q [K, T] to bool [K, T], where f is 0. No token of the tail is masked.
    """
    there = head.rollout_logprobs != -torch.inf
    q = head.rollout_logprobs.detach().double().exp()
    p = torch.where(there, head.logprobs.detach().double().exp(), 0.0)
    rho = (1 - q.sum(0)).clamp(min=_LEAST_TAIL) / (1 - p.sum(0)).clamp(min=_LEAST_TAIL)
    weighted = torch.minimum(p, cap * q)  # q f(p / q), also where q is 0
    if masked is not None:
        weighted = torch.where(masked(p, q), 0.0, weighted)
    coefficients = weighted - (cap * rho).clamp(max=1) * p  # rho f(1 / rho) = min(1, cap rho)
    inputs = (torch.where(there, logprobs.detach(), 0.0) for logprobs in (head.logprobs, head.rollout_logprobs))
    hidden = sum((value - value).double().sum(0) for value in inputs)  # 0 or NaN, which minimum and clamp may pass over
    return (coefficients * torch.where(there, head.logprobs, 0.0).double()).sum(0) + hidden
