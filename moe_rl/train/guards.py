"""When to stop: updates that are not finite again and again, a sampler that holds other weights, a run that is lost.

Every rank counts the same numbers, so that all stop together. The counts are part of a checkpoint: a run that is
resumed stops where it would have without the interruption. That the sampler holds the trainer's weights is told by the
canary, which both score.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moe_rl.config.schema import Config, GuardsConfig
from moe_rl.errors import CheckpointError, CollapseError, NonFiniteError, WeightSyncError, describe
from moe_rl.megatron.policy import UpdateResult
from moe_rl.train.canary import Heard

# What the canary may differ by, in nats a token: rounding in float32 is 1e-6 to 1e-5; in bfloat16 tiny models come to
# 0.3, and layers or experts that changed places to 1 to 6.
_EXACT, _ROUNDED = 1e-4, 1.0
# The run's own history: so many syncs are needed, so many are looked at; what is far above their median; and what
# differences below which are all alike.
_SYNCS, _KEPT, _FACTOR, _DEVIATIONS, _FLOOR = 5, 32, 8.0, 5.0, 1e-6


class Guards:
    """Counts in a row: skipped updates, and steps that say that the run is lost; and the last syncs' canaries."""

    def __init__(self, settings: GuardsConfig, *, exact: bool = False):
        """exact: sampler and trainer both compute in float32, on the same weights."""
        self.settings, self.exact = settings, exact
        self.skipped = self.lost = 0
        self.canary: list[tuple[int, float]] = []
        self.canary_limit = settings.max_canary_difference or (_EXACT if exact else _ROUNDED)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it. canary: weight version and difference of the last syncs."""
        return {"skipped": self.skipped, "lost": self.lost, "canary": [list(one) for one in self.canary]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned. Raises CheckpointError for what another version returned."""
        if state.keys() != self.state().keys():
            raise CheckpointError(
                describe(
                    "a checkpoint was written by another version of moe_rl",
                    where={"field": "guards"},
                    got=", ".join(sorted(state)),
                    expected=", ".join(sorted(self.state())),
                    do="go on with the version that wrote it, or begin a new run",
                )
            )
        self.skipped, self.lost = state["skipped"], state["lost"]
        self.canary = [(int(version), float(value)) for version, value in state["canary"]]

    def after_update(self, result: UpdateResult, *, step: int, update: int) -> None:
        """Raises NonFiniteError when this update was the last of too many in a row that were skipped.

        step: from 1. update: number of the update in the step, from 0.
        """
        self.skipped = 0 if result.applied else self.skipped + 1
        if self.skipped >= self.settings.max_skipped_updates:
            raise NonFiniteError(
                describe(
                    f"{self.skipped} updates in a row were skipped",
                    where={"step": step, "update": update},
                    got=f"what is not finite: {result.nonfinite}",
                    expected=f"fewer than guards.max_skipped_updates = {self.settings.max_skipped_updates}",
                    do="lower train.optimizer.lr or set train.dtype=float32, and start from an earlier checkpoint. "
                    "Weights, optimizer and random generators are as they were before these updates",
                )
            )

    def after_sync(self, version: int, heard: Heard) -> None:
        """Raises WeightSyncError when the canary says that the sampler holds other weights than the trainer: above the
        limit for these precisions, or far above what this run has shown; where the config sets a limit, above that one.
        heard: after the sync of `version`.

        Far is, after 5 syncs, 8 times the median of the last 32, and more where these scatter: 5 standard deviations
        of their logarithm, as estimated by its median absolute deviation. If the logarithm is normal with a standard
        deviation of at most 0.4, 8 times the median is 5.2 of them, once in ten million syncs. Above that 5 of them are
        allowed, once in three million: a run whose syncs scatter by 0.5 gets 12 times its median.
        """
        # A run that goes on scores the last version of the run before once more.
        before = [value for known, value in self.canary if known != version]
        difference, limit, expected = heard.settled, self.canary_limit, "guards.max_canary_difference"
        if self.settings.max_canary_difference is None:
            expected += f", by default {limit:g} for {'float32 on both sides' if self.exact else 'these precisions'}"
        else:
            expected += f" = {limit:g}"
        expected = f"at most {expected}"
        own = self.settings.max_canary_difference is None and len(before) >= _SYNCS
        if own and (usual := _farthest(before)) < limit:
            limit = usual
            median = float(np.median(before))
            expected = f"at most {limit:.3g}, the last {len(before)} syncs had {median:.3g}"
        if not (math.isfinite(difference) and difference <= limit):
            raise WeightSyncError(
                describe(
                    "sampler and trainer score the same tokens differently",
                    where={"version": version, "run": heard.by},
                    got=f"a canary of {difference:.3g} nats{f'; {heard.suspects}' if heard.suspects else ''}",
                    expected=expected,
                    do="every tensor arrived as it was sent, so look for one that is exported under another's name, "
                    "in another layout, or as it was before the update; for a sampler of low precision set "
                    "guards.max_canary_difference",
                )
            )
        self.canary = [*((known, value) for known, value in self.canary if known != version), (version, difference)]
        self.canary = self.canary[-_KEPT:]

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
                where={"step": step},
                got=f"since step {step - self.lost + 1}: {'; '.join(reasons)}",
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


def computes_alike(config: Config) -> bool:
    """Whether sampler and trainer both compute in float32, on the same weights."""
    return config.train.dtype == config.rollout.dtype == "float32" and config.rollout.weights == "exact"


def _farthest(before: list[float]) -> float:
    """The largest difference that syncs with these before them may have."""
    logs = np.log(np.maximum(before, _FLOOR))
    median = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - median)))
    return math.exp(median + max(math.log(_FACTOR), _DEVIATIONS * deviation))
