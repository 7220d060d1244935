"""The entropy of the policy, as a bonus in the loss and as a metric."""

from __future__ import annotations

from torch import Tensor

from moe_rl.errors import describe


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
                "the denominator must be at least 1",
                got=tokens,
                expected="the completion tokens of the whole optimizer update",
                do="skip an update that has no completion token",
            )
        )
    return (entropies.double().sum() / tokens).to(entropies.dtype)
