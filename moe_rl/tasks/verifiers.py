"""Runs reward functions in separate processes, so that no fault of a function stops the run or changes another reward.

If a function raises, hangs, dies or returns no finite number, its item gets a failed `Verdict`; other items are not
affected, except those of the same batch. A failed verdict has no reward. Counting it as a wrong answer would add noise
to training.

The process boundary contains accidents, not attacks: reward functions are the user's own code. The pool cannot reach a
grandchild that a function moves into another session.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import moe_rl
from moe_rl.config.check_files import dotted_path_problem
from moe_rl.config.reward_arguments import BUILT_IN, Columns, RewardParameters, argument_problems
from moe_rl.config.reward_kinds import FunctionReward, ReasoningGymReward, RewardConfig
from moe_rl.errors import ConfigError, RewardError, describe
from moe_rl.messages import Channel, Message
from moe_rl.tasks.verifier_worker import (
    ANSWERS,
    Answer,
    Begun,
    Call,
    Load,
    Loaded,
    Raised,
    Returned,
    RewardFunction,
    Unusable,
)
from moe_rl.types import LARGEST_REWARD, Prompt, Verdict

# Importing a verifier may load a large library. A longer import counts as a hang.
_START_SECONDS = 60.0
_START_ATTEMPTS = 3
_KILL_SECONDS = 10.0
# A worker answers with a float or a short sentence. A longer frame is a fault.
_MAX_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2048
_SIZE = f"a finite number, at most {LARGEST_REWARD:g} in size"
# Environment variables that a verifier may see. This is an allow-list: with torchrun's variables a verifier would join
# the run, and it must not see tokens and keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class RewardItem:
    """Holds one completion to verify.

    Attributes:
        completion: its text without the stop token.
        columns, messages: as in `Prompt`.
        finish_reason, stop_token_id: as in `Completion`.
        completion_token_ids: the tokens of `completion`.
    """

    prompt: str
    completion: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    stop_token_id: int | None = None
    completion_token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None

    def arguments(self, parameters: RewardParameters) -> dict[str, Any]:
        """Return the values of a function's parameters: built-in arguments, or else the columns of these names.

        Raises:
            ValueError: there is no column for a parameter without a default.
        """
        if absent := [name for name in parameters.needed if name not in BUILT_IN and name not in self.columns]:
            raise ValueError(f"the prompt's row has no column {', '.join(absent)}")
        built_in = {name: getattr(self, name) for name in BUILT_IN}
        found = {**self.columns, **built_in}
        return {name: found[name] for name in (*parameters.needed, *parameters.optional) if name in found}


def check_failed_fraction(
    verdicts: SequenceOf[Verdict], limit: float, what: str = "too many verifications failed"
) -> None:
    """Raise RewardError if more than the fraction `limit` of the verdicts failed. The message names the commonest
    reasons.
    """
    failed = [verdict for verdict in verdicts if not verdict.scored]
    if len(failed) <= limit * len(verdicts):
        return
    reasons = Counter(verdict.detail for verdict in failed).most_common(3)
    raise RewardError(
        describe(
            what,
            got=f"{len(failed)} of {len(verdicts)}",
            expected=f"at most {limit:.0%}",
            do="mend the reward function, or raise task.max_failed_fraction or task.verifier_timeout_seconds. Reasons: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons),
            fault="too many",
        )
    )


class VerifierPool:
    """Scores completions with the configured reward functions in worker processes. Use as a context manager.

    Construction starts the workers. Workers end with the pool and with this process. The pool is not thread-safe.

    Args:
        timeout_seconds: the time limit, by the monotonic clock, for all functions of one item together that take one
            item a call. A call with a batch of items has a limit of its own, of the same length unless its kind of
            reward says another.
        generators: options of the generators of prompts by task name, for rewards of kind `reasoning_gym`.

    Raises:
        ConfigError: naming the config key, for a function that does not exist or has parameters without a name.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        *,
        timeout_seconds: float,
        workers: int,
        generators: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        memory_limit_mib: int = 4096,
    ):
        functions = {name: one.function for name, one in rewards.items() if isinstance(one, FunctionReward)}
        problems = {name: dotted_path_problem(function) for name, function in functions.items()}
        _refuse({name: problem for name, problem in problems.items() if problem}, functions)
        self._rewards, self._timeout = dict(rewards), timeout_seconds
        load = Load(
            sys_path=[os.path.abspath(folder) for folder in sys.path],
            functions={name: _function(reward, generators) for name, reward in rewards.items()},
            memory_limit_bytes=memory_limit_mib << 20,
        )
        self._parameters: dict[str, RewardParameters] = {}
        self._places = [_Place(load, self._parameters) for _ in range(workers)]
        # The threads live as long as the pool, because the kernel kills a worker when the thread that started it ends.
        self._threads = ThreadPoolExecutor(workers)
        self._closed = False
        try:
            list(self._threads.map(_Place.start, self._places))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers. Each leads its own session and process group."""
        return [process.pid for place in self._places if (process := place.process) is not None]

    def close(self) -> None:
        """Kill every worker and all processes that it forked. Safe to call twice."""
        self._closed = True
        for place in self._places:
            place.end()
        self._threads.shutdown(cancel_futures=True)
        for place in self._places:
            place.bury()

    def check_arguments(self, sources: Mapping[str, Columns]) -> None:
        """Check that every reward function gets the arguments that it names.

        Args:
            sources: columns of each source of prompts, by a name for the message.

        Raises:
            ConfigError: naming each reward, argument and source.
        """
        if problems := [*argument_problems(self._parameters, sources)]:
            raise ConfigError(problems)

    def try_out(self, prompts: SequenceOf[Prompt], limit: float) -> None:
        """Score an empty completion of each prompt, so that rewards that always fail are told before a run starts.

        Raises:
            RewardError: more than half of the verifications failed, and more than the fraction `limit`.
        """
        items = [RewardItem(one.text, "", one.columns, "length", messages=one.messages) for one in prompts]
        what = "the rewards were tried on the first prompts with an empty completion, and most failed"
        check_failed_fraction(self.score(items), max(limit, 0.5), what)

    def score(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """Return one verdict per item, in order. Takes at most about the time limit per item, even if verifiers hang.

        Raises:
            RewardError: no worker can be started any more. The pool is then closed.
        """
        if self._closed:
            raise RewardError(describe("the verifier pool is closed, or an earlier score() raised", fault="closed"))
        results: list[_Result] = [{} for _ in items]
        todo = iter(list(self._jobs(items, results)))  # threads may share it: next() of a list iterator is atomic

        def serve(place: _Place) -> None:
            try:
                for job in todo:
                    for index, result in zip(job.items, place.run(job), strict=True):
                        results[index] |= result
            except BaseException:
                list(todo)  # ends the other threads too
                raise

        try:
            list(self._threads.map(serve, self._places))
        except BaseException:
            self.close()
            raise
        return [self._verdict(result) for result in results]

    def _jobs(self, items: SequenceOf[RewardItem], results: list[_Result]) -> Iterator[_Job]:
        """Yield the calls that score the items. An item that cannot be sent gets its result here, and no call."""
        rows: list[dict[str, bytes]] = []
        for item, result in zip(items, results, strict=True):
            row = {}
            for name in self._rewards:
                try:
                    row[name] = _encoded(item.arguments(self._parameters[name]))
                except (ValueError, TypeError, RecursionError) as error:
                    result[name] = f"cannot be sent to a verifier: {error}"
            rows.append({} if result else row)
        single = [name for name, reward in self._rewards.items() if reward.batch is None]
        for index, row in enumerate(rows):
            if row and single:
                yield _Job([index], {name: [row[name]] for name in single}, self._timeout)
        for name, reward in self._rewards.items():
            if reward.batch is None:
                continue
            alike: dict[tuple[str, ...], list[int]] = {}  # rows of one call have the same arguments
            for index, row in enumerate(rows):
                if row:
                    alike.setdefault(tuple(items[index].arguments(self._parameters[name])), []).append(index)
            for indices in alike.values():
                for start in range(0, len(indices), reward.batch):
                    chunk = indices[start : start + reward.batch]
                    yield _Job(chunk, {name: [rows[at][name] for at in chunk]}, reward.limit_seconds or self._timeout)

    def _verdict(self, result: _Result) -> Verdict:
        """Combine what the reward functions gave for one item."""
        parts: dict[str, float] = {}
        for name in self._rewards:
            value = result.get(name)  # None: no function of an item is called when one of them cannot be
            if isinstance(value, str):
                return Verdict("failed", None, detail=f"{name}: {value}")
            if value is not None:
                parts[name] = value
        reward = sum(one.weight * parts[name] for name, one in self._rewards.items())
        if not abs(reward) <= LARGEST_REWARD:  # `not <=` also catches NaN
            detail = f"the weighted sum of the rewards is {reward}, expected {_SIZE}: {parts}"
            return Verdict("failed", None, detail=detail)
        return Verdict("scored", reward, parts)


_Result = dict[str, float | str]
"""What the reward functions gave for one item: for each the value, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Calls that one worker makes after one another, within one time limit.

    Attributes:
        items: indices of the items.
        calls: for each reward, one row per item, as JSON.
    """

    items: list[int]
    calls: dict[str, list[bytes]]
    limit: float


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    """Encode arguments as JSON. It keeps integers of any size, which msgpack does not."""
    return json.dumps(arguments, ensure_ascii=False, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _function(reward: RewardConfig, generators: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    batched = reward.batch is not None
    if isinstance(reward, FunctionReward):
        return RewardFunction(reward.function, None, batched)
    settings = reward.settings
    if isinstance(reward, ReasoningGymReward):
        settings["options"] = {task: dict(options) for task, options in generators.items()}
    return RewardFunction(reward.factory, settings, batched)


class _Lost(Exception):
    """Signals that a worker died, hung or sent an invalid answer, and was removed. begun: the reward whose call it had
    started; "" before the first.
    """

    def __init__(self, reason: str, begun: str):
        super().__init__(reason)
        self.begun = begun


class _Place:
    """Runs one worker and replaces it when it is lost. One thread uses it at a time; only `end` may come from another.

    parameters: those of each function, as reported by a worker. All places share them; empty until then.
    """

    def __init__(self, load: Load, parameters: dict[str, RewardParameters]):
        self._load, self._parameters = load, parameters
        self._lock = threading.Lock()  # held while `process` changes
        self._ended = False
        self.process: _WorkerProcess | None = None

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
                _refuse(problems, named)
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
                process = self.process = _WorkerProcess()
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
            if not isinstance(answer, Loaded) or list(answer.signatures) != list(self._load.functions):
                raise ValueError(f"an unexpected {type(answer).__name__}")
            for reward, one in answer.signatures.items():
                self._parameters[reward] = RewardParameters(tuple(one.needed), tuple(one.optional))
            return {}
        except (OSError, EOFError, ValueError) as error:
            return dict.fromkeys([loading] if loading else self._load.functions, self.bury(error, _START_SECONDS))

    def run(self, job: _Job, *, again: bool = True) -> list[_Result]:
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

    def _ask(self, job: _Job) -> list[_Result]:
        """Return a result for each item of a job. Raises _Lost."""
        deadline = time.monotonic() + job.limit
        begun, results = "", [_Result() for _ in job.items]
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
                    result[reward] = f"returned {value}, expected {_SIZE}"
        return results


class _WorkerProcess:
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
                return (
                    self._channel.receive()
                )  # an answer that is already here was in time, even if this process looks late
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


def _refuse(problems: Mapping[str, str], named: Container[str]) -> None:
    """Raise ConfigError with these problems, {reward name: problem}. named: rewards whose config names a function."""
    keys = {name: f"task.rewards.{name}{'.function' if name in named else ''}" for name in problems}
    if problems:
        raise ConfigError([describe(text, where={"key": keys[name]}) for name, text in problems.items()])
