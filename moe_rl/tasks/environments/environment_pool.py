"""Runs episodes of an environment concurrently, each in its own process, so that no fault of one stops another.

An episode whose environment raises, crashes, hangs, uses too much memory or returns no reward has failed: it has no
reward, and its traceback is kept. Counting it as a reward of 0 would train the model on faults of the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.config.check_files import dotted_path_problem
from moe_rl.config.environment import EnvironmentConfig
from moe_rl.errors import ConfigError, RewardError
from moe_rl.messages import Message
from moe_rl.tasks.environments.agent_session import SessionAccess
from moe_rl.tasks.environments.episode_worker import (
    EPISODE_ANSWERS,
    KILL_AFTER,
    Broken,
    EpisodeAnswer,
    Play,
    Played,
    Prepare,
    Prepared,
)
from moe_rl.tasks.verifier_process import REWARD_RANGE
from moe_rl.tasks.worker_process import WorkerProcess
from moe_rl.types import LARGEST_REWARD

# Importing an environment may load a large library. A longer import counts as a hang.
_START_SECONDS = 60.0
_MAX_ANSWER_BYTES = 1 << 20
_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Episode:
    """Describes how an episode ended.

    Attributes:
        rewards: one reward, or one for each turn of the session; None if the episode failed.
        problem: why it failed; "" if it did not.
        traceback: where it failed: the exception's traceback, or the end of the process's output, with its stacks.
        seconds: how long it took, without the import of the environment.
    """

    rewards: float | tuple[float, ...] | None
    problem: str = ""
    traceback: str = ""
    seconds: float = 0.0


class _Run:
    """Holds the process of one episode, so that another thread can end it."""

    def __init__(self, python: Path | None, variables: Sequence[str]) -> None:
        self._python, self._variables = python, variables
        self._lock = threading.Lock()  # held while `_process` changes
        self._process: WorkerProcess[EpisodeAnswer] | None = None
        self._ended = False

    def start(self) -> WorkerProcess[EpisodeAnswer]:
        with self._lock:
            if self._ended:
                raise OSError("the pool was closed")
            self._process = WorkerProcess(
                "moe_rl.tasks.environments.episode_worker",
                EPISODE_ANSWERS,
                longest=_MAX_ANSWER_BYTES,
                tail_bytes=_TAIL_BYTES,
                python=self._python,
                variables=self._variables,
            )
            return self._process

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.end()

    def bury(self) -> tuple[str, str]:
        with self._lock:
            process, self._process = self._process, None
            return process.bury() if process is not None else ("", "")


class EnvironmentPool:
    """Runs episodes of one environment in processes. Use as a context manager.

    The constructor imports the environment once in a process, to check that it can be used.

    Args:
        environment: dotted path of an async function `run(session, row)`.
        concurrent: maximum number of concurrent episodes.
        seconds: time limit of an episode, by the monotonic clock, without the import.
        memory_limit_mib: address space that each process of an episode may map.
        python: interpreter for the episodes, 3.12 or later, with its own packages; None: this one. It needs msgspec,
            and moe_rl unless that is a checkout.
        options: JSON values by name, for the environment.
        variables: names of environment variables that the episodes may see.

    Raises:
        ConfigError: the environment cannot be used, or a variable is not set.
    """

    def __init__(
        self,
        environment: str,
        *,
        concurrent: int,
        seconds: float,
        memory_limit_mib: int = 4096,
        python: Path | None = None,
        options: Mapping[str, Any] | None = None,
        variables: Sequence[str] = (),
    ):
        if unset := [name for name in variables if name not in os.environ]:
            raise ConfigError(
                "episodes need environment variables that are not set",
                where={"key": "task.environment.env"},
                got=", ".join(unset),
                do="export them where rank 0 is started",
            )
        if python is None and (problem := dotted_path_problem(environment)):
            raise _unusable(problem)
        self._prepare = Prepare(
            sys_path=[os.path.abspath(folder) for folder in sys.path if python is None or not _installed(folder)],
            environment=environment,
            memory_limit_bytes=memory_limit_mib << 20,
            options=json.dumps(options or {}).encode(),
        )
        self.concurrent, self._seconds, self._python = concurrent, seconds, python
        self._variables = tuple(variables)
        # The threads live as long as the pool, because the kernel kills a process when the thread that started it ends.
        self._threads = ThreadPoolExecutor(concurrent)
        self._closed = False
        first = _Run(python, self._variables)
        self._runs = {first}
        try:
            tried = self._threads.submit(self._episode, first, None).result()
            if tried.problem:
                raise _unusable(tried.problem, tried.traceback)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, environment: EnvironmentConfig, *, concurrent: int | None = None) -> EnvironmentPool:
        """Start the pool that a config describes. concurrent: fewer concurrent episodes than in the config."""
        return cls(
            environment.run,
            concurrent=environment.concurrent if concurrent is None else concurrent,
            seconds=environment.seconds,
            memory_limit_mib=environment.memory_limit_mib,
            python=environment.python,
            options=environment.options,
            variables=environment.env,
        )

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every episode and all processes that it started. Safe to call twice."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for run in list(self._runs):
            run.end()
        self._threads.shutdown()

    async def play(self, access: SessionAccess, row: Mapping[str, Any]) -> Episode:
        """Run one episode once there is room, and return how it ended. Cancelling this kills the episode.

        Args:
            row: JSON values by name.

        Raises:
            RewardError: the pool is closed.
        """
        if self._closed:
            raise RewardError("the pool of environments is closed", fault="closed")
        play = Play(access, self._seconds, json.dumps(row).encode())
        run = _Run(self._python, self._variables)
        self._runs.add(run)
        try:
            return await asyncio.wrap_future(self._threads.submit(self._episode, run, play))
        finally:
            run.end()
            self._runs.discard(run)

    def _episode(self, run: _Run, play: Play | None) -> Episode:
        """Run an episode in a process; without `play`, only import the environment."""
        try:
            process = run.start()
        except OSError as error:
            return Episode(None, f"no process could be started: {error}")
        began, limit, importing = time.monotonic(), _START_SECONDS, True
        try:
            answer = _asked(process, self._prepare, began + limit)
            began, limit = time.monotonic(), self._seconds
            if isinstance(answer, Prepared) and play is not None:
                importing = False
                answer = _asked(process, play, began + limit + KILL_AFTER)
        except (OSError, EOFError, ValueError) as error:
            seconds = time.monotonic() - began
            ending, output = run.bury()
            if isinstance(error, TimeoutError):
                reason = f"no {'end of its import' if importing else 'reward'} within {limit:g} s; killed"
            elif isinstance(error, ValueError):
                reason = f"its process sent an invalid answer: {error}"
            else:
                reason = f"its process died ({ending})"
            return Episode(None, reason, output, seconds)
        seconds = time.monotonic() - began
        run.bury()
        match answer:
            case Broken(problem, traceback):
                return Episode(None, problem, traceback, seconds)
            case Played(rewards) if play is not None:
                return _checked(rewards, seconds)
            case Prepared() if play is None:
                return Episode(None)
        return Episode(None, f"its process sent an unexpected {type(answer).__name__}", seconds=seconds)


def _installed(folder: str) -> bool:
    """Return whether a folder of sys.path belongs to this interpreter."""
    return any(Path(folder).absolute().is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _asked(process: WorkerProcess[EpisodeAnswer], message: Message, deadline: float) -> EpisodeAnswer:
    process.send(message, deadline)
    return process.receive(deadline)


def _checked(rewards: float | list[float], seconds: float) -> Episode:
    values = rewards if isinstance(rewards, list) else [rewards]
    wrong = [reward for reward in values if not abs(reward) <= LARGEST_REWARD]  # `not <=` also catches NaN
    if wrong:
        return Episode(None, f"returned {wrong[0]}, expected {REWARD_RANGE}", seconds=seconds)
    return Episode(tuple(rewards) if isinstance(rewards, list) else rewards, seconds=seconds)


def _unusable(problem: str, traceback: str = "") -> ConfigError:
    return ConfigError(f"{problem}\n{traceback}".rstrip(), where={"argument": "environment"})
