"""Keeps what a run leaves on disk after a step: checkpoints and exported weights. Remembers its evaluations, which say
which checkpoint is the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from moe_rl import checkpoint_folder
from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.megatron.exporting import Exports
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Checkpoints
from moe_rl.models.facts import ModelFacts
from moe_rl.train.peers import Peers
from moe_rl.train.progress import Progress
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.step import TrainStep


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
