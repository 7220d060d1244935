"""Starts the pool for rank 0 and talks to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from moe_rl.vllm.wire import Alive, Close, Score, Update, Wake
from moe_rl.weights.update import WeightUpdate


class PooledRollouts:
    """Gives rank 0 the batches that the pool samples, and makes the sampler's calls through the pool.

    Attributes:
        left_behind: as in OwnRollouts.
        unusable: messages about an earlier process's groups that are sampled again.
    """

    def __init__(self, config: Config, task: TaskPrompts, folder: Path, config_file: Path, store: TraceStore):
        """Start the pool with its sampler and verifiers. Raises EngineError if they cannot start."""
        self.pipeline, self.steps = config.pipeline, config.run.steps
        self.source = PromptSource(task.train, config.run.seed)
        self.ledger = PromptLedger.of_run(folder, config.pipeline)
        self.kept = KeptRollouts(folder / "rollouts", store)
        self.left_behind: RolloutBatch | None = None
        self.unusable: list[str] = []
        self._child = ChildProcess(
            "pool",
            "moe_rl.rollout.pool" if config.task.environment is None else "moe_rl.gateway.episode_pool",
            log_path=folder / "pool.log",
            environment=child_environment(config.rollout.capture),
            replies=wire.REPLIES,
            alive=Alive,
            silence_seconds=config.run.peer_timeout_seconds,
        )
        # The last step whose batch was requested, whose completions are sampled, and whose batch is on disk.
        self._asked = self._sampled = self._taken = 0
        self._parts: list[tuple[str, float, float]] = []  # the pool's work for batches, not yet shown
        self._begun = False  # whether the pool samples groups
        try:
            seconds = 2 * config.rollout.startup_timeout_seconds  # the sampler alone may use that long
            self._child.send(wire.OpenPool(folder, config_file))
            opened = self._checked(self._child.started(wire.PoolOpened, seconds), wire.PoolOpened)
        except BaseException:
            self.close()
            raise
        self.vllm_version, self.workers, self.address = opened.vllm_version, opened.workers, opened.address

    @property
    def engine(self) -> PooledRollouts:
        """Return what makes the sampler's calls."""
        return self

    def take(self, step: int, clock: Clock) -> RolloutBatch:
        """Make the pool sample the batch of a step, and the next one during training. Return the first once it is
        ready."""
        batch, self.left_behind = self.left_behind, None
        if self.pipeline.by_group and not self._begun:
            begin = wire.BeginGroups(step + (batch is not None), version=step - 1)
            self.unusable += self._call(begin, wire.GroupsBegun).unusable
            self._begun = True
        if batch is None:
            self._begin(step)
        if self.pipeline.ahead and step < self.steps:
            self._begin(step + 1)
        if batch is None:
            with self._waiting(clock):
                while self._taken < step:
                    self._hear(wire.BatchTaken)
            batch = self.kept.load(step)
        return batch

    def settle(self, clock: Clock) -> None:
        """Wait until the pool has nothing more to sample with the current weights."""
        with self._waiting(clock):
            while self._sampled < self._asked:
                self._hear(wire.BatchSampled)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation, see Rollouts.evaluate."""
        return self._call(wire.EvaluatePolicy(step), wire.PolicyEvaluated).metrics

    def retain(self, steps: set[int]) -> None:
        """Delete the kept rollouts of all steps but these, with their trace shards."""
        self._call(wire.RetainSteps(steps), wire.StepsRetained)

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        return self._call(Score(list(map(list, runs)), shard), wire.RunsScored).scores

    def update_weights(self, update: WeightUpdate) -> None:
        self.workers = self._call(Update(update), wire.SamplerUpdated).workers

    def sleep(self, level: int) -> bool:
        """Do nothing and return False: the sampler works while the trainer does."""
        return False

    def wake(self, part: str) -> None:
        """Let lost servers return (see Sampler.wake): there is no sleep to wake from."""
        self.workers = self._call(Wake(part), wire.SamplerUpdated).workers

    def close(self) -> None:
        self._child.close(Close())

    def _begin(self, step: int) -> None:
        """Make the pool sample the batch of a step, unless it has already begun."""
        if step > self._asked:
            self._child.send(wire.TakeBatch(step))
            self._asked = step

    @contextmanager
    def _waiting(self, clock: Clock) -> Iterator[None]:
        """Measure a wait, and show the pool's work since the last one."""
        with clock("wait"):
            yield
        parts, self._parts = self._parts, []
        for part in parts:
            clock.ended(*part)

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

    def _checked[R: Message](self, reply: Message, expected: type[R]) -> R:
        if isinstance(reply, wire.PoolFailed):
            if not reply.kind:
                raise self._child.broken("failed", reply.message)
            kind: type[MoeRLError] = getattr(errors, reply.kind, EngineError)
            raise kind(f"{reply.message} [pool, pid {self._child.pid}, log {self._child.log_path}]")
        return self._child.expect(reply, expected)
