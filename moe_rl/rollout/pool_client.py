"""Connects rank 0 to the pool: takes batches sampled during training, and sends the sampler new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moe_rl import errors
from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, MoeRLError
from moe_rl.messages import Message
from moe_rl.rollout import pool_wire as wire
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.trace import TraceStore
from moe_rl.types import ScoredTokens
from moe_rl.vllm.process import child_environment
from moe_rl.vllm.wire import Alive, AskCounts, Close, Counted, Score, Update, Wake
from moe_rl.weights.update import WeightUpdate


class PooledSampler:
    """Serves as the sampler of rank 0: it receives weights and scores tokens through the pool, see Sampler."""

    def __init__(self, config: Config, run_dir: Path, config_file: Path):
        """Start the pool with its sampler and verifiers. Raises EngineError if they cannot start."""
        self._child = ChildProcess(
            "pool",
            "moe_rl.rollout.pool" if config.task.environment is None else "moe_rl.gateway.episode_pool",
            log_path=run_dir / "pool.log",
            environment=child_environment(config.rollout.capture),
            replies=wire.REPLIES,
            alive=Alive,
            silence_seconds=config.run.peer_timeout_seconds,
        )
        # The last step whose batch was requested, whose completions are sampled, and whose batch is on disk.
        self._asked = self._sampled = self._taken = 0
        self._parts: list[tuple[str, float, float]] = []  # the pool's work for batches, not yet returned
        self._begun = False  # whether the pool samples groups
        try:
            seconds = 2 * config.rollout.startup_timeout_seconds  # the sampler alone may use that long
            reply = self._child.start(wire.OpenPool(run_dir, config_file), wire.PoolOpened, seconds)
            opened = self._checked(reply, wire.PoolOpened)
        except BaseException:
            self.close()
            raise
        self.vllm_version, self.workers, self.address = opened.vllm_version, opened.workers, opened.address

    def begin(self, step: int) -> None:
        """Make the pool sample the batch of a step, unless it has already begun."""
        if step > self._asked:
            self._child.send(wire.TakeBatch(step))
            self._asked = step

    def settle(self) -> list[tuple[str, float, float]]:
        """Wait until the completions of all requested batches are sampled.

        Returns:
            The pool's work since the last call: names of parts, each with its begin and end on time.perf_counter.
        """
        while self._sampled < self._asked:
            self._hear(wire.BatchSampled)
        return self._told()

    def taken(self, step: int) -> list[tuple[str, float, float]]:
        """Wait until the batch of a step is on disk. Returns as `settle` does."""
        while self._taken < step:
            self._hear(wire.BatchTaken)
        return self._told()

    def begin_groups(self, step: int, version: int) -> list[str]:
        """Make the pool sample groups without a break, unless it already does.

        Args:
            step: the next step that needs a batch.
            version: the weights that the sampler has.

        Returns:
            Messages about an earlier process's groups that cannot be used.
        """
        if self._begun:
            return []
        self._begun = True
        return self._call(wire.BeginGroups(step, version), wire.GroupsBegun).unusable

    def retain(self, steps: set[int]) -> None:
        """Delete the kept rollouts of all steps but these."""
        self._call(wire.RetainSteps(steps), wire.StepsRetained)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation, see Rollouts.evaluate."""
        return self._call(wire.EvaluatePolicy(step), wire.PolicyEvaluated).metrics

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        return self._call(Score(list(map(list, runs)), shard), wire.RunsScored).scores

    def counts(self) -> dict[str, int]:
        return self._call(AskCounts(), Counted).counts

    def update_weights(self, update: WeightUpdate) -> None:
        self.workers = self._call(Update(update), wire.SamplerUpdated).workers

    def sleep(self, level: int) -> bool:
        """Do nothing and return False: the sampler works while the trainer does."""
        return False

    def wake(self, part: str) -> None:
        """Let lost servers return, see Sampler.wake. The sampler does not sleep."""
        self.workers = self._call(Wake(part), wire.SamplerUpdated).workers

    def close(self) -> None:
        self._child.close(Close())

    def _call[R: Message](self, call: Message, expected: type[R]) -> R:
        self._child.send(call)
        while not isinstance(reply := self._hear(expected), expected):
            pass
        return reply

    def _hear(self, expected: type[Message]) -> Message:
        """Receive the next message: the expected one, or news of a batch, which is recorded."""
        reply = self._child.receive()
        if isinstance(reply, wire.BatchSampled | wire.BatchTaken):
            self._sampled = max(self._sampled, reply.step)
            if isinstance(reply, wire.BatchTaken):
                self._taken = reply.step
            self._parts += reply.parts
        else:
            self._checked(reply, expected)
        return reply

    def _told(self) -> list[tuple[str, float, float]]:
        parts, self._parts = self._parts, []
        return parts

    def _checked[R: Message](self, reply: Message, expected: type[R]) -> R:
        if isinstance(reply, wire.PoolFailed):
            if not reply.kind:
                raise self._child.broken("failed", reply.message)
            kind: type[MoeRLError] = getattr(errors, reply.kind, EngineError)
            raise kind(f"{reply.message} [pool, pid {self._child.pid}, log {self._child.log_path}]")
        return self._child.expect(reply, expected)


class PooledRollouts:
    """Gives rank 0 the batches that the pool samples, in place of `Rollouts`.

    Attributes:
        left_behind: as in Rollouts.
        unusable: as in Rollouts.
    """

    def __init__(self, config: Config, task: TaskPrompts, engine: PooledSampler, run_dir: Path, store: TraceStore):
        self.engine, self.pipeline, self.steps = engine, config.pipeline, config.run.steps
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(run_dir, config.pipeline)
        self.kept = KeptRollouts(run_dir / "rollouts", store)
        self.left_behind: RolloutBatch | None = None
        self.unusable: list[str] = []

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Make the pool sample the batch of a step, and the next one during training. Return the first once it is
        ready."""
        batch, self.left_behind = self.left_behind, None
        if self.pipeline.by_group:
            self.unusable += self.engine.begin_groups(step + (batch is not None), version=step - 1)
        if batch is None:
            self.engine.begin(step)
        if self.pipeline.ahead and step < self.steps:
            self.engine.begin(step + 1)
        if batch is None:
            self._wait(lambda: self.engine.taken(step), clock)
            batch = self.kept.load(step)
        return batch

    def settle(self, clock: Clock) -> None:
        """Wait until the pool has nothing more to sample with the current weights."""
        self._wait(self.engine.settle, clock)

    def _wait(self, awaited: Callable[[], list[tuple[str, float, float]]], clock: Clock) -> None:
        with clock("wait"):
            parts = awaited()
        for part in parts:
            clock.ended(*part)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation, see Rollouts.evaluate."""
        return self.engine.evaluate(step)

    def retain(self, steps: set[int]) -> None:
        """Delete the kept rollouts of all steps but these, with their trace shards."""
        self.engine.retain(steps)
