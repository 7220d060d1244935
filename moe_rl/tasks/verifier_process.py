"""Runs one verifier process for a `VerifierPool`: starts it, sends it calls, and replaces it when it is lost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import moe_rl
from moe_rl.errors import ConfigError, RewardError, describe
from moe_rl.messages import Channel, Message
from moe_rl.tasks.reward_arguments import RewardParameters
from moe_rl.tasks.verifier_worker import ANSWERS, Answer, Begun, Call, Load, Loaded, Raised, Returned, Unusable
from moe_rl.types import LARGEST_REWARD

REWARD_RANGE = f"a finite number, at most {LARGEST_REWARD:g} in size"
# Importing a verifier may load a large library. A longer import counts as a hang.
_START_SECONDS = 60.0
_START_ATTEMPTS = 3
_KILL_SECONDS = 10.0
# A worker answers with a float or a short sentence. A longer frame is a fault.
_MAX_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2048
# Environment variables that a verifier may see. This is an allow-list: with torchrun's variables a verifier would join
# the run, and it must not see tokens and keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")

Scores = dict[str, float | str]
"""What the reward functions gave for one item: for each the value, or why there is none."""


@dataclass(frozen=True, slots=True)
class VerifierJob:
    """Calls that one worker makes after one another, within one time limit.

    Attributes:
        items: indices of the items.
        calls: for each reward, one row per item, as JSON.
    """

    items: list[int]
    calls: dict[str, list[bytes]]
    limit: float


class _Lost(Exception):
    """Signals that a worker died, hung or sent an invalid answer, and was removed. begun: the reward whose call it had
    started; "" before the first.
    """

    def __init__(self, reason: str, begun: str):
        super().__init__(reason)
        self.begun = begun


class VerifierPlace:
    """Runs one worker and replaces it when it is lost. One thread uses it at a time; only `end` may come from another.

    parameters: those of each function, as reported by a worker. All places share them; empty until then.
    """

    def __init__(self, load: Load, parameters: dict[str, RewardParameters]):
        self._load, self._parameters = load, parameters
        self._lock = threading.Lock()  # held while `process` changes
        self._ended = False
        self.process: VerifierProcess | None = None

    def end(self) -> None:
        """Kill the worker for good. The thread that waits for its answer gets RewardError."""
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
            ending, tail = process.bury()
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
            RewardError: workers started earlier, but none starts any more.
        """
        for _ in range(_START_ATTEMPTS):
            problems = self._start()
            if self.process is not None:
                return
            if not self._parameters:
                named = [name for name, one in self._load.functions.items() if one.settings is None]
                refuse_rewards(problems, named)
        raise RewardError(
            describe(
                "no new verifier process starts, although an earlier one did",
                got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
                fault="no worker",
            )
        )

    def _start(self) -> dict[str, str]:
        """Start a worker; return {reward name: problem} if that fails."""
        with self._lock:
            if self._ended:
                raise RewardError("the verifier pool was closed")
            try:
                process = self.process = VerifierProcess()
            except OSError as error:
                raise RewardError(describe("cannot start a verifier process", got=error)) from error
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
        begun, results = "", [Scores() for _ in job.items]
        process = self.process
        assert process is not None  # `start` ran before, and whoever removes a worker starts another or ends the pool
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
            except (OSError, EOFError, ValueError) as error:
                raise _Lost(self.bury(error, job.limit), begun) from error
            for result, value in zip(results, values, strict=True):
                if isinstance(value, str) or abs(value) <= LARGEST_REWARD:
                    result[reward] = value
                else:
                    result[reward] = f"returned {value}, expected {REWARD_RANGE}"
        return results


class VerifierProcess:
    """Holds a child process that runs `moe_rl.tasks.verifier_worker`, its channel, and the end of its output."""

    def __init__(self):
        self._tail = b""
        ours, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "moe_rl.tasks.verifier_worker"]
                + [str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                env=_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        self.pid = self._process.pid
        # A closed socket is not enough to detect the end of the process, because its forked children may keep it open.
        self._pidfd = os.pidfd_open(self.pid)
        self._channel = Channel(ours, ANSWERS, _MAX_ANSWER_BYTES)
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        for file in (ours, self._output, self._pidfd):
            self._poll.register(file, select.POLLIN)

    def send(self, message: Message, deadline: float) -> None:
        """Send a message. Raises as `Channel.send`, and TimeoutError at the deadline (monotonic clock)."""
        self._channel.socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._channel.send(message)

    def receive(self, deadline: float) -> Answer:
        """Receive the next answer. Raises as `Channel.receive`, TimeoutError at the deadline, EOFError if the process
        ended.
        """
        self._channel.socket.setblocking(False)
        events: dict[int, int] = {}
        while True:
            late = time.monotonic() >= deadline
            with contextlib.suppress(BlockingIOError):
                # An answer that is already here was in time, even if this process looks late.
                return self._channel.receive()
            if self._pidfd in events:
                raise EOFError("the process ended")
            if late:
                raise TimeoutError
            events = dict(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if self._output in events and not self._drain():
                self._poll.unregister(self._output)

    def _drain(self) -> bool:
        """Read some of the verifiers' output and keep its end. Return False when no more will come."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def end(self) -> None:
        """Kill the process group."""
        # The pid names the group until it is reaped, even if the worker is already dead: processes that it forked are
        # in the group too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> tuple[str, str]:
        """Kill the process group, reap the worker and close this side. Return how it ended, and the end of its
        output.
        """
        self.end()
        code = self._process.wait(_KILL_SECONDS)
        self._drain()
        self._channel.socket.close()
        os.close(self._output)
        os.close(self._pidfd)
        text = self._tail.decode("utf-8", "replace").encode("ascii", "backslashreplace").decode("ascii")
        tail = " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}", tail


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return kept | {
        "PYTHONPATH": str(Path(moe_rl.__file__).parents[1]),
        "PYTHONHASHSEED": "0",  # a verifier that iterates over a set must give the same verdict in every run
        "OMP_NUM_THREADS": "1",
    }


def refuse_rewards(problems: Mapping[str, str], named: Container[str]) -> None:
    """Raise ConfigError with these problems, {reward name: problem}. named: rewards whose config names a function."""
    keys = {name: f"task.rewards.{name}{'.function' if name in named else ''}" for name in problems}
    if problems:
        raise ConfigError([describe(text, where={"key": keys[name]}) for name, text in problems.items()])
