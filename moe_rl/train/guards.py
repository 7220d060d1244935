"""Stops a run: after many skipped updates, when a sampler holds other weights, and when the training is lost.

Every rank counts the same numbers, so that all ranks stop together. The counts are part of a checkpoint: a resumed run
stops where it would have stopped without the interruption. The canary shows whether the sampler holds the trainer's
weights, since both score it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moe_rl.config.schema import Config, GuardsConfig
from moe_rl.errors import CheckpointError, CollapseError, NonFiniteError, PipelineError, WeightSyncError, after_lr
from moe_rl.megatron.policy import UpdateResult
from moe_rl.objectives.lags import LAGS
from moe_rl.train.canary import Heard

# The largest canary difference in nats a token, where both sides compute in float32 and elsewhere. Rounding alone gives
# 1e-6 to 1e-5 in float32, and up to 0.3 for tiny models in bfloat16. Faults of a single expert may stay below that.
_EXACT, _ROUNDED = 1e-4, 1.0
# The test against the run's own history needs 5 syncs and looks at the last 32. A difference is too large when it is 8
# times their median, or 5 standard deviations above it if that is more. Differences below 1e-6 count as 1e-6.
_SYNCS, _KEPT, _FACTOR, _DEVIATIONS, _FLOOR = 5, 32, 8.0, 5.0, 1e-6
# A sampler did not take an update when its canary log-probabilities did not change at all, or by less than _FOLLOWS
# times the trainer's change. A sampler that took the update has a share near 1, one that did not has 0. The trainer's
# change must exceed the usual difference of the two sides by these factors, so that it is not rounding alone: a trainer
# in bfloat16 beside a sampler in float32 changed by 0.6 times that difference when no weight moved visibly, and two
# independent roundings give 1.4.
_FOLLOWS, _VISIBLE, _VISIBLE_IF_NOTHING_CHANGED = 0.1, 2.0, 0.5
# Tokens of lag 0 are judged once this many have come in, over any number of steps. Their policy KL shows a fault when
# it exceeds this multiple of the median of up to 32 earlier values, three times in a row. With fewer than 5 earlier
# values the multiple is larger. docs/measurements/routing_kl.md gives the values of healthy runs and of faults.
_TOKENS, _APART, _APART_AT_FIRST, _IN_A_ROW, _LEAST_KL = 256, 16.0, 32.0, 3, 1e-6
_NEVER_AGREED = (
    "The two have not agreed in this run. Look at what is not a tensor: the numbers that each reads from config.json, "
    "such as those of rotary position, and what each computes with them. Then look for a tensor that is exported "
    "under another's name or in another layout"
)
_AGREED = (
    "They agreed after earlier updates. Look for a tensor that is exported as it was before the update, under "
    "another's name or in another layout"
)


class Guards:
    """Counts skipped updates and lost steps in a row, and keeps the canary differences of the last syncs."""

    def __init__(self, settings: GuardsConfig, *, exact: bool = False):
        """exact: whether sampler and trainer both compute in float32, on the same weights."""
        self.settings, self.exact = settings, exact
        self.skipped = self.lost = 0
        self.lr: float | None = None  # of the last update of this process
        self.canary: list[tuple[int, float]] = []
        self.same: list[float] = []  # policy KL of tokens of lag 0, while they looked like a synchronous run's
        self.open = (0.0, 0.0)  # tokens of lag 0 that are not judged yet, and the sum of their k3
        self.apart = 0
        self.canary_limit = settings.max_canary_difference or (_EXACT if exact else _ROUNDED)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values. canary: weight version and difference of the last syncs.
        same_version: policy KL of lag 0, the tokens that are not judged yet, and how many times in a row it showed a
        fault.
        """
        return {
            "skipped": self.skipped,
            "lost": self.lost,
            "canary": [list(pair) for pair in self.canary],
            "same_version": [self.same, list(self.open), self.apart],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned. Raises CheckpointError if another version of moe_rl returned it."""
        if state.keys() != self.state().keys():
            raise CheckpointError(
                "a checkpoint was written by another version of moe_rl",
                where={"field": "guards"},
                got=", ".join(sorted(state)),
                expected=", ".join(sorted(self.state())),
                do="continue with the version that wrote it, or start a new run",
            )
        self.skipped, self.lost = state["skipped"], state["lost"]
        self.canary = [(int(version), float(value)) for version, value in state["canary"]]
        self.same, (tokens, total), self.apart = state["same_version"]
        self.open = tokens, total

    def after_update(self, result: UpdateResult, *, step: int, update: int) -> None:
        """Count skipped updates. Raises NonFiniteError after too many in a row.

        step: from 1. update: number of the update in the step, from 0.
        """
        self.skipped = 0 if result.applied else self.skipped + 1
        self.lr = result.lr
        if self.skipped >= self.settings.max_skipped_updates:
            raise NonFiniteError(
                f"{self.skipped} updates in a row were skipped",
                where={"step": step, "update": update},
                got=f"not finite: {result.nonfinite}",
                expected=f"fewer than guards.max_skipped_updates = {self.settings.max_skipped_updates}",
                do="lower train.optimizer.lr or set train.dtype=float32, and start from an earlier checkpoint. "
                "Weights, optimizer and random generators are as they were before these updates",
            )

    def after_sync(self, version: int, heard: Heard) -> None:
        """Raise WeightSyncError when the canary says that the sampler holds other weights than the trainer, or that it
        still has those from before the update.

        heard: what the canary showed after the sync of `version`. A limit in the config replaces all others. Without it
        the difference must keep within two limits: the default for these precisions, and that of the run's own history.

        The history counts after 5 syncs. Its limit is 8 times the median of the last 32 differences or, if that is
        more, 5 standard deviations of their logarithm above the median, estimated from the median absolute deviation.
        Suppose that the logarithm is normal. With a standard deviation of at most 0.4, 8 times the median is at least
        5.2 standard deviations: one false alarm in ten million syncs. With a larger deviation the limit is 5 standard
        deviations: one false alarm in three million syncs. A standard deviation of 0.5 allows 12 times the median.
        """
        # A resumed run scores the last version of the run before it again.
        before = [(known, value) for known, value in self.canary if known != version]
        self._check_change(version, heard, [value for _, value in before])
        difference = heard.settled
        limit, expected = self._canary_limit([value for _, value in before])
        if not (math.isfinite(difference) and difference <= limit):
            raise WeightSyncError(
                "sampler and trainer score the same tokens differently",
                where={"version": version, "sampler": heard.by, **after_lr(self.lr)},
                got=f"a canary of {difference:.3g} nats{f'; {heard.suspects}' if heard.suspects else ''}",
                expected=expected,
                do=f"every tensor arrived as it was sent. {_AGREED if before else _NEVER_AGREED}. For a sampler of "
                "low precision set guards.max_canary_difference",
            )
        self.canary = [*before, (version, difference)][-_KEPT:]

    def _check_change(self, version: int, heard: Heard, before: list[float]) -> None:
        """Raise WeightSyncError if the trainer's canary changed visibly with the last update, and a sampler's did not.

        before: differences of the syncs so far. After a skipped update nothing has to change.
        """
        if heard.change is None or self.skipped or not before:
            return
        trainer_change, sampler_change, by = heard.change
        visible = trainer_change / max(float(np.median(before)), _FLOOR)
        same = visible > _VISIBLE_IF_NOTHING_CHANGED and not sampler_change > 0  # also NaN
        if same or (visible > _VISIBLE and not sampler_change >= _FOLLOWS * trainer_change):
            raise WeightSyncError(
                "an update has not reached a sampler, which scores tokens as it did before",
                where={"version": version, "sampler": by, **after_lr(self.lr)},
                got=f"a canary that changed by {sampler_change:.3g} nats",
                expected=f"about {trainer_change:.3g}, as on the trainer's side",
                do="the digest of what arrived was right, so look at what happens after that: a copy of the weights "
                "that the sampler computes with and does not load into, or an export of old tensors",
            )

    def _canary_limit(self, before: list[float]) -> tuple[float, str]:
        """Return the largest difference that is allowed after those in `before`, and that limit in words."""
        limit = self.canary_limit
        if self.settings.max_canary_difference is not None:
            return limit, f"at most guards.max_canary_difference = {limit:g}"
        if len(before) >= _SYNCS and (usual := _farthest(before)) < limit:
            return usual, f"at most {usual:.3g}, the last {len(before)} syncs had {float(np.median(before)):.3g}"
        precisions = "float32 on both sides" if self.exact else "these precisions"
        return limit, f"at most guards.max_canary_difference, by default {limit:g} for {precisions}"

    def after_step(self, step: int, metrics: dict[str, float]) -> CollapseError | None:
        """Return the error that ends the run after this step, or None. metrics: those of the step.

        Raises PipelineError when tokens of the trainer's own version look as if other weights had sampled them.
        """
        if self.settings.same_version and (tokens := metrics.get(f"policy_kl/tokens_lag/{LAGS[0]}")):
            self._judge_same_version(step, tokens, metrics[f"policy_kl/k3_lag/{LAGS[0]}"])
        reasons = self._reasons(metrics)
        self.lost = self.lost + 1 if reasons else 0
        limit = self.settings.collapse_steps
        if not limit or self.lost < limit:
            return None
        return CollapseError(
            "the run has collapsed",
            where={"step": step, **after_lr(self.lr)},
            got=f"since step {step - self.lost + 1}: {'; '.join(reasons)}",
            expected=f"fewer than guards.collapse_steps = {limit} such steps in a row",
            do="go back to an earlier checkpoint, and lower train.optimizer.lr or train.updates_per_step, or "
            "raise objective.kl_coef; if sampler and trainer drift apart, look at replay.mode and the precisions. "
            "A checkpoint and the report of this state are in the run folder",
        )

    def _judge_same_version(self, step: int, tokens: float, kl: float) -> None:
        """Add the policy KL of a step's tokens of lag 0. Raises PipelineError when it shows a fault.

        Drift grows with the lag and is 0 at lag 0, where only rounding is left, as in a synchronous run.
        """
        self.open = self.open[0] + tokens, self.open[1] + tokens * kl
        if self.open[0] < _TOKENS:
            return
        value, self.open = self.open[1] / self.open[0], (0.0, 0.0)
        usual = max(float(np.median(self.same)), _LEAST_KL) if self.same else math.inf
        limit = usual * (_APART if len(self.same) >= _SYNCS else _APART_AT_FIRST)
        if math.isfinite(value) and value <= limit:
            self.apart, self.same = 0, [*self.same, value][-_KEPT:]
            return
        self.apart += 1
        if self.apart >= _IN_A_ROW:
            raise PipelineError(
                "tokens sampled by the trainer's own version look as if other weights sampled them",
                where={"step": step, "metric": f"policy_kl/k3_lag/{LAGS[0]}", **after_lr(self.lr)},
                got=f"{value:.3g} nats a token, above the limit {self.apart} times in a row",
                expected=f"at most {limit:.3g}, as in a synchronous run: the median so far is {usual:.3g}",
                do="this is a fault, not drift, which is 0 at lag 0. Look for prefix blocks that a sampler kept "
                "over an update, for an update that a sampler counted and did not load, and for tokens that are "
                "noted under another version; the other lags of policy_kl/k3_lag show how far each is off. "
                "guards.same_version: false turns this check off",
            )

    def _reasons(self, metrics: dict[str, float]) -> list[str]:
        """List each sign of a lost run that the metrics show, with its values."""
        limits = {"policy_kl/k3": self.settings.max_policy_kl,
                  "policy/extreme_fraction": self.settings.max_extreme_fraction}  # fmt: skip
        # A value that is not finite is never within the limit.
        reasons = [
            f"{key} = {metrics[key]:.3g}, above {limit:g}"
            for key, limit in limits.items()
            if not (math.isfinite(metrics[key]) and metrics[key] <= limit)
        ]
        passed, reward = metrics["reward/pass_rate"], metrics["reward/mean"]
        if metrics["rollout/truncated_fraction"] == 1 and passed == 0 and reward <= 0:
            reasons.append(f"every completion truncated, none passed, mean reward {reward:.3g}")
        return reasons


def computes_alike(config: Config) -> bool:
    """Return whether sampler and trainer both compute in float32, on the same weights."""
    return config.train.dtype == config.rollout.dtype == "float32" and config.rollout.weights == "exact"


def _farthest(before: list[float]) -> float:
    """Return the largest difference that the run's history allows. before: differences of the syncs so far."""
    logs = np.log(np.maximum(before, _FLOOR))
    median = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - median)))
    return math.exp(median + max(math.log(_FACTOR), _DEVIATIONS * deviation))
