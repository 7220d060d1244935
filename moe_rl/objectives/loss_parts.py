"""Holds the parts that all policy losses share: their result type and the checks of their inputs.

Legend: B sequences, T completion tokens, n_i tokens of sequence i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.errors import ArgumentError, describe


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Holds one microbatch's share of the loss, and sums for the metrics, as scalar tensors that the host has not read.

    Add the sums over microbatches and ranks; take the minimum and maximum of ratio_min and ratio_max.

    Attributes:
        loss: sum over this microbatch / denominator, in the dtype of the logprobs. It carries the gradient, also when T
            is 0.
        clip_events: number of units whose gradient the loss removed or reduced. Each loss defines its event. A ratio
            outside the range is not an event where the sign of the advantage keeps the gradient, or where advantage or
            weight is 0.
        clip_units: number of units that clip_events is a part of: non-empty sequences (gspo) or tokens (all other
            losses).
        ratio_sum, ratio_min, ratio_max: statistics of the ratios of these units, float64. Without units they are 0, inf
            and -inf.
    """

    loss: Tensor
    clip_events: Tensor
    clip_units: Tensor
    ratio_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def own_length(sequence_ids: Tensor) -> Tensor:
    """Return [T] float64: the length n_i of each token's sequence. Needs no host sync and is deterministic."""
    ordered = sequence_ids.sort().values
    first = torch.searchsorted(ordered, sequence_ids)
    return (torch.searchsorted(ordered, sequence_ids, right=True) - first).double()


