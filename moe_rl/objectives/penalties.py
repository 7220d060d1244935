"""Estimators of KL(policy || reference) from single tokens that were drawn from the policy, and the entropy bonus.

All are elementwise functions of d = l_ref - l in nats, l and l_ref the logprobs of the same token under policy and
reference; any shape; pass float64 where small values matter. (J. Schulman, "Approximating KL Divergence", 2020.) The
mismatch metrics use them too, with the sampler as the policy and the trainer as its reference.

An estimator has a value and, in a loss, a gradient: that of its value through l, at tokens that stay what they are.
That gradient, averaged over tokens drawn from the policy, is not the gradient of the averaged value, since the policy
draws the tokens:

    estimator   formula            value, on average           gradient through l, on average
    k1          -d                 KL(policy || reference)     0: nothing is learnt from it
    k2          d^2 / 2            KL + third order in d       of KL(policy || reference)
    k3          exp(d) - 1 - d     KL(policy || reference)     of KL(reference || policy), the other direction

Multiplied by r = exp(l - l_old), through which the gradient flows too, k1 and k3 both have the gradient of
KL(policy || reference) on average, on tokens drawn from the old policy: see `losses.reference_kl`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rl.errors import describe

# Below this |d| the terms of expm1(d) - d cancel; what the series to d^5 leaves out is 3e-15 of it there.
_SERIES_BELOW = 1e-3


def k1(d: Tensor) -> Tensor:
    """-d = l - l_ref: unbiased, of either sign, noisy. Slope in l: 1, whatever the reference says."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: never negative, biased where policy and reference are far apart. Slope in l: l - l_ref."""
    return d * d / 2


def k3(d: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased, never negative, 0 exactly where d = 0, less noisy than k1. Slope in l: 1 - exp(d)."""
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))
    return torch.where(d.abs() < _SERIES_BELOW, series, torch.expm1(d) - d)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def entropy_bonus(entropies: Tensor, tokens: int) -> Tensor:
    """(1 / tokens) sum_t H_t, H_t = -sum_v p_v log p_v: a microbatch's share of the mean entropy, in nats per token.

    Subtract `objective.entropy_coef` times it from the loss (Mnih et al., arXiv 1602.01783, section 4).
    entropies [T]: of the microbatch's completion tokens, with gradient; see `token_logprobs_and_entropies`. tokens: all
    completion tokens of the optimizer update over all ranks, whatever the policy loss is divided by: the gradient does
    not depend on how the update was cut. Scalar in the entropies' dtype. Raises ValueError when tokens is below 1.
    """
    if tokens < 1:
        raise ValueError(
            describe(
                "must be at least 1",
                where={"argument": "denominator"},
                got=tokens,
                expected="the completion tokens of the whole optimizer update",
                do="skip an update that has no completion token",
            )
        )
    return (entropies.double().sum() / tokens).to(entropies.dtype)
