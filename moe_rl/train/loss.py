"""Computes the loss of one optimizer update: the objective's policy loss with its corrections, KL penalty and entropy
bonus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.megatron.microbatch import Share, Work
from moe_rl.objectives import corrections
from moe_rl.objectives.centering import Head
from moe_rl.objectives.lags import interpolated
from moe_rl.objectives.loss_parts import LossInputs
from moe_rl.objectives.losses import POLICY_LOSSES, USE_ROLLOUT_LOGPROBS, reference_kl
from moe_rl.objectives.penalties import entropy_bonus


@dataclass(slots=True)
class LossSums:
    """Sums over the updates of a step on this rank. Each becomes a scalar tensor with the first value added."""

    loss: torch.Tensor | int = 0
    kl: torch.Tensor | int = 0
    clip_events: torch.Tensor | int = 0
    clip_units: torch.Tensor | int = 0
    ratio: torch.Tensor | int = 0
    corrections: torch.Tensor | int = 0
    head_mass: torch.Tensor | int = 0


class UpdateLoss:
    """Computes the loss of this rank's share of an update, called once per microbatch. It is a
    `megatron.schedule.LossFunction`.

    Args:
        own_old: The pass runs on the weights of the old policy, so its own logprobs, detached, are those of the old
            policy.

    Attributes:
        sums: Each call adds to these sums.
        seen: For each microbatch, the detached logprobs and, if requested, the entropies that the call received.
        calls: How often the loss of each microbatch was computed.
    """

    def __init__(self, objective: ObjectiveConfig, share: Share, sums: LossSums, *, own_old: bool = False):
        self.objective, self.share, self.sums, self.own_old = objective, share, sums, own_old
        self.seen: dict[int, tuple[torch.Tensor, ...]] = {}
        self.calls: Counter[int] = Counter()

    def __call__(
        self, number: int, logprobs: torch.Tensor, *entropies: torch.Tensor, head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of microbatch `number`.

        Args:
            logprobs: float32 [N], of its completion tokens.
            entropies: float32 [N], if requested.
            head: float32 [K, N], logprobs of the microbatch's head ids, if it has any.
        """
        objective, share, sums, work = self.objective, self.share, self.sums, self.share.work[number]
        microbatch = work.microbatch
        self.calls[number] += 1
        self.seen[number] = tuple(values.detach() for values in (logprobs, *entropies))
        if self.own_old:
            work.old_logprobs = self.seen[number][0]
        elif objective.old_logprobs == "interpolated":
            assert work.lags is not None
            work.old_logprobs = interpolated(self.seen[number][0], microbatch.rollout_logprobs, work.lags)
        centered = None
        if head is not None:
            assert microbatch.head_logprobs is not None  # recorded together with the ids
            centered = Head(head, microbatch.head_logprobs)
            sums.head_mass += microbatch.head_logprobs.double().exp().sum()
        inputs = LossInputs(
            logprobs,
            work.old_logprobs,
            microbatch.advantages,
            microbatch.sequence_ids,
            share.denominator,
            self._weights(work, logprobs),
            microbatch.rollout_logprobs if objective.name in USE_ROLLOUT_LOGPROBS else None,
            centered,
        )
        # The loss function is looked up here rather than through `policy_loss`, to keep the call stack shorter.
        result = POLICY_LOSSES[objective.name](inputs, **objective.parameters)
        total = result.loss
        if objective.kl_coef > 0 and objective.kl_in == "loss":
            kl = reference_kl(
                logprobs,
                work.ref_logprobs,
                microbatch.sequence_ids,
                share.sequences,
                estimator=objective.kl_estimator,
                old_logprobs=work.old_logprobs if objective.kl_unbiased else None,
            )
            total = total + objective.kl_coef * kl
            sums.kl += kl.detach().double()
        if objective.entropy_coef > 0:
            (entropy,) = entropies
            total = total - objective.entropy_coef * entropy_bonus(entropy, share.tokens)
        # Nothing is read back here: that would make the host wait for the device after every microbatch.
        sums.loss += total.detach().double()
        sums.clip_events += result.clip_events
        sums.clip_units += result.clip_units
        sums.ratio += result.ratio_sum
        return total

    def scored(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the logprobs and the entropies of all microbatches; nothing on ranks that compute no loss."""
        seen = [self.seen[number] for number in sorted(self.seen)]
        return [logprobs for logprobs, _ in seen], [entropies for _, entropies in seen]

    def _weights(self, work: Work, logprobs: torch.Tensor) -> torch.Tensor | None:
        """Return the correction weights [N] of a microbatch's tokens; None if the config has no corrections."""
        if not self.objective.corrected:
            return None
        weights = corrections.token_weights(
            self.objective.corrections,
            self.objective.off_policy_delta,
            logprobs=logprobs,
            old_logprobs=work.old_logprobs,
            rollout_logprobs=work.microbatch.rollout_logprobs,
            advantages=work.microbatch.advantages,
            sequence_ids=work.microbatch.sequence_ids,
            trusted=work.trusted,
        )
        self.sums.corrections += weights.sums
        return weights.values
