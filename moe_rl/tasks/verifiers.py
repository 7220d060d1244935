"""Verifiers behind a process boundary: whatever a reward function does, the run goes on and gets no wrong reward.

A verifier that raises, hangs, dies or returns no finite number yields a failed `Verdict` for its item and for that item
alone. A failed verdict has no reward; it is not a wrong answer, and counting it as one would teach the policy noise.

The boundary contains accidents, not attacks: reward functions are the user's own code. A verifier that moves a
grandchild into another session puts it out of the pool's reach.
"""

from __future__ import annotations

import math
import os
import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from moe_rl.config.dotted_path import dotted_path_problem
from moe_rl.config.schema import RewardConfig
from moe_rl.errors import ConfigError, RewardError, describe
from moe_rl.tasks import frames
from moe_rl.tasks.reward_functions import ARGUMENTS
from moe_rl.tasks.verifier_process import WorkerProcess
from moe_rl.types import Verdict

# Importing a verifier may pull in a large library; more than this is a hang.
_START_SECONDS = 60.0
_START_ATTEMPTS = 3
# Items at a worker at once: enough that it never waits for the pool, few enough that slow items spread over workers.
_ITEMS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One completion to verify."""

    prompt: str
    completion: str
    answer: str


def check_failed_fraction(verdicts: SequenceOf[Verdict], limit: float) -> None:
    """Raise RewardError if more than the fraction `limit` of the verdicts are failed; name the commonest reasons."""
    failed = [verdict for verdict in verdicts if not verdict.scored]
    if len(failed) <= limit * len(verdicts):
        return
    reasons = Counter(verdict.detail for verdict in failed).most_common(3)
    raise RewardError(
        describe(
            "too many verifications failed",
            got=f"{len(failed)} of {len(verdicts)}",
            expected=f"at most {limit:.0%}",
            do="mend the reward function, or raise task.max_failed_fraction or task.verifier_timeout_seconds. Reasons: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons),
        )
    )


class _Batch:
    """The items of one `score`: what is still to be sent, what is known, what is decided."""

    def __init__(self, items: SequenceOf[RewardItem], weights: dict[str, float]):
        self.items = items
        self.pending = deque(range(len(items)))
        self.sent_back: set[int] = set()
        self.undecided = len(items)
        self.verdicts: list[Verdict | None] = [None] * len(items)
        self._weights = weights
        self._names = list(weights)
        self._answered = [0] * len(items)
        self._parts: list[dict[str, float]] = [{} for _ in items]
        self._details: dict[int, str] = {}

    def expects(self, item: int, reward: str) -> bool:
        """Whether this call is the next of its item."""
        return self._names[self._answered[item]] == reward

    def take(self, answer: frames.Returned | frames.Failed) -> bool:
        """Note one call's answer; True when it was the item's last."""
        if isinstance(answer, frames.Returned) and math.isfinite(answer.value):
            self._parts[answer.item][answer.reward] = answer.value
        else:
            failed = isinstance(answer, frames.Failed)
            detail = answer.detail if failed else f"returned {answer.value}, expected a finite number"
            self._details.setdefault(answer.item, f"{answer.reward}: {detail}")
        self._answered[answer.item] += 1
        if self._answered[answer.item] < len(self._names):
            return False
        self.decide(answer.item)
        return True

    def decide(self, item: int, failure: str = "") -> None:
        detail = self._details.get(item, failure)
        parts = self._parts[item]
        if not detail:
            reward = sum(weight * parts[name] for name, weight in self._weights.items())
            if math.isfinite(reward):
                self.verdicts[item] = Verdict("scored", reward, parts)
            else:
                detail = f"the weighted sum of the rewards is {reward}: {parts}"
        if detail:
            self.verdicts[item] = Verdict("failed", None, detail=detail)
        self.undecided -= 1


@dataclass(eq=False)
class _Slot:
    """A place for one worker. `queue`: items sent to it, in order; `current`: the one it says it is working on."""

    process: WorkerProcess | None = None
    ready: bool = False
    failed_starts: int = 0
    queue: deque[int] = field(default_factory=deque)
    current: int | None = None
    reward: str = ""
    deadline: float | None = None


class VerifierPool:
    """Worker processes that score completions with the configured reward functions.

    A context manager. Construction starts the workers and raises ConfigError, naming the config key, for a function
    that is not there or asks for what it cannot have. Workers die with the pool, and with the thread that made it.
    `timeout_seconds` is for all reward functions of one item together, by this process's monotonic clock.
    Not for use by several threads at once.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        *,
        timeout_seconds: float,
        workers: int,
        memory_limit_mib: int = 4096,
    ):
        problems = {name: dotted_path_problem(reward.function) for name, reward in rewards.items()}
        _refuse({name: problem for name, problem in problems.items() if problem})
        self._timeout = timeout_seconds
        self._weights = {name: reward.weight for name, reward in rewards.items()}
        self._setup = frames.Setup(
            sys_path=[os.path.abspath(folder) for folder in sys.path],
            functions={name: reward.function for name, reward in rewards.items()},
            memory_limit_bytes=memory_limit_mib << 20,
        )
        self._arguments: dict[str, list[str]] = {}
        self._batch = _Batch([], self._weights)
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._slots = [_Slot() for _ in range(workers)]
        try:
            for slot in self._slots:
                self._start(slot)
            while not all(slot.ready for slot in self._slots):
                self._pump()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; each leads its own session and process group."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    def close(self) -> None:
        """Kill every worker and whatever it forked. Safe to call twice."""
        self._closed = True
        for slot in self._slots:
            if slot.process is not None:
                self._bury(slot)
        self._selector.close()

    def score(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """One verdict per item, in order. Takes at most about the time limit per item, whatever the verifiers do.

        Raises RewardError when no worker can be started any more; the pool is then closed.
        """
        if self._closed:
            raise RewardError("the verifier pool is closed: it was closed, or an earlier score() raised")
        batch = self._batch = _Batch(items, self._weights)
        try:
            self._dispatch()
            while batch.undecided:
                self._pump()
                self._dispatch()
        except BaseException:  # answers may be on their way that would be taken for the next batch's
            self.close()
            raise
        return batch.verdicts

    # Sending

    def _dispatch(self) -> None:
        """Hand out items, one each in turn, until every ready worker has enough."""
        for depth in range(1, _ITEMS_AHEAD + 1):
            for slot in self._slots:
                while slot.ready and len(slot.queue) < depth and self._batch.pending:
                    self._send(slot, self._batch.pending.popleft())

    def _send(self, slot: _Slot, index: int) -> None:
        item = self._batch.items[index]
        try:
            calls = b"".join(
                frames.encode(frames.Call(index, reward, {name: getattr(item, name) for name in arguments}))
                for reward, arguments in self._arguments.items()
            )
        except UnicodeEncodeError as error:
            self._batch.decide(index, f"cannot be sent to a verifier: {error}")
            return
        if not slot.queue:
            slot.deadline = time.monotonic() + self._timeout
        slot.queue.append(index)
        slot.process.send(calls)
        self._watch(slot)

    def _watch(self, slot: _Slot) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.process.has_unsent else 0)
        key = self._selector.get_key(slot.process.channel)
        if key.events != events:
            self._selector.modify(slot.process.channel, events, key.data)

    # Receiving

    def _pump(self) -> None:
        """Wait for the next event or deadline and deal with it."""
        deadlines = [slot.deadline for slot in self._slots if slot.deadline is not None]
        wait = max(0.0, min(deadlines) - time.monotonic())
        for key, events in self._selector.select(wait):
            slot, process, kind = key.data
            if slot.process is not process:  # buried a moment ago, by another of these events
                continue
            if kind == "output":
                if not process.drain_output():
                    self._selector.unregister(process.output)
            elif kind == "exit":
                self._read(slot)
                if slot.process is process:
                    self._lost(slot)
            else:
                if events & selectors.EVENT_WRITE:
                    process.flush()
                    self._watch(slot)
                if events & selectors.EVENT_READ:
                    self._read(slot)
        now = time.monotonic()
        for slot in self._slots:
            if slot.deadline is not None and now >= slot.deadline:
                self._read(slot)  # an answer that lies there was in time, however late this process looks
                if slot.deadline is not None and now >= slot.deadline:
                    limit = self._timeout if slot.ready else _START_SECONDS
                    self._lost(slot, f"no answer within {limit:g} s; killed")

    def _read(self, slot: _Slot) -> None:
        try:
            answers, closed = slot.process.read()
        except ValueError as error:
            self._lost(slot, f"the worker sent what is no answer: {error}")
            return
        for answer in answers:
            if isinstance(answer, frames.Refused) and not slot.ready:
                self._start_failed(slot, answer.problems)
                return
            if not self._accept(slot, answer):
                self._lost(slot, f"the worker answered out of turn: {type(answer).__name__}")
                return
        if closed:
            self._lost(slot)

    def _accept(self, slot: _Slot, answer: frames.Answer) -> bool:
        """Act on one answer; False if it is not one that this worker may give now."""
        if not slot.ready:
            if isinstance(answer, frames.Started) and answer.item == -1:
                slot.reward = answer.reward
                return True
            if not isinstance(answer, frames.Ready) or list(answer.arguments) != list(self._weights):
                return False
            if not all(set(names) <= set(ARGUMENTS) for names in answer.arguments.values()):
                return False
            self._arguments = answer.arguments
            slot.ready, slot.failed_starts, slot.reward, slot.deadline = True, 0, "", None
            return True
        if not isinstance(answer, frames.Started | frames.Returned | frames.Failed):
            return False
        if not slot.queue or answer.item != slot.queue[0] or not self._batch.expects(answer.item, answer.reward):
            return False
        if isinstance(answer, frames.Started):
            if slot.current is None:
                slot.current = answer.item
                slot.deadline = time.monotonic() + self._timeout
            slot.reward = answer.reward
            return True
        if slot.current != answer.item or slot.reward != answer.reward:
            return False
        if self._batch.take(answer):
            slot.queue.popleft()
            slot.current = None
            slot.deadline = time.monotonic() + self._timeout if slot.queue else None
        return True

    # Workers come and go

    def _start(self, slot: _Slot) -> None:
        slot.ready, slot.reward = False, ""
        slot.deadline = time.monotonic() + _START_SECONDS
        try:
            slot.process = WorkerProcess(self._setup)
        except OSError as error:
            raise RewardError(describe("cannot start a verifier process", got=error)) from error
        for file, kind in ((slot.process.channel, "answers"), (slot.process.output, "output")):
            self._selector.register(file, selectors.EVENT_READ, (slot, slot.process, kind))
        self._selector.register(slot.process.pidfd, selectors.EVENT_READ, (slot, slot.process, "exit"))
        self._watch(slot)

    def _bury(self, slot: _Slot) -> tuple[str, str]:
        """Kill a slot's process group and forget it; how the worker ended and what it last printed."""
        process, slot.process = slot.process, None
        slot.ready, slot.deadline = False, None
        ending = process.kill()
        tail = process.tail()
        for file in (process.channel, process.output, process.pidfd):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        process.close()
        return ending, tail

    def _lost(self, slot: _Slot, reason: str = "") -> None:
        """A worker died, or has to: blame the item it was working on, take back the others, start a new one."""
        was_ready = slot.ready
        ending, tail = self._bury(slot)
        reason = reason or f"the verifier died ({ending})"
        if tail:
            reason += f"; its output ended: {tail}"
        if not was_ready:
            self._start_failed(slot, {slot.reward: reason} if slot.reward else dict.fromkeys(self._weights, reason))
            return
        if slot.queue and (slot.current is not None or slot.queue[0] in self._batch.sent_back):
            self._batch.decide(slot.queue.popleft(), f"{slot.reward}: {reason}" if slot.reward else reason)
        elif slot.queue:
            # It had not begun: the worker died in idleness, or of an earlier item's doing. A second time is too often.
            self._batch.sent_back.add(slot.queue[0])
        self._batch.pending.extendleft(reversed(slot.queue))
        slot.queue.clear()
        slot.current = None
        self._start(slot)

    def _start_failed(self, slot: _Slot, problems: dict[str, str]) -> None:
        if slot.process is not None:
            self._bury(slot)
        if not self._arguments:  # no worker has ever been ready: it is the config
            _refuse(problems)
        slot.failed_starts += 1
        if slot.failed_starts == _START_ATTEMPTS:
            raise RewardError(
                describe(
                    "no new verifier process comes up, though an earlier one did",
                    got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
                )
            )
        self._start(slot)


def _refuse(problems: Mapping[str, str]) -> None:
    if problems:
        raise ConfigError([f"task.rewards.{name}.function: {problem}" for name, problem in problems.items()])
