"""Policy losses (GSPO, GRPO) and the KL penalty to a frozen reference.

Layout of one microbatch, a packed run of B sequences. Per-token tensors are flat [T] over the COMPLETION tokens of
all of its sequences; `sequence_ids` [T] int64 in 0..B-1 says whose token each is. A sequence may have no token. Every
sequence lies whole in one microbatch: under context parallelism gather its logprobs (differentiably) first.

Denominator. Every function returns the microbatch's SUM divided by `denominator`, a number of the whole optimizer
batch over all ranks. Gradients must therefore be summed, not averaged, over microbatches and data-parallel ranks; then
they do not depend on how the batch was cut.

Precision. A GSPO ratio differs from 1 by about 1e-4, far below what bfloat16 can hold, so logprobs must be float32 (or
float64); everything between them and the returned loss is computed in float64.

No log-ratio is clamped: a clamp would zero gradients silently. A ratio that overflows where it matters gives a
non-finite loss, which the step refuses; where it does not matter (clipped, or advantage 0) it gives no NaN either.

Legend: B sequences, T completion tokens; l = logprobs, l_old = old_logprobs, A = advantages, n_i tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.errors import ConfigError, describe
from moe_rl.objectives.kl import k3


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A microbatch's share of the loss, with sums for the metrics. All are scalar tensors; none was read by the host.

    loss: sum over this microbatch / denominator; dtype of the logprobs; carries the gradient, also when T is 0.
    clip_events: units for which the clipped branch is strictly the smaller one, so that they give no gradient. A ratio
        outside the range on the side that the advantage's sign leaves alone, or with advantage 0, is no event.
    clip_units: what clip_events is counted out of: non-empty sequences (gspo), tokens (grpo).
    ratio_sum, ratio_min, ratio_max: of the same units' ratios, float64; 0, inf, -inf when there is none.
    Merge microbatches and ranks by sum, except ratio_min and ratio_max.
    """

    loss: Tensor
    clip_events: Tensor
    clip_units: Tensor
    ratio_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def global_denominator(lengths: Iterable[int]) -> int:
    """Sequences that have at least one completion token, among `lengths` of the GLOBAL optimizer batch (all ranks).

    Both losses are means over sequences, and an empty one has no term. 0 means that there is nothing to learn from:
    skip the update.
    """
    return sum(length > 0 for length in lengths)


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *,
         clip_low: float, clip_high: float, denominator: int) -> PolicyLoss:
    """Group Sequence Policy Optimization (arXiv 2507.18071, equations 5 and 7).

    loss = -(1 / denominator) sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i  = exp((1 / n_i) sum_t (l_t - l_old_t)), the length-normalised likelihood ratio of sequence i

    denominator: `global_denominator`, non-empty sequences of the global optimizer batch. The mean over sequences is
    part of the method, so there is no choice of aggregation. Clipping is counted per sequence.
    Shapes, dtypes and errors: see `policy_loss`.
    """
    _check(logprobs, old_logprobs, sequence_ids, denominator)
    _check_surrogate(logprobs, advantages, clip_low, clip_high)
    token_log_ratio = (logprobs.double() - old_logprobs.detach().double()) / _own_length(sequence_ids)
    nothing = torch.zeros(advantages.shape, dtype=torch.float64, device=logprobs.device)
    log_ratio = nothing.index_add(0, sequence_ids, token_log_ratio)
    nonempty = nothing.bool().index_fill(0, sequence_ids, True)
    surrogate, ratio, clipped = _clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    loss = -torch.where(nonempty, surrogate, 0.0).sum() / denominator
    return _with_counts(loss.to(logprobs.dtype), ratio, clipped, nonempty)


