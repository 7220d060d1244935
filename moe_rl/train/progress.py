"""Remembers the evaluations of a run, and decides from them which policy is the best and whether the run continues.

Every rank remembers the same numbers, so that all ranks decide alike. They are part of a checkpoint: a resumed run
decides as it would have without the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.config.schema import EvalConfig


class Progress:
    """Holds the pass rates of each evaluation. Steps count from 0, the policy that the run began with."""

    def __init__(self, settings: EvalConfig, pass_rates: Sequence[str]):
        """pass_rates: the metrics to remember, `TaskConfig.pass_rates`."""
        self.settings, self.pass_rates = settings, pass_rates
        self.evaluations: dict[int, dict[str, float]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Remember an evaluation after `step` steps. Values that are None or not finite are left out."""
        known = {key: value for key in self.pass_rates if (value := metrics.get(key)) is not None}
        self.evaluations[step] = {key: value for key, value in known.items() if math.isfinite(value)}

    def state(self) -> list[Any]:
        """Return what a checkpoint keeps, as JSON values: the step and the pass rates of each evaluation."""
        return [[step, rates] for step, rates in self.evaluations.items()]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from what `state` returned."""
        self.evaluations = {step: dict(rates) for step, rates in state}

    @property
    def best(self) -> tuple[int, float] | None:
        """The step of the best evaluation and its value of eval.best; ties go to the earliest. None if there is no
        evaluation."""
        found = self._values()
        return max(found, key=lambda one: (one[1], -one[0])) if found else None

    @property
    def best_step(self) -> int | None:
        """The step of `best`."""
        return None if (best := self.best) is None else best[0]

    def why_end(self) -> str:
        """Return why the run has trained enough: too many evaluations in a row without a gain; else ""."""
        settings = self.settings
        if settings.patience is None or (best := self.best) is None:
            return ""
        (_, reached), *later = self._values()
        waited = 0
        for _, value in later:
            gained = value > reached and value - reached >= settings.min_gain
            reached, waited = (value, 0) if gained else (reached, waited + 1)
        if waited < settings.patience:
            return ""
        by = f"by {settings.min_gain:g} " if settings.min_gain else ""
        return (
            f"{settings.best} did not rise {by}in {waited} evaluations (eval.patience); "
            f"the best was {best[1]:.4g} after step {best[0]}"
        )

    def _values(self) -> list[tuple[int, float]]:
        """Return step and eval.best of each evaluation that has a value, in order."""
        key = self.settings.best
        return [
            (step, self.evaluations[step][key]) for step in sorted(self.evaluations) if key in self.evaluations[step]
        ]
