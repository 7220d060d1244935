"""Gives a run another run's kept batches, so that it trains on them again without a sampler."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.trace import TraceStore


class ReplayedRollouts:
    """Replaces `Rollouts` with the batches that another run has kept. Has no sampler, and never changes that run.

    Attributes:
        unusable: as in Rollouts; always empty.
    """

    engine = None

    def __init__(self, config: Config, task: TaskPrompts, run_dir: Path, replayed: Path, store: TraceStore):
        """replayed: the folder of the other run. store: its routes."""
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(run_dir, config.pipeline)
        self.replayed = PromptLedger.of_run(replayed, config.pipeline)
        self.kept = KeptRollouts(replayed / "rollouts", store)
        self.unusable: list[str] = []

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Return the other run's batch of this step, and enter its prompts into this run's ledger."""
        entry, batch = self.kept.entered(step, self.replayed, self.source)
        self.ledger.append(entry)
        return batch

    def settle(self, clock: Clock) -> None:
        """Do nothing: nothing is sampled."""

    def retain(self, steps: Container[int]) -> None:
        """Do nothing: the rollouts are the other run's."""
