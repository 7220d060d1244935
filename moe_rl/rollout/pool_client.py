"""Starts the pool for rank 0 and talks to it.

Also defines the messages between rank 0 and the pool's process, in frames of `messages.Channel`.

The pool answers calls one by one in order of arrival; only StepsRetained may come earlier, and BatchTaken later,
between the answers to other calls. While it works it sends signs of life. Rank 0 sends the pool the same messages that
it would send an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.msgpack import Decoder

from moe_rl import errors
from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, MoeRLError
from moe_rl.messages import Message, decoder
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.trace import TraceStore
from moe_rl.types import ScoredTokens
from moe_rl.vllm.process import child_environment
from moe_rl.vllm.wire import Alive, Close, Score, Update, Wake
from moe_rl.weights.update import WeightUpdate


class OpenPool(Message, frozen=True):
    """Opens the pool for the run in a folder; the first frame."""

    run_dir: Path
    config: Path


class BeginGroups(Message, frozen=True):
    """Starts sampling groups: the sampler has weight version `version`; `step` is the next that needs a batch."""

    step: int
    version: int


class TakeBatch(Message, frozen=True):
    """Requests the batch of a step, which is then in the folder of kept rollouts."""

    step: int


class RetainSteps(Message, frozen=True):
    """Deletes the rollouts of all steps but these."""

    steps: set[int]


class EvaluatePolicy(Message, frozen=True):
    step: int


class PoolOpened(Message, frozen=True):
    """Answers OpenPool, with the fields of Sampler."""

    vllm_version: str
    workers: list[str]
    address: str


class GroupsBegun(Message, frozen=True):
    """Answers BeginGroups with messages about kept groups that cannot be used."""

    unusable: list[str]


class StepsRetained(Message, frozen=True):
    pass


class BatchSampled(Message, frozen=True):
    """Reports that a batch's completions are sampled. Its BatchTaken follows once they are judged.
    Not sent when groups are sampled one by one.

    parts: the work done for it, each part with its begin and end on time.perf_counter.
    """

    step: int
    parts: list[tuple[str, float, float]]


class BatchTaken(BatchSampled, frozen=True):
    """Reports that the batch of a step is on disk. parts: the work done since BatchSampled."""


class PolicyEvaluated(Message, frozen=True):
    metrics: dict[str, float]


class RunsScored(Message, frozen=True):
    """Answers Score, one element for each worker."""

    scores: list[ScoredTokens]


class SamplerUpdated(Message, frozen=True):
    """Answers Update and Wake with the workers that are left."""

    workers: list[str]


class PoolFailed(Message, frozen=True):
    """Reports that a call failed. `kind` names the class of `moe_rl.errors`."""

    kind: str
    message: str


Call = BeginGroups | TakeBatch | RetainSteps | EvaluatePolicy | Score | Update | Wake
Reply = GroupsBegun | BatchTaken | StepsRetained | PolicyEvaluated | RunsScored | SamplerUpdated
CALLS: Decoder[OpenPool | Call | Close] = decoder(OpenPool | Call | Close)
REPLIES: Decoder[PoolOpened | Alive | BatchSampled | Reply | PoolFailed] = decoder(
    PoolOpened | Alive | BatchSampled | Reply | PoolFailed
)


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
            "moe_rl.rollout.pool" if config.task.environment is None else "moe_rl.gateway.episode_gateway",
            log_path=folder / "pool.log",
            environment=child_environment(config.rollout.capture),
            replies=REPLIES,
            alive=Alive,
            silence_seconds=config.run.peer_timeout_seconds,
        )
        # The last step whose batch was requested, whose completions are sampled, and whose batch is on disk.
        self._asked = self._sampled = self._taken = 0
        self._parts: list[tuple[str, float, float]] = []  # the pool's work for batches, not yet shown
        self._begun = False  # whether the pool samples groups
        try:
            seconds = 2 * config.rollout.startup_timeout_seconds  # the sampler alone may use that long
            self._child.send(OpenPool(folder, config_file))
            opened = self._checked(self._child.started(PoolOpened, seconds), PoolOpened)
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
            begin = BeginGroups(step + (batch is not None), version=step - 1)
            self.unusable += self._call(begin, GroupsBegun).unusable
            self._begun = True
        if batch is None:
            self._begin(step)
        if self.pipeline.ahead and step < self.steps:
            self._begin(step + 1)
        if batch is None:
            with self._waiting(clock):
                while self._taken < step:
                    self._hear(BatchTaken)
            batch = self.kept.load(step)
        return batch

    def settle(self, clock: Clock) -> None:
        """Wait until the pool has nothing more to sample with the current weights."""
        with self._waiting(clock):
            while self._sampled < self._asked:
                self._hear(BatchSampled)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation, see Rollouts.evaluate."""
        return self._call(EvaluatePolicy(step), PolicyEvaluated).metrics

    def retain(self, steps: set[int]) -> None:
        """Delete the kept rollouts of all steps but these, with their trace shards."""
        self._call(RetainSteps(steps), StepsRetained)

    def score(self, runs: Sequence[Sequence[int]], *, shard: str | None = None) -> list[ScoredTokens]:
        return self._call(Score(list(map(list, runs)), shard), RunsScored).scores

    def update_weights(self, update: WeightUpdate) -> None:
        self.workers = self._call(Update(update), SamplerUpdated).workers

    def sleep(self, level: int) -> bool:
        """Do nothing and return False: the sampler works while the trainer does."""
        return False

    def wake(self, part: str) -> None:
        """Let lost servers return (see Sampler.wake): there is no sleep to wake from."""
        self.workers = self._call(Wake(part), SamplerUpdated).workers

    def close(self) -> None:
        self._child.close(Close(), hears=True)  # a stopped run waits here, and the pool keeps what is half sampled

    def _begin(self, step: int) -> None:
        """Make the pool sample the batch of a step, unless it has already begun."""
        if step > self._asked:
            self._child.send(TakeBatch(step))
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
        if isinstance(reply, BatchSampled):  # or BatchTaken
            self._sampled = max(self._sampled, reply.step)
            if isinstance(reply, BatchTaken):
                self._taken = reply.step
            self._parts += reply.parts
        else:
            self._checked(reply, expected)
        return reply

    def _checked[R: Message](self, reply: Message, expected: type[R]) -> R:
        if isinstance(reply, PoolFailed):
            if not reply.kind:
                raise self._child.broken("failed", reply.message)
            kind: type[MoeRLError] = getattr(errors, reply.kind, EngineError)
            raise kind(f"{reply.message} [pool, pid {self._child.pid}, log {self._child.log_path}]")
        return self._child.expect(reply, expected)
