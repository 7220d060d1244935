"""Defines what only rank 0 holds: the log and all that is written beside it, and the source of the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version

from moe_rl import checkpoint_folder, prometheus
from moe_rl.config.schema import Config
from moe_rl.errors import CollapseError
from moe_rl.models.facts import ModelFacts
from moe_rl.models.weight_files import notes
from moe_rl.report.log import RunLog
from moe_rl.report.run_page import write_report
from moe_rl.report.sample_lines import SampleFile, SampleLine
from moe_rl.report.summary import summarize
from moe_rl.report.timeline import Timeline
from moe_rl.report.trackers import Trackers
from moe_rl.rollout.kept import ReplayedRollouts
from moe_rl.rollout.pool_client import PooledRollouts
from moe_rl.rollout.rollouts import OwnRollouts
from moe_rl.tasks.prompts import TaskPrompts
from moe_rl.train.keeping import Progress
from moe_rl.train.run_folder import RunFolder


@dataclass(slots=True)
class RankZero:
    """Holds the objects that only rank 0 has.

    Attributes:
        kept_awake: Whether the sampler was told to sleep but could not free its memory.
        newest: The metrics of the newest step, and those of the newest evaluation.
        whole: Whether the prompt ledger must be whole at the end: the last step ends all groups that have begun. Not
            if a resumed run has become shorter, and its last step was none when it was sampled.
    """

    log: RunLog
    samples: SampleFile
    timeline: Timeline
    rollouts: OwnRollouts | PooledRollouts | ReplayedRollouts
    trackers: Trackers
    kept_awake: bool = False
    newest: Mapping[str, float] = field(default_factory=dict)
    whole: bool = True

    def finish_step(self, step: int, metrics: dict[str, float], lines: list[SampleLine]) -> None:
        """Write a step's samples and metrics."""
        self.samples.write(lines)
        self.log.step(step, metrics)
        self.newest = {**self.newest, "step": step, **metrics}
        self.timeline.step = step + 1
        self.trackers.look()

    def end_run(
        self,
        config: Config,
        folder: RunFolder,
        progress: Progress,
        *,
        done: int,
        collapse: CollapseError | None,
        early: str,
    ) -> None:
        """Verify the prompt ledger, and write summary.json and report.html.

        Args:
            done: The last step.
            early: Why the run ends before its last step, or "".
        """
        rollouts, best = self.rollouts, progress.best
        if early or collapse:  # the batch of the next step may have been sampled
            rollouts.ledger.rewind(done)
        # A run that ends early leaves groups that have begun. So may a run that is replayed.
        whole = self.whole and not (early or collapse or config.run.replays)
        rollouts.ledger.verify(rollouts.source, steps=done, whole=whole)
        facts = {
            "heldout_best_metric": config.eval.best,
            "heldout_best_step": None if best is None else best[0],
            "heldout_best": None if best is None else best[1],
            "vllm_version": None if rollouts.engine is None else rollouts.engine.vllm_version,
            "megatron_core_version": version("megatron-core"),
            "torch_version": version("torch"),
            "replay_mode": config.replay.mode,
            "objective": config.objective.name,
            "seed": config.run.seed,
            **{f"{dimension}_parallel": ranks for dimension, ranks in config.parallel},
            "trainer_dtype": config.train.dtype,
            "sampler_dtype": config.rollout.dtype,
            "collapse": collapse and str(collapse),
            "ended_early": early or None,
        }
        summarize(folder.path, facts)
        path = write_report(folder.path)
        if config.report.trackers:
            self.trackers.finish()
            write_report(folder.path)  # again, now with the trackers' results
        checkpoint_folder.name_best(folder.checkpoints, progress.best_step)
        if early:
            self.log.note(f"ended after step {done}: {early}")
        self.log.note(f"report: {path}")


def open_rank_zero(
    config: Config,
    folder: RunFolder,
    facts: ModelFacts,
    task: TaskPrompts,
    start: Callable[[TaskPrompts, ExitStack], OwnRollouts | PooledRollouts | ReplayedRollouts],
    stack: ExitStack,
) -> RankZero:
    """Open the log, then start the source of the batches by `start(task, stack)`. `stack` closes all."""
    log = RunLog(folder.path, total_steps=config.run.steps, mode=config.replay.mode)
    stack.callback(log.close)
    for note in (f"run folder: {folder.path}", *notes(config.model.path, facts)):
        log.note(note)
    log.note(
        "starting the sampler and the verifiers ..."
        if config.run.replays is None
        else f"trains on what {config.run.replays} has kept: no sampler, no weight sync, no canary, no evaluation"
    )
    for note in task.notes():
        log.note(note)
    rollouts, seconds = start(task, stack), config.report.tracker_seconds
    trackers = Trackers(folder.path, config.report.trackers, seconds=seconds, note=log.note)
    stack.callback(trackers.close)
    main = RankZero(log, SampleFile(folder.path), Timeline(folder.path), rollouts, trackers)
    stack.enter_context(prometheus.serving(config.report.prometheus_port, folder.path.name, lambda: main.newest))
    return main
