"""When to stop: updates that are not finite again and again, a sampler that holds other weights, a run that is lost.

Every rank counts the same numbers, so that all stop together. The counts are part of a checkpoint: a run that is
resumed stops where it would have without the interruption. That the sampler holds the trainer's weights is told by the
canary, which both score.
"""

from __future__ import annotations

import math

import numpy as np

from moe_rl.config.schema import GuardsConfig
from moe_rl.errors import CollapseError, NonFiniteError, WeightSyncError, describe
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import pack
from moe_rl.megatron.policy import Policy, UpdateResult
from moe_rl.planning.packing import fill_rounds
from moe_rl.rollout.sampler import Sampler
from moe_rl.types import Sequence


class Guards:
    """Counts in a row: skipped updates, and steps that say that the run is lost."""

    def __init__(self, settings: GuardsConfig):
        self.settings = settings
        self.skipped = self.lost = 0

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"skipped": self.skipped, "lost": self.lost}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from what `state` returned."""
        self.skipped, self.lost = state["skipped"], state["lost"]

    def after_update(self, result: UpdateResult, *, step: int, update: int) -> None:
        """Raises NonFiniteError when this update was the last of too many in a row that were skipped.

        step: from 1. update: number of the update in the step, from 0.
        """
        self.skipped = 0 if result.applied else self.skipped + 1
        if self.skipped >= self.settings.max_skipped_updates:
            raise NonFiniteError(
                describe(
                    f"{self.skipped} updates in a row were skipped",
                    where=f"the last is update {update} of step {step}",
                    got=f"what is not finite: {result.nonfinite}",
                    expected=f"fewer than guards.max_skipped_updates = {self.settings.max_skipped_updates}",
                    do="lower train.optimizer.lr or set train.dtype=float32, and start from an earlier checkpoint. "
                    "Weights, optimizer and random generators are as they were before these updates",
                )
            )

    def after_sync(self, version: int, difference: float) -> None:
        """Raises WeightSyncError when the canary says that the sampler holds other weights than the trainer.

        difference: what `Canary.difference` gave after the sync of `version`.
        """
        limit = self.settings.max_canary_difference
        if not (math.isfinite(difference) and difference <= limit):
            raise WeightSyncError(
                describe(
                    "sampler and trainer score the same tokens differently",
                    where=f"after the sync of version {version}",
                    got=f"sync/canary_abs_diff {difference:.3g} nats",
                    expected=f"at most guards.max_canary_difference = {limit:g}",
                    do="every tensor arrived as it was sent, so look for one that is exported under another's name "
                    "or in another layout; for a sampler of low precision raise the limit",
                )
            )

    def after_step(self, step: int, metrics: dict[str, float]) -> CollapseError | None:
        """What to end the run with after this step, or None. metrics: of the step, see report/metrics.py."""
        reasons = self._reasons(metrics)
        self.lost = self.lost + 1 if reasons else 0
        limit = self.settings.collapse_steps
        if not limit or self.lost < limit:
            return None
        return CollapseError(
            describe(
                "the run has collapsed",
                where=f"since step {step - self.lost + 1}, now step {step}",
                got="; ".join(reasons),
                expected=f"fewer than guards.collapse_steps = {limit} such steps in a row",
                do="go back to a checkpoint from before, and lower train.optimizer.lr or train.updates_per_step, or "
                "raise objective.kl_coef; if sampler and trainer drift apart, look at replay.mode and the precisions. "
                "A checkpoint and the report of this state are in the run folder",
            )
        )

    def _reasons(self, metrics: dict[str, float]) -> list[str]:
        """Each condition that holds, with its values."""
        limits = {"policy_kl/k3": self.settings.max_policy_kl,
                  "policy/extreme_fraction": self.settings.max_extreme_fraction}  # fmt: skip
        # A value that is not finite is no value within the limit.
        found = [
            f"{key} = {metrics[key]:.3g}, above {limit:g}"
            for key, limit in limits.items()
            if not (math.isfinite(metrics[key]) and metrics[key] <= limit)
        ]
        passed, reward = metrics["reward/pass_rate"], metrics["reward/mean"]
        if metrics["rollout/truncated_fraction"] == 1 and passed == 0 and reward <= 0:
            found.append(f"every completion truncated, none passed, mean reward {reward:.3g}")
        return found


class Canary:
    """A fixed run of tokens whose log-probabilities both engines compute from the weights they hold."""

    def __init__(self, tokens: tuple[int, ...]):
        self.tokens = tokens
        canary = Sequence(
            key="canary",
            prompt_token_ids=tokens[:1],
            token_ids=tokens[1:],
            rollout_logprobs=np.zeros(len(tokens) - 1, np.float32),
            reward=0.0,
            weight_version=0,
            routes=None,
        )
        (plan,) = fill_rounds([[[0]]], world.microbatches_in_a_round())
        self.microbatches = [pack([canary], one, world.device(), world.context_parallel()) for one in plan]

    def difference(self, policy: Policy, sampler: Sampler | None) -> float:
        """Mean |log-probability difference| in nats, both routing natively, on rank 0; 0 on the others. With
        several samplers that of the worst."""
        ours, *_ = policy.logprobs(self.microbatches, None, temperature=1.0)
        if sampler is None:
            return 0.0
        return float(np.abs(ours.cpu().numpy() - sampler.score(self.tokens)).mean(-1).max())
