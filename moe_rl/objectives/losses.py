"""The policy losses by name, and the KL penalty to a frozen reference.

Layout of one microbatch, a packed run of B sequences. Per-token tensors are flat [T] over the COMPLETION tokens of
all of its sequences; `sequence_ids` [T] int64 in 0..B-1 says whose token each is. A sequence may have no token. Every
sequence lies whole in one microbatch: under context parallelism gather its logprobs (differentiably) first.

Denominator. Every function returns the microbatch's SUM divided by `denominator`, a number of the whole optimizer
batch over all ranks. Gradients must therefore be summed, not averaged, over microbatches and data-parallel ranks; then
they do not depend on how the batch was cut. Tokens that a loss masks or clips, or that a
correction rejects, stay in it.

Precision. A GSPO ratio differs from 1 by about 1e-4, far below what bfloat16 can hold, so logprobs must be float32 (or
float64); everything between them and the returned loss is computed in float64.

No log-ratio is clamped: a clamp would zero gradients silently. A ratio that overflows where it matters gives a
non-finite loss, which the step refuses; where it does not matter (clipped, truncated, or advantage 0) it gives no NaN
either. A NaN or an infinity in what a loss is given makes it NaN, wherever it stands.

Legend: B sequences, T completion tokens; l = logprobs, l_old = old_logprobs, A = advantages, n_i tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from moe_rl.errors import ConfigError, describe
from moe_rl.objectives.clipped import dapo, decoupled, dr_grpo, grpo, sapo
from moe_rl.objectives.loss_parts import PolicyLoss, check_tokens, nan_unless_finite, own_length
from moe_rl.objectives.penalties import KL_ESTIMATORS
from moe_rl.objectives.sequence_ratio import gmpo, gspo, gspo_token
from moe_rl.objectives.weighted import cispo, dppo_tv, minirl

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
    "decoupled": decoupled,
}

_TOKEN_MEANS = ("dapo", "cispo", "dppo_tv", "decoupled")
USE_ROLLOUT_LOGPROBS = ("minirl", "decoupled")


def global_denominator(name: str, lengths: Iterable[int], max_tokens: int) -> int:
    """What the loss called `name` is divided by. lengths: completion tokens of every sequence of the GLOBAL batch.

    Compute it once per optimizer step, over all ranks, before anything is masked or rejected.
    gspo, gspo_token, grpo, sapo, gmpo: sequences with at least one token; an empty one has no mean over its tokens.
    dapo, cispo, dppo_tv, decoupled: tokens. minirl: sequences, empty ones too: a sum over no token is 0.
    dr_grpo: sequences, empty ones too, x max_tokens, the longest completion allowed; no other loss looks at it.
    0 means that there is nothing to learn from: skip the update. Raises ConfigError for an unknown name.
    """
    _check_name(name)
    lengths = list(lengths)
    if name in _TOKEN_MEANS:
        return sum(lengths)
    if name == "minirl":
        return len(lengths)
    if name == "dr_grpo":
        return len(lengths) * max_tokens
    return nonempty(lengths)


def nonempty(lengths: Iterable[int]) -> int:
    """Sequences that have at least one completion token: what `reference_kl` is divided by under every loss."""
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
    """The loss called `name` in POLICY_LOSSES, on one microbatch; minimise it.

    logprobs, old_logprobs, rollout_logprobs [T]: float32 (or all float64), natural log, of the trainer now, of the
    policy the ratio is taken to, and of the sampler; no gradient flows into the latter two. advantages [B]: the same
    dtype, constant in a sequence. sequence_ids [T]: int64. denominator: `global_denominator`, at least 1.
    weights [T]: float64, of `corrections.token_weights`: each token's term is multiplied by its own, gspo's and gmpo's
    term of a sequence by that of its tokens, which must be the same. None: 1.
    parameters: exactly the loss's own keyword arguments. Range of the clipping ones: [1 - clip_low, 1 + clip_high].
    Raises ConfigError for an unknown name, TypeError for a wrong dtype or parameter, ValueError for a wrong shape or
    number. Values of sequence_ids are not checked here, since that would make the host wait for the device.
    """
    _check_name(name)
    if name in USE_ROLLOUT_LOGPROBS:
        parameters["rollout_logprobs"] = rollout_logprobs
    return POLICY_LOSSES[name](
        logprobs, old_logprobs, advantages, sequence_ids, denominator=denominator, weights=weights, **parameters
    )


def reference_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    sequence_ids: Tensor,
    denominator: int,
    *,
    estimator: str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """KL(policy || reference) in nats per token; a scalar in the logprobs' dtype, with gradient.

    (1 / denominator) sum_i (1 / n_i) sum_t k(d_t),   d_t = l_ref_t - l_t   (DeepSeekMath, arXiv 2402.03300, equation 4)

    estimator: k1, k2 or k3; `penalties.py` says what value and gradient of each estimate. old_logprobs: each k(d_t) is
    multiplied by r_t = exp(l_t - l_old_t), and the gradient flows through r_t too (DeepSeek-V3.2, arXiv 2512.02556):

        r_t k1(d_t) and r_t k3(d_t): unbiased for KL(policy || reference) in value and in gradient, for tokens drawn
        from the old policy. The ratio of the tokens before t is left out, as it is in the policy losses.
        r_t k2(d_t): neither; its gradient is that of the mean of d^2 / 2.

    denominator: `nonempty` sequences of the global optimizer batch, whatever the policy loss is divided by, so that it
    means the same beside each of them. No correction's weight touches it. Shapes, dtypes, errors: see `policy_loss`.
    """
    check_tokens(logprobs, ref_logprobs, sequence_ids, denominator)
    tokens = KL_ESTIMATORS[estimator](ref_logprobs.detach().double() - logprobs.double())
    if old_logprobs is not None:
        check_tokens(logprobs, old_logprobs, sequence_ids, denominator)
        # A ratio of 0, to an old logprob that is infinite, is finite.
        tokens = (logprobs.double() - old_logprobs.detach().double()).exp() * tokens - nan_unless_finite(old_logprobs)
    return ((tokens / own_length(sequence_ids)).sum() / denominator).to(logprobs.dtype)


def _check_name(name: str) -> None:
    if name not in POLICY_LOSSES:
        raise ConfigError(
            describe(
                "unknown policy loss",
                where={"key": "objective.name"},
                got=repr(name),
                expected=" or ".join(POLICY_LOSSES),
                do="set objective.name to one of these",
            )
        )
