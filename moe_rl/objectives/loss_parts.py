"""Holds the parts that all policy losses share: their inputs with checks, and their result.

Legend: B sequences, T completion tokens, n_i tokens of sequence i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.errors import ArgumentError, describe
from moe_rl.objectives.centering import Head


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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Holds what every loss is computed from. `losses.policy_loss` describes the attributes.

    Attributes:
        rollout_logprobs: needed by `decoupled` and `minirl`.
        head: centers the scores of `cispo` and `dppo_tv`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape is wrong, or the denominator is below 1.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence_ids: Tensor
    denominator: int
    weights: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    head: Head | None = None

    def __post_init__(self) -> None:
        check_tokens(self.logprobs, self.old_logprobs, self.sequence_ids, self.denominator)
        if self.rollout_logprobs is not None:
            check_tokens(self.logprobs, self.rollout_logprobs, self.sequence_ids, self.denominator)
        if self.advantages.dtype != self.logprobs.dtype:
            raise TypeError(
                describe(
                    "wrong dtype",
                    where={"argument": "advantages"},
                    got=self.advantages.dtype,
                    expected=self.logprobs.dtype,
                    do="build them in the logprobs' dtype",
                )
            )
        if self.advantages.ndim != 1:
            raise ArgumentError(
                "must be one per sequence",
                where={"argument": "advantages"},
                got=tuple(self.advantages.shape),
                expected="[B]",
                do="pass one advantage per sequence, not per token",
            )
        weights = self.weights
        if weights is not None and (weights.dtype != torch.float64 or weights.shape != self.logprobs.shape):
            raise ArgumentError(
                "does not belong to these tokens",
                where={"argument": "weights"},
                got=f"{tuple(weights.shape)} {weights.dtype}",
                expected=f"{tuple(self.logprobs.shape)} torch.float64",
                do="pass what corrections.token_weights returned for the same microbatch",
            )

    def log_ratio(self) -> Tensor:
        """Return [T] float64: log r_t = l_t - l_old_t, with the gradient of l_t."""
        return self.logprobs.double() - self.old_logprobs.detach().double()

    def token_advantages(self) -> Tensor:
        """Return [T] float64 without gradient: the advantage of each token's sequence times the token's weight.

        The weight may be folded into the advantage because every term of a loss is proportional to |A| and otherwise
        depends only on the sign of A. A token of weight 0 then has advantage 0, so an overflow of its ratio cannot
        reach the loss.
        """
        of_token = self.advantages.detach().double()[self.sequence_ids]
        return of_token if self.weights is None else of_token * self.weights

    def sequence_advantages(self) -> Tensor:
        """Return [B] float64: advantage times weight, for losses with one term per sequence. Weights are constant in a
        sequence.
        """
        advantages = self.advantages.detach().double()
        if self.weights is None:
            return advantages
        return advantages * torch.ones_like(advantages).scatter(0, self.sequence_ids, self.weights)

    def nonempty(self) -> Tensor:
        """Return [B] bool: the sequences with at least one token."""
        return torch.zeros_like(self.advantages, dtype=torch.bool).index_fill(0, self.sequence_ids, True)

    def loss(self, terms: Tensor, ratio: Tensor, clipped: Tensor, counted: Tensor | None = None) -> PolicyLoss:
        """Return -sum(terms) / denominator with its counts. It is NaN if any input is not finite.

        Args:
            terms: float64, to be summed.
            ratio, clipped, counted: float64, bool and bool, one element per unit. counted None: all units count.
        """
        inputs = (self.logprobs, self.old_logprobs, self.advantages, self.weights, self.rollout_logprobs)
        broken = nan_unless_finite(*(tensor for tensor in inputs if tensor is not None))
        counted = torch.ones_like(clipped) if counted is None else counted
        end = ratio.new_full((1,), torch.inf)  # min and max of an empty set are then inf and -inf
        return PolicyLoss(
            loss=(-terms.sum() / self.denominator - broken).to(self.logprobs.dtype),
            clip_events=clipped.sum(),  # an empty sequence has ratio 1, which is never clipped
            clip_units=counted.sum(),
            ratio_sum=torch.where(counted, ratio, 0.0).sum(),
            ratio_min=torch.cat((torch.where(counted, ratio, torch.inf), end)).amin(),
            ratio_max=torch.cat((torch.where(counted, ratio, -torch.inf), -end)).amax(),
        )


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
    return torch.stack([(tensor - tensor).detach().double().sum() for tensor in values]).sum()


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


def check_positive(**parameters: float | None) -> None:
    """Raise ArgumentError unless each parameter is positive or None."""
    for name, value in parameters.items():
        if value is not None and not value > 0:
            raise ArgumentError(
                "must be positive",
                where={"argument": name},
                got=value,
                expected="above 0",
                do=f"correct objective.{name}",
            )
