"""The loss of one optimizer update: the objective's policy loss, its corrections, its KL penalty, its entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.objectives import corrections
from moe_rl.objectives.losses import POLICY_LOSSES, USE_ROLLOUT_LOGPROBS, reference_kl
from moe_rl.objectives.penalties import entropy_bonus
from moe_rl.train.shares import MicrobatchWork, UpdateShare


@dataclass(slots=True)
class LossSums:
    """Sums over a step's updates on this rank: scalar tensors, once there is something to add."""

    loss: torch.Tensor | int = 0
    kl: torch.Tensor | int = 0
    clip_events: torch.Tensor | int = 0
    clip_units: torch.Tensor | int = 0
    ratio: torch.Tensor | int = 0
    corrections: torch.Tensor | int = 0


class UpdateLoss:
    """The loss of this rank's share of an update, one microbatch at a call; a `megatron.schedule.LossFunction`.

    sums: what the calls add to. seen: what each microbatch's call was given, detached: its logprobs and, where they are
    asked for, its entropies.
    """

    def __init__(self, objective: ObjectiveConfig, share: UpdateShare, sums: LossSums):
        self.objective, self.share, self.sums = objective, share, sums
        self.seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def __call__(self, number: int, logprobs: torch.Tensor, *entropies: torch.Tensor) -> torch.Tensor:
        objective, share, sums, work = self.objective, self.share, self.sums, self.share.work[number]
        microbatch = work.microbatch
        self.seen[number] = tuple(values.detach() for values in (logprobs, *entropies))
        own = {"rollout_logprobs": microbatch.rollout_logprobs} if objective.name in USE_ROLLOUT_LOGPROBS else {}
        # Called here and not through `policy_loss`, so that fewer frames lie above it.
        result = POLICY_LOSSES[objective.name](
            logprobs,
            work.old_logprobs,
            microbatch.advantages,
            microbatch.sequence_ids,
            denominator=share.denominator,
            weights=self._weights(work, logprobs),
            **objective.parameters,
            **own,
        )
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
        # Nothing is read here: the host would wait for the device after every microbatch.
        sums.loss += total.detach().double()
        sums.clip_events += result.clip_events
        sums.clip_units += result.clip_units
        sums.ratio += result.ratio_sum
        return total

    def _weights(self, work: MicrobatchWork, logprobs: torch.Tensor) -> torch.Tensor | None:
        """[N] of a microbatch's tokens by the config's corrections; None without any."""
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
        )
        self.sums.corrections += weights.sums
        return weights.values
