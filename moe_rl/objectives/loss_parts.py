"""What the policy losses have in common: what they return, and what they ask of what they are given.

Legend: B sequences, T completion tokens, n_i tokens of sequence i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.errors import describe


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A microbatch's share of the loss, with sums for the metrics. All are scalar tensors; none was read by the host.

    loss: sum over this microbatch / denominator; dtype of the logprobs; carries the gradient, also when T is 0.
    clip_events: units whose gradient the loss took away, or made smaller; each loss says which. A ratio outside the
        range on the side that the advantage's sign leaves alone, or with advantage or weight 0, is no event.
    clip_units: what clip_events is counted out of: non-empty sequences (gspo), tokens (every other loss).
    ratio_sum, ratio_min, ratio_max: of the same units' ratios, float64; 0, inf, -inf when there is none.
    Merge microbatches and ranks by sum, except ratio_min and ratio_max.
    """

    loss: Tensor
    clip_events: Tensor
    clip_units: Tensor
    ratio_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def own_length(sequence_ids: Tensor) -> Tensor:
    """[T] float64: n_i of each token's own sequence. Needs neither B nor a host sync, and is deterministic."""
    ordered = sequence_ids.sort().values
    first = torch.searchsorted(ordered, sequence_ids)
    return (torch.searchsorted(ordered, sequence_ids, right=True) - first).double()


def sum_by_sequence(values: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """[B] float64: sum of each sequence's values [T]; 0 for an empty one. advantages: [B], for its length."""
    nothing = torch.zeros(advantages.shape, dtype=torch.float64, device=values.device)
    return nothing.index_add(0, sequence_ids, values)


def mean_by_sequence(values: Tensor, advantages: Tensor, sequence_ids: Tensor) -> Tensor:
    """[B] float64: the same for the mean."""
    return sum_by_sequence(values / own_length(sequence_ids), advantages, sequence_ids)


def token_advantages(advantages: Tensor, sequence_ids: Tensor, weights: Tensor | None) -> Tensor:
    """[T] float64, without gradient: of each token's sequence, times the token's weight.

    A loss may take a weight in the advantage's place because each of its terms is proportional to |A| and looks beside
    that at A's sign alone. A token of weight 0 is then one of advantage 0: no overflow of its ratio can reach the loss.
    """
    of_token = advantages.detach().double()[sequence_ids]
    return of_token if weights is None else of_token * weights


def sequence_advantages(advantages: Tensor, sequence_ids: Tensor, weights: Tensor | None) -> Tensor:
    """[B] float64: the same for losses with one term per sequence. weights: constant in a sequence."""
    advantages = advantages.detach().double()
    return advantages if weights is None else advantages * torch.ones_like(advantages).scatter(0, sequence_ids, weights)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r) A), with r (detached) and where the clipped branch was chosen; elementwise, float64.

    advantages: float64, without gradient. Ties between the two branches count as not clipped and keep their gradient.
    """
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded * advantages < ratio * advantages
    # Where the surrogate is flat the differentiable exp must not see the log-ratio: if it overflowed, autograd would
    # multiply a zero by inf. A NaN still shows: bounded is NaN then.
    flat = clipped | (advantages == 0)
    live = torch.where(flat, 0.0, log_ratio).exp()
    return torch.where(flat, bounded, live) * advantages, ratio, clipped


def nan_unless_finite(*values: Tensor) -> Tensor:
    """Scalar float64 without a gradient: 0 where every number of all values is finite, else NaN.

    To be taken off a result whose clamps, masks and comparisons may pass over such a number; 0 then changes no bit of
    it. The host does not wait for the device.
    """
    return torch.stack([(one - one).detach().double().sum() for one in values]).sum()


def with_counts(loss: Tensor, ratio: Tensor, clipped: Tensor, counted: Tensor) -> PolicyLoss:
    """loss: in the dtype it is returned in. ratio float64, clipped bool, counted bool: one of each for every unit."""
    end = ratio.new_full((1,), torch.inf)  # lets min and max of nothing be their neutral elements
    return PolicyLoss(
        loss=loss,
        clip_events=clipped.sum(),  # an empty sequence has ratio 1, which is never clipped
        clip_units=counted.sum(),
        ratio_sum=torch.where(counted, ratio, 0.0).sum(),
        ratio_min=torch.cat((torch.where(counted, ratio, torch.inf), end)).amin(),
        ratio_max=torch.cat((torch.where(counted, ratio, -torch.inf), -end)).amax(),
    )


def check_tokens(logprobs: Tensor, other: Tensor, sequence_ids: Tensor, denominator: int) -> None:
    """Raises TypeError or ValueError unless these are logprobs of the same tokens, in float32 or both in float64."""
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            describe(
                "too coarse for a policy ratio",
                where={"argument": "logprobs"},
                got=logprobs.dtype,
                expected="torch.float32",
                do="use token_logprobs, which computes them in float32",
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
        raise ValueError(
            describe(
                "per-token tensors must share one flat shape [T]",
                got=[tuple(t.shape) for t in (logprobs, other, sequence_ids)],
                expected="[T] for logprobs, the other logprobs and sequence_ids",
                do="drop prompt and padding tokens from all of them alike",
            )
        )
    if denominator < 1:
        raise ValueError(
            describe(
                "must be at least 1",
                where={"argument": "denominator"},
                got=denominator,
                expected="global_denominator of the whole optimizer batch",
                do="skip an update that has no completion token",
            )
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
    **parameters: float,
) -> Tensor:
    """`check_tokens`, and the same for the other tensors that the loss takes. parameters: the loss's own, by name; all
    must be positive. Returns `nan_unless_finite` of all these tensors, to be taken off the loss."""
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
        raise ValueError(
            describe(
                "must be one per sequence",
                where={"argument": "advantages"},
                got=tuple(advantages.shape),
                expected="[B]",
                do="pass them per sequence, not per token",
            )
        )
    if weights is not None and (weights.dtype != torch.float64 or weights.shape != logprobs.shape):
        raise ValueError(
            describe(
                "not of these tokens",
                where={"argument": "weights"},
                got=f"{tuple(weights.shape)} {weights.dtype}",
                expected=f"{tuple(logprobs.shape)} torch.float64",
                do="pass what corrections.token_weights returned for the same microbatch",
            )
        )
    for name, value in parameters.items():
        if not value > 0:
            raise ValueError(
                describe(
                    "must be positive",
                    where={"argument": name},
                    got=value,
                    expected="above 0",
                    do=f"mend objective.{name}",
                )
            )
    given = (logprobs, old_logprobs, advantages, weights, rollout_logprobs)
    return nan_unless_finite(*(tensor for tensor in given if tensor is not None))