def grpo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *,
         clip_low: float, clip_high: float, denominator: int) -> PolicyLoss:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, equation 3, without its KL term).

    loss = -(1 / denominator) sum_i (1 / n_i) sum_t min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
    r_t  = exp(l_t - l_old_t)

    denominator: `global_denominator`, non-empty sequences of the global optimizer batch: a mean over sequences of means
    over tokens. Clipping is counted per token. Shapes, dtypes and errors: see `policy_loss`.
    """
    _check(logprobs, old_logprobs, sequence_ids, denominator)
    _check_surrogate(logprobs, advantages, clip_low, clip_high)
    log_ratio = logprobs.double() - old_logprobs.detach().double()
    surrogate, ratio, clipped = _clipped_surrogate(log_ratio, advantages[sequence_ids], clip_low, clip_high)
    loss = -(surrogate / _own_length(sequence_ids)).sum() / denominator
    return _with_counts(loss.to(logprobs.dtype), ratio, clipped, torch.ones_like(clipped))


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {"gspo": gspo, "grpo": grpo}


def policy_loss(name: str, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *,
                clip_low: float, clip_high: float, denominator: int) -> PolicyLoss:
    """The loss called `name` in POLICY_LOSSES, on one microbatch; minimise it.

    logprobs, old_logprobs [T]: float32 (or both float64), natural log; no gradient flows into old_logprobs.
    advantages [B]: the same dtype, constant in a sequence. sequence_ids [T]: int64.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    denominator: at least 1, see the loss. Ties between the two branches count as not clipped and keep their gradient.
    Raises ConfigError for an unknown name, TypeError for a wrong dtype, ValueError for a wrong shape or number. Values
    of sequence_ids are not checked here, since that would make the host wait for the device.
    """
    if name not in POLICY_LOSSES:
        raise ConfigError(describe("unknown policy loss", where="objective.name", got=repr(name),
                                   expected=" or ".join(POLICY_LOSSES), do="set objective.name to one of these"))
    return POLICY_LOSSES[name](logprobs, old_logprobs, advantages, sequence_ids,
                               clip_low=clip_low, clip_high=clip_high, denominator=denominator)


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, sequence_ids: Tensor, denominator: int) -> Tensor:
    """KL(policy || reference) in nats per token, by k3; a scalar in the logprobs' dtype, with gradient.

    (1 / denominator) sum_i (1 / n_i) sum_t [exp(l_ref_t - l_t) - 1 - (l_ref_t - l_t)]
    (DeepSeekMath, arXiv 2402.03300, equation 4.) denominator: as for the losses.

    The value is unbiased for KL(policy || reference) on tokens drawn from the policy. Its gradient, differentiated
    through l at fixed tokens as GRPO does, is on average that of the OTHER direction, KL(reference || policy); both
    vanish at policy = reference only. Shapes, dtypes and errors: see `policy_loss`.
    """
    _check(logprobs, ref_logprobs, sequence_ids, denominator)
    tokens = k3(ref_logprobs.detach().double() - logprobs.double())
    return ((tokens / _own_length(sequence_ids)).sum() / denominator).to(logprobs.dtype)


def _own_length(sequence_ids: Tensor) -> Tensor:
    """[T] float64: n_i of each token's own sequence. Needs neither B nor a host sync, and is deterministic."""
    ordered = sequence_ids.sort().values
    first = torch.searchsorted(ordered, sequence_ids)
    return (torch.searchsorted(ordered, sequence_ids, right=True) - first).double()


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r) A), with r (detached) and where the clipped branch was chosen; elementwise, float64."""
    advantages = advantages.detach().double()
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded * advantages < ratio * advantages
    # Where the surrogate is flat the differentiable exp must not see the log-ratio: if it overflowed, autograd would
    # multiply a zero by inf. A NaN still shows: bounded is NaN then.
    flat = clipped | (advantages == 0)
    live = torch.where(flat, 0.0, log_ratio).exp()
    return torch.where(flat, bounded, live) * advantages, ratio, clipped


def _with_counts(loss: Tensor, ratio: Tensor, clipped: Tensor, counted: Tensor) -> PolicyLoss:
    end = ratio.new_full((1,), torch.inf)  # lets min and max of nothing be their neutral elements
    return PolicyLoss(
        loss=loss,
        clip_events=clipped.sum(),  # an empty sequence has ratio 1, which is never clipped
        clip_units=counted.sum(),
        ratio_sum=torch.where(counted, ratio, 0.0).sum(),
        ratio_min=torch.cat((torch.where(counted, ratio, torch.inf), end)).amin(),
        ratio_max=torch.cat((torch.where(counted, ratio, -torch.inf), -end)).amax(),
    )


def _check(logprobs: Tensor, other: Tensor, sequence_ids: Tensor, denominator: int) -> None:
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise TypeError(describe("logprobs are too coarse for a policy ratio", got=logprobs.dtype,
                                 expected="torch.float32", do="use token_logprobs, which computes them in float32"))
    if other.dtype != logprobs.dtype:
        raise TypeError(describe("the two sets of logprobs differ in dtype", got=f"{logprobs.dtype} and {other.dtype}",
                                 expected="the same dtype", do="compute and keep both in float32"))
    if sequence_ids.dtype != torch.int64:
        raise TypeError(describe("sequence_ids have the wrong dtype", got=sequence_ids.dtype, expected=torch.int64,
                                 do="build them as int64"))
    if not logprobs.ndim == 1 or not logprobs.shape == other.shape == sequence_ids.shape:
        raise ValueError(describe("per-token tensors must share one flat shape [T]",
                                  got=[tuple(t.shape) for t in (logprobs, other, sequence_ids)],
                                  expected="[T] for logprobs, the other logprobs and sequence_ids",
                                  do="drop prompt and padding tokens from all of them alike"))
    if denominator < 1:
        raise ValueError(describe("the denominator must count at least one sequence", got=denominator,
                                  expected="global_denominator of the whole optimizer batch, 1 or more",
                                  do="skip an update that has no completion token"))


def _check_surrogate(logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> None:
    if advantages.dtype != logprobs.dtype:
        raise TypeError(describe("advantages have the wrong dtype", got=advantages.dtype, expected=logprobs.dtype,
                                 do="build them in the logprobs' dtype"))
    if advantages.ndim != 1:
        raise ValueError(describe("advantages must be one per sequence", got=tuple(advantages.shape), expected="[B]",
                                  do="pass them per sequence, not per token"))
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(describe("the clip range must contain 1", got=f"clip_low={clip_low}, clip_high={clip_high}",
                                  expected="both at least 0", do="mend objective.clip_low and objective.clip_high"))
