"""Provides the policy losses by name, and the KL penalty to a frozen reference model.

Layout: a microbatch is a packed run of B sequences. Per-token tensors are flat [T], over the COMPLETION tokens of all
its sequences. `sequence_ids` [T] int64 in 0..B-1 gives the sequence of each token. A sequence may have no token. Every
sequence is whole in one microbatch, so under context parallelism gather its logprobs (differentiably) first. A
completion that was sampled in several segments is one sequence here: all of its tokens have one id.

Denominator: every function returns the microbatch's SUM divided by `denominator`, a number of the whole optimizer
batch over all ranks. Sum the gradients over microbatches and data-parallel ranks; do not average them. They then do not
depend on how the batch was divided. The denominator includes tokens that a loss masks or clips and tokens that a
correction rejects.

Precision: a GSPO ratio differs from 1 by about 1e-4, far below the resolution of bfloat16. Logprobs must therefore be
float32 (or float64). Everything between the logprobs and the returned loss is computed in float64.

No log-ratio is clamped, because a clamp would zero gradients silently. A ratio that overflows gives a non-finite loss,
which the step refuses, unless the ratio has no effect (clipped, truncated, or advantage 0). A NaN or an infinity in any
input makes the loss NaN.

Legend: B sequences, T completion tokens; l = logprobs, l_old = old_logprobs, A = advantages, n_i tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.clipped import dapo, decoupled, dr_grpo, grpo, sapo
from moe_rl.objectives.loss_parts import LossInputs, PolicyLoss, check_tokens, nan_unless_finite, own_length
from moe_rl.objectives.penalties import KL_ESTIMATORS
from moe_rl.objectives.sequence_ratio import gmpo, gspo, gspo_token
from moe_rl.objectives.weighted import cispo, dppo_tv, minirl, topr

POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "minirl": minirl,
    "topr": topr,
    "decoupled": decoupled,
}

TOKEN_MEANS = ("dapo", "cispo", "dppo_tv", "decoupled")
USE_ROLLOUT_LOGPROBS = ("minirl", "decoupled")


def global_denominator(name: str, lengths: Iterable[int], max_tokens: int) -> int:
    """Return the denominator of the loss called `name`. Compute it once per optimizer step, before any masking.

        gspo, gspo_token, grpo, sapo, gmpo: number of sequences with at least one token
        dapo, cispo, dppo_tv, decoupled: number of tokens
        minirl, topr: number of sequences, empty ones included
        dr_grpo: number of sequences, empty ones included, times max_tokens

    A denominator of 0 means that the batch has nothing to learn from: skip the update.

    Args:
        lengths: the number of completion tokens of every sequence of the GLOBAL batch, over all ranks.
        max_tokens: the longest completion allowed. Only dr_grpo uses it.

    Raises:
        ConfigError: the name is unknown.
    """
    check_name(name)
    lengths = list(lengths)
    if name in TOKEN_MEANS:
        return sum(lengths)
    if name in ("minirl", "topr"):
        return len(lengths)
    if name == "dr_grpo":
        return len(lengths) * max_tokens
    return nonempty(lengths)


def nonempty(lengths: Iterable[int]) -> int:
    """Return the number of sequences with at least one completion token: the denominator of `reference_kl` with every
    loss.
    """
    return sum(length > 0 for length in lengths)


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    rollout_logprobs: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    **parameters: float,
) -> PolicyLoss:
    """Compute the loss called `name` (a key of POLICY_LOSSES) on one microbatch, to be minimised.

    The values of sequence_ids are not checked, because that would make the host wait for the device.

    Args:
        logprobs: [T] float32 or float64, natural logarithm, of the current policy.
        old_logprobs: [T], same dtype, of the policy in the denominator of the ratio. Gets no gradient.
        rollout_logprobs: [T], same dtype, of the sampler. Gets no gradient.
        advantages: [B], same dtype.
        sequence_ids: [T] int64 in 0..B-1.
        denominator: the result of `global_denominator`, at least 1.
        weights: [T] float64 from `corrections.token_weights`, a factor of each token's term. For gspo and gmpo it is a
            factor of each sequence's term and must be constant in a sequence. None: 1.
        parameters: the keyword arguments of the loss, all of them and no others. The clip range is [1 - clip_low, 1 +
            clip_high].

    Raises:
        ConfigError: the name is unknown.
        TypeError: a dtype or a parameter is wrong.
        ValueError: a shape or a number is wrong.
    """
    check_name(name)
    rollout = rollout_logprobs if name in USE_ROLLOUT_LOGPROBS else None
    inputs = LossInputs(logprobs, old_logprobs, advantages, sequence_ids, denominator, weights, rollout)
    return POLICY_LOSSES[name](inputs, **parameters)


def reference_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    sequence_ids: Tensor,
    denominator: int,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Compute KL(policy || reference) in nats per token: a scalar with gradient, in the dtype of the logprobs.

    (1 / denominator) sum_i (1 / n_i) sum_t k(d_t),   d_t = l_ref_t - l_t   (DeepSeekMath, arXiv 2402.03300, equation 4)

    `policy_loss` describes shapes, dtypes and errors. The weights of corrections do not apply to the KL.

    Args:
        estimator: k1, k2 or k3. `penalties.py` gives the value and gradient of each.
        old_logprobs: if given, each k(d_t) is multiplied by r_t = exp(l_t - l_old_t), and the gradient flows through
            r_t too (DeepSeek-V3.2, arXiv 2512.02556). For tokens drawn from the old policy, r_t k1(d_t) and r_t k3(d_t)
            are then unbiased for KL(policy || reference) in value and gradient. r_t k2(d_t) is not: its gradient is
            that of the mean of d^2 / 2. As in the policy losses, r_t leaves out the ratios of earlier tokens.
        denominator: the number of `nonempty` sequences of the global optimizer batch. It does not depend on the policy
            loss, so the KL has the same meaning with every loss.
    """
    check_tokens(logprobs, ref_logprobs, sequence_ids, denominator)
    tokens = KL_ESTIMATORS[estimator](ref_logprobs.detach().double() - logprobs.double())
    if old_logprobs is not None:
        check_tokens(logprobs, old_logprobs, sequence_ids, denominator)
        # The ratio to an infinite old logprob is 0, which is finite, so the check looks at the logprob itself.
        tokens = (logprobs.double() - old_logprobs.detach().double()).exp() * tokens - nan_unless_finite(old_logprobs)
    return ((tokens / own_length(sequence_ids)).sum() / denominator).to(logprobs.dtype)


def check_name(name: str) -> None:
    """Raise ConfigError unless a loss has this name."""
    if name not in POLICY_LOSSES:
        raise ConfigError(
            "unknown policy loss",
            where={"key": "objective.name"},
            got=repr(name),
            expected=" or ".join(POLICY_LOSSES),
            do="set objective.name to one of these",
        )
