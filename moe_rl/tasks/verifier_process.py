"""Runs one verifier process for a `VerifierPool`: starts it, sends it calls, and replaces it when it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass

from moe_rl.errors import ConfigError, RewardError, describe
from moe_rl.tasks.reward_arguments import RewardParameters
from moe_rl.tasks.verifier_worker import ANSWERS, Answer, Begun, Call, Load, Loaded, Raised, Returned, Unusable
from moe_rl.tasks.worker_process import WorkerProcess
from moe_rl.types import LARGEST_REWARD

REWARD_RANGE = f"a finite number, at most {LARGEST_REWARD:g} in size"
# Importing a verifier may load a large library. A longer import counts as a hang.
_START_SECONDS = 60.0
_START_ATTEMPTS = 3
# A worker answers with a float or a short sentence. A longer frame is a fault.
_MAX_ANSWER_BYTES = 1 << 20
_TAIL_BYTES = 2048

Scores = dict[str, float | str]
"""The reward functions' results for one item: each a value, or the reason why there is none."""


@dataclass(frozen=True, slots=True)
class VerifierJob:
    """Calls that one worker makes one after another, within one time limit.

    Attributes:
        items: indices of the items.
        calls: for each reward, one row per item, as JSON.
    """

    items: list[int]
    calls: dict[str, list[bytes]]
    limit: float


class _Lost(Exception):
    """Signals that a worker died, hung or sent an invalid answer, and was removed. begun: the reward whose call it had
    begun; "" before the first.
    """

    def __init__(self, reason: str, begun: str):
        super().__init__(reason)
        self.begun = begun


class VerifierPlace:
    """Runs one worker and replaces it when it is lost or out of memory. One thread uses it at a time; only `end` may
    come from another.

    parameters: parameters of each function, shared by all places; empty until a worker has reported them.
    """

    def __init__(self, load: Load, parameters: dict[str, RewardParameters]):
        self._load, self._parameters = load, parameters
        self._lock = threading.Lock()  # held while `process` changes
        self._ended = False
        self.process: WorkerProcess[Answer] | None = None

    def end(self) -> None:
        """Kill the worker for good. A thread that waits for its answer gets RewardError."""
        with self._lock:
            self._ended = True
            if self.process is not None:
                self.process.end()

    def bury(self, error: Exception | None = None, limit: float = 0.0) -> str:
        """Kill and remove the worker, if there is one. Return the reason, from the exception of its channel."""
        with self._lock:
            if self.process is None:
                return ""
            process, self.process = self.process, None
            ending, output = process.bury()
        tail = " | ".join(line.strip() for line in output.splitlines() if line.strip())
        if isinstance(error, TimeoutError):
            reason = f"no answer within {limit:g} s; killed"
        elif isinstance(error, ValueError):
            reason = f"the worker sent an invalid answer: {error}"
        else:
            reason = f"the verifier died ({ending})"
        return f"{reason}; its output ended: {tail}" if tail else reason

    def start(self) -> None:
        """Start a worker.

        Raises:
            ConfigError: a function cannot be used.
            RewardError: no worker starts, although workers started earlier.
        """
        for _ in range(_START_ATTEMPTS):
            problems = self._start()
            if self.process is not None:
                return
            if not self._parameters:
                named = [name for name, function in self._load.functions.items() if function.settings is None]
                refuse_rewards(problems, named)
        raise RewardError(
            "no new verifier process starts, although an earlier one did",
            got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
            fault="no worker",
        )

    def _start(self) -> dict[str, str]:
        """Start a worker; return {reward name: problem} if that fails."""
        with self._lock:
            if self._ended:
                raise RewardError("the verifier pool was closed")
            try:
                process = self.process = WorkerProcess(
                    "moe_rl.tasks.verifier_worker", ANSWERS, longest=_MAX_ANSWER_BYTES, tail_bytes=_TAIL_BYTES
                )
            except OSError as error:
                raise RewardError("cannot start a verifier process", got=error) from error
        deadline, loading = time.monotonic() + _START_SECONDS, ""
        try:
            process.send(self._load, deadline)
            while isinstance(answer := process.receive(deadline), Begun):
                loading = answer.reward
            if isinstance(answer, Unusable):
                self.bury()
                return answer.problems
            if not isinstance(answer, Loaded) or list(answer.parameters) != list(self._load.functions):
                raise ValueError(f"an unexpected {type(answer).__name__}")
            self._parameters |= answer.parameters
            return {}
        except (OSError, EOFError, ValueError) as error:
            return dict.fromkeys([loading] if loading else self._load.functions, self.bury(error, _START_SECONDS))

    def run(self, job: VerifierJob, *, again: bool = True) -> list[Scores]:
        """Let the worker make the calls of a job; return a result for each of its items.

        again: retry once with a new worker if this one is lost before it starts the job.
        """
        try:
            return self._ask(job)
        except _Lost as lost:
            self.start()
            if again and not lost.begun:
                return self.run(job, again=False)
            return [{lost.begun or next(iter(job.calls)): str(lost)} for _ in job.items]

    def _ask(self, job: VerifierJob) -> list[Scores]:
        """Return a result for each item of a job. Raises _Lost."""
        deadline = time.monotonic() + job.limit
        begun, no_memory, results = "", False, [Scores() for _ in job.items]
        process = self.process
        assert process is not None  # `start` ran, and a removal is followed by a new start or the pool's end
        for reward, rows in job.calls.items():
            try:
                process.send(Call(reward, rows), deadline)
                if (answer := process.receive(deadline)) != Begun(reward):
                    raise ValueError(f"an unexpected {type(answer).__name__}")
                if not begun:
                    deadline = time.monotonic() + job.limit
                begun = reward
                answer = process.receive(deadline)
                if not isinstance(answer, Returned | Raised):
                    raise ValueError(f"an unexpected {type(answer).__name__}")
                values = answer.values if isinstance(answer, Returned) else [answer.detail] * len(rows)
                if len(values) != len(rows):
                    raise ValueError(f"{len(values)} values for {len(rows)} rows")
                no_memory |= answer.no_memory
            except (OSError, EOFError, ValueError) as error:
                raise _Lost(self.bury(error, job.limit), begun) from error
            for result, value in zip(results, values, strict=True):
                if isinstance(value, str) or abs(value) <= LARGEST_REWARD:
                    result[reward] = value
                else:
                    result[reward] = f"returned {value}, expected {REWARD_RANGE}"
        if no_memory:  # if the functions keep what fills it, every later call would fail too
            self.bury()
            self.start()
        return results


def refuse_rewards(problems: Mapping[str, str], named: Container[str]) -> None:
    """Raise ConfigError with these problems, {reward name: problem}. named: rewards whose config names a function."""
    keys = {name: f"task.rewards.{name}{'.function' if name in named else ''}" for name in problems}
    if problems:
        raise ConfigError([describe(text, where={"key": keys[name]}) for name, text in problems.items()])
