"""Keeps what a run leaves on disk after a step: checkpoints and exported weights.

Also remembers the evaluations of a run, and decides from them which policy is the best and whether the run continues.

Every rank remembers the same numbers, so that all ranks decide alike. They are part of a checkpoint: a resumed run
decides as it would have without the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from moe_rl import checkpoint_folder
from moe_rl.clock import Clock
from moe_rl.config.schema import Config, EvalConfig
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints, Exports
from moe_rl.models.facts import ModelFacts
from moe_rl.train.peers import Peers
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step import TrainStep


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
        evaluations = self._values()
        return max(evaluations, key=lambda step_value: (step_value[1], -step_value[0])) if evaluations else None

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


class Keeping:
    """Writes checkpoints and exports, in the background where the config allows it. All ranks call it together.

    Args:
        tell: Writes a note into the log, on rank 0.
        timed: Writes a part that has ended into the time line, on rank 0.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        facts: ModelFacts,
        peers: Peers,
        tell: Callable[[str], None],
        timed: Callable[[str, float, float], None],
        stack: ExitStack,
    ):
        self.config, self.folder, self.peers, self.tell, self.timed = config, folder, peers, tell, timed
        self.progress = Progress(config.eval, config.task.pass_rates)
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            config.parallel,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            published=peers.save_took,
        )
        self.exports = Exports(
            folder.exports,
            facts,
            config.model.path,
            DTYPES[config.train.dtype],
            keep=config.export.keep_last,
            resume_from=folder.checkpoints,
            published=self._exported,
        )
        for behind in (self.checkpoints, self.exports):
            stack.callback(behind.settle, config.checkpoint.grace_seconds)
        self._clock = Clock(ended=timed)

    def spent(self) -> dict[str, float]:
        """Return the seconds that were spent here since the last call, by part."""
        clock, self._clock = self._clock, Clock(ended=self.timed)
        return clock.seconds

    @contextmanager
    def part(self, name: str, step: int) -> Iterator[None]:
        """Time the body as the part "checkpoint" or "export" of a step."""
        with self.peers.phase(name, step), self._clock(name):
            yield

    def poll(self, step: int) -> None:
        """Publish what was written in the background."""
        for name, behind in (("checkpoint", self.checkpoints), ("export", self.exports)):
            if behind.pending is not None:
                with self.part(name, step):
                    behind.poll()

    def save(self, step: int, train_step: TrainStep, ledger: str | None, *, whole: bool) -> None:
        """Start writing a checkpoint. With `whole`, wait until it is complete.

        Args:
            ledger: Digest of the prompt ledger; on rank 0 only.
        """
        state: dict[str, object] = {"guards": train_step.guards.state(), "evaluations": self.progress.state()}
        if ledger is not None:
            state["ledger"] = ledger
        tensors, best = train_step.placement.tensors(), self.progress.best_step
        self.checkpoints.save(step, train_step.policy, state, tensors=tensors, best=best)
        if whole:
            self.peers.part("finish")  # takes as long as the disk, and more than a save in the background
            self.checkpoints.finish()

    def export(self, step: int, policy: Policy, *, last: bool) -> None:
        """Start to write the weights after this step as a Hugging Face checkpoint, if that is due and not yet done."""
        every = self.config.export.every_steps
        if every is not None and step and (last or step % every == 0):
            with self.part("export", step):
                self.exports.save(step, policy)

    def _exported(self, seconds: float) -> None:
        path = self.folder.exports / checkpoint_folder.name_of(self.exports.last)
        self.tell(f"exported: {path} ({seconds:.1f} s, in the background)")