def sum_by_sequence(values: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return [B] float64: the sum of the values [T] of each sequence, 0 for an empty one. advantages [B] only gives
    B.
    """
    nothing = torch.zeros(advantages.shape, dtype=torch.float64, device=values.device)
    return nothing.index_add(0, sequence_ids, values)


def mean_by_sequence(values: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return [B] float64: the mean of the values [T] of each sequence, 0 for an empty one."""
    return sum_by_sequence(values / own_length(sequence_ids), advantages, sequence_ids)


def token_advantages(advantages: Tensor, sequence_ids: Tensor, weights: Tensor | None) -> Tensor:
    """Return [T] float64 without gradient: the advantage of each token's sequence times the token's weight.

    The weight may be folded into the advantage because every term of a loss is proportional to |A| and otherwise
    depends only on the sign of A. A token of weight 0 then has advantage 0, so an overflow of its ratio cannot reach
    the loss.
    """
    of_token = advantages.detach().double()[sequence_ids]
    return of_token if weights is None else of_token * weights


def sequence_advantages(advantages: Tensor, sequence_ids: Tensor, weights: Tensor | None) -> Tensor:
    """Return [B] float64: advantage times weight, for losses with one term per sequence. Weights are constant in a
    sequence.
    """
    advantages = advantages.detach().double()
    return advantages if weights is None else advantages * torch.ones_like(advantages).scatter(0, sequence_ids, weights)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return min(r A, clip(r) A), r (detached), and a mask of the elements that used the clipped branch; all float64.

    advantages: float64, without gradient. Elements with equal branches count as not clipped and keep their gradient.
    dual_clip: the largest r of an element with A < 0; larger ones are held there and count as clipped. None: no limit.
    """
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded * advantages < ratio * advantages
    if dual_clip is not None:
        beyond = (advantages < 0) & (ratio > dual_clip)
        bounded, clipped = torch.where(beyond, dual_clip, bounded), clipped | beyond
    # Where the surrogate is flat, the differentiable exp must not see the log-ratio: after an overflow autograd would
    # multiply a zero by inf. A NaN still shows, because it makes `bounded` NaN.
    flat = clipped | (advantages == 0)
    live = torch.where(flat, 0.0, log_ratio).exp()
    return torch.where(flat, bounded, live) * advantages, ratio, clipped


def nan_unless_finite(*values: Tensor) -> Tensor:
    """Return a scalar float64 without gradient: 0 if all numbers are finite, else NaN.

    The caller subtracts it from a result whose clamps, masks and comparisons may pass over a NaN. Subtracting 0 changes
    no bit. The host does not wait for the device.
    """
    return torch.stack([(one - one).detach().double().sum() for one in values]).sum()


def with_counts(loss: Tensor, ratio: Tensor, clipped: Tensor, counted: Tensor) -> PolicyLoss:
    """Build a PolicyLoss. `loss` has its final dtype; ratio (float64), clipped and counted (bool) have one element per
    unit.
    """
    end = ratio.new_full((1,), torch.inf)  # min and max of an empty set are then inf and -inf
    return PolicyLoss(
        loss=loss,
        clip_events=clipped.sum(),  # an empty sequence has ratio 1, which is never clipped
        clip_units=counted.sum(),
        ratio_sum=torch.where(counted, ratio, 0.0).sum(),
        ratio_min=torch.cat((torch.where(counted, ratio, torch.inf), end)).amin(),
        ratio_max=torch.cat((torch.where(counted, ratio, -torch.inf), -end)).amax(),
    )


def check_tokens(logprobs: Tensor, other: Tensor, sequence_ids: Tensor, denominator: int) -> None:
    """Check that both logprobs belong to the same tokens and are both float32 or both float64.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape is wrong.
    """
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            describe(
                "too coarse for a policy ratio",
                where={"argument": "logprobs"},
                got=logprobs.dtype,
                expected="torch.float32",
                do="compute them with token_logprobs, which returns float32",
            )
        )
    if other.dtype != logprobs.dtype:
        raise TypeError(
            describe(
                "the two sets of logprobs differ in dtype",
                got=f"{logprobs.dtype} and {other.dtype}",
                expected="the same dtype",
                do="compute and keep both in float32",
            )
        )
    if sequence_ids.dtype != torch.int64:
        raise TypeError(
            describe(
                "wrong dtype",
                where={"argument": "sequence_ids"},
                got=sequence_ids.dtype,
                expected=torch.int64,
                do="build them as int64",
            )
        )
    if not logprobs.ndim == 1 or not logprobs.shape == other.shape == sequence_ids.shape:
        raise ArgumentError(
            "per-token tensors must share one flat shape [T]",
            got=[tuple(t.shape) for t in (logprobs, other, sequence_ids)],
            expected="[T] for logprobs, the other logprobs and sequence_ids",
            do="drop prompt and padding tokens from all of these tensors",
        )
    if denominator < 1:
        raise ArgumentError(
            "must be at least 1",
            where={"argument": "denominator"},
            got=denominator,
            expected="global_denominator of the whole optimizer batch",
            do="skip an update that has no completion token",
        )


def check_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None,
    *,
    rollout_logprobs: Tensor | None = None,
    **parameters: float | None,
) -> Tensor:
    """Check all tensors and parameters of a loss, which must be positive or None. Return `nan_unless_finite` of the
    tensors.
    """
    check_tokens(logprobs, old_logprobs, sequence_ids, denominator)
    if rollout_logprobs is not None:
        check_tokens(logprobs, rollout_logprobs, sequence_ids, denominator)
    if advantages.dtype != logprobs.dtype:
        raise TypeError(
            describe(
                "wrong dtype",
                where={"argument": "advantages"},
                got=advantages.dtype,
                expected=logprobs.dtype,
                do="build them in the logprobs' dtype",
            )
        )
    if advantages.ndim != 1:
        raise ArgumentError(
            "must be one per sequence",
            where={"argument": "advantages"},
            got=tuple(advantages.shape),
            expected="[B]",
            do="pass one advantage per sequence, not per token",
        )
    if weights is not None and (weights.dtype != torch.float64 or weights.shape != logprobs.shape):
        raise ArgumentError(
            "does not belong to these tokens",
            where={"argument": "weights"},
            got=f"{tuple(weights.shape)} {weights.dtype}",
            expected=f"{tuple(logprobs.shape)} torch.float64",
            do="pass what corrections.token_weights returned for the same microbatch",
        )
    for name, value in parameters.items():
        if value is not None and not value > 0:
            raise ArgumentError(
                "must be positive",
                where={"argument": name},
                got=value,
                expected="above 0",
                do=f"correct objective.{name}",
            )
    given = (logprobs, old_logprobs, advantages, weights, rollout_logprobs)
    return nan_unless_finite(*(tensor for tensor in given if tensor is not None))
