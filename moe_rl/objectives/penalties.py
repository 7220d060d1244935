"""Estimates KL(policy || reference) from single tokens drawn from the policy, and computes the entropy bonus.

The estimators are elementwise functions of d = l_ref - l, in nats, where l and l_ref are the logprobs of the same token
under policy and reference. They take any shape; pass float64 where small values matter. (J. Schulman, "Approximating KL
Divergence", 2020.) The mismatch metrics use them with the sampler as the policy and the trainer as the reference.

As part of a loss, an estimator has a value and a gradient. Its gradient flows through l while the tokens stay fixed.
The average of this gradient over tokens drawn from the policy is not the gradient of the average value, because the
policy also decides which tokens are drawn:

    estimator   formula            value, on average           gradient through l, on average
    k1          -d                 KL(policy || reference)     0: nothing is learnt from it
    k2          d^2 / 2            KL + third order in d       of KL(policy || reference)
    k3          exp(d) - 1 - d     KL(policy || reference)     of KL(reference || policy), the other direction

When k1 and k3 are multiplied by r = exp(l - l_old), and the gradient flows through r too, both have the gradient of
KL(policy || reference) on average, over tokens drawn from the old policy (see `losses.reference_kl`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.errors import ArgumentError

# Below this |d|, expm1(d) - d loses digits by cancellation. There the series to d^5 has a relative error of 3e-15.
_SERIES_BELOW = 1e-3


def k1(d: Tensor) -> Tensor:
    """Return -d = l - l_ref: unbiased, of either sign, noisy. The slope in l is 1 for every reference."""
    return -d


def k2(d: Tensor) -> Tensor:
    """Return d^2 / 2: never negative, biased where policy and reference are far apart. Slope in l: l - l_ref."""
    return d * d / 2


def k3(d: Tensor) -> Tensor:
    """Return exp(d) - 1 - d: unbiased, never negative, 0 only where d = 0, less noisy than k1. Slope in l: 1 -
    exp(d).
    """
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
    return torch.where(d.abs() < _SERIES_BELOW, series, torch.expm1(d) - d)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def entropy_bonus(entropies: Tensor, tokens: int) -> Tensor:
    """Compute (1 / tokens) sum_t H_t with H_t = -sum_v p_v log p_v: a microbatch's share of the mean entropy, in nats.

    Subtract `objective.entropy_coef` times the result from the loss (Mnih et al., arXiv 1602.01783, section 4).

    Args:
        entropies: [T] with gradient, of the microbatch's completion tokens, from `token_logprobs_and_entropies`.
        tokens: the number of completion tokens of the whole optimizer update over all ranks, for every policy loss. The
            gradient then does not depend on how the update was divided.

    Returns:
        A scalar in the dtype of the entropies.

    Raises:
        ValueError: tokens is below 1.
    """
    if tokens < 1:
        raise ArgumentError(
            "must be at least 1",
            where={"argument": "denominator"},
            got=tokens,
            expected="the completion tokens of the whole optimizer update",
            do="skip an update that has no completion token",
        )
    return (entropies.double().sum() / tokens).to(entropies.dtype)
