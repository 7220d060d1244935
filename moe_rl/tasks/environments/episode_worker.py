"""Runs as the process of one episode: imports the environment and runs it once, for an `EnvironmentPool`.

It is started as `python -m moe_rl.tasks.environments.episode_worker SOCKET_FD PARENT_PID`, and killed after it has
answered. An environment is an async callable `run(session, row)` that returns a reward, or a list with one reward for
each turn of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from msgspec.msgpack import Decoder

from moe_rl.messages import Message, decoder
from moe_rl.tasks.environments.agent_session import AgentSession, SessionAccess
from moe_rl.tasks.worker_side import limit_resources, open_channel, resolve, sentence

_MAX_FILE_BYTES = 1 << 30
_MAX_TRACEBACK = 16000
# A hang that the event loop cannot interrupt, such as an endless loop, writes its stacks and is killed this many
# seconds after the time limit. A busy machine may need seconds to write them.
STACKS_AFTER, KILL_AFTER = 0.5, 5.0


class Prepare(Message, frozen=True):
    """Sent by the pool first: the environment's dotted path, its options as JSON, and how much address space its
    process may map.

    sys_path: searched before the interpreter's own.
    """

    sys_path: list[str]
    environment: str
    memory_limit_bytes: int
    options: bytes = b"{}"


class Play(Message, frozen=True):
    """Sent by the pool: run the environment. row: as JSON."""

    access: SessionAccess
    seconds: float
    row: bytes


class Prepared(Message, frozen=True):
    """Sent by the worker: the environment is imported."""


class Played(Message, frozen=True):
    """Sent by the worker: the environment's result, one reward or one for each turn."""

    rewards: float | list[float]


class Broken(Message, frozen=True):
    """Sent by the worker: the environment cannot be used, raised, or returned a wrong value."""

    problem: str
    traceback: str


QUESTIONS: Decoder[Prepare | Play] = decoder(Prepare | Play)
EpisodeAnswer = Prepared | Played | Broken
EPISODE_ANSWERS: Decoder[EpisodeAnswer] = decoder(EpisodeAnswer)


def main(socket_fd: int, parent_pid: int) -> None:
    channel = open_channel(socket_fd, parent_pid, QUESTIONS)
    with contextlib.suppress(EOFError):  # the pool has closed the socket
        asked = channel.receive()
        assert isinstance(asked, Prepare)  # the pool sends Prepare first, and Play after it
        limit_resources(asked.memory_limit_bytes, _MAX_FILE_BYTES)
        sys.path[:] = dict.fromkeys([*asked.sys_path, *sys.path])
        try:
            environment = _load(asked.environment)
        except ValueError as error:
            return channel.send(Broken(str(error), ""))
        except BaseException as error:  # importing runs user code, which may raise anything, even SystemExit
            return channel.send(Broken(f"importing {asked.environment} raised {sentence(error)}", _traceback(error)))
        channel.send(Prepared())
        play = channel.receive()
        assert isinstance(play, Play)
        faulthandler.dump_traceback_later(play.seconds + STACKS_AFTER)
        pid, answer = os.getpid(), _outcome(environment, play, asked.options)
        if os.getpid() != pid:  # a child that the environment forked has returned into this function
            os._exit(1)
        channel.send(answer)
        channel.receive()  # wait to be killed: exiting would run the environment's exit handlers


def _load(path: str) -> Callable[..., object]:
    """Import the environment. Raises ValueError with a message for the user."""
    environment = resolve(path)
    try:
        inspect.signature(environment).bind("session", {})
    except TypeError as error:
        raise ValueError(f"{path} cannot be called as run(session, row): {error}") from None
    return environment


def _outcome(environment: Callable[..., object], play: Play, options: bytes) -> Played | Broken:
    try:
        # The loop is never closed: that would wait for the environment's remaining threads and tasks.
        value = asyncio.Runner().run(_run(environment, play, options))
        return value if isinstance(value, Broken) else _rewards(value)
    except BaseException as error:  # any exception, even SystemExit, fails only this episode
        return Broken(f"raised {sentence(error)}", _traceback(error))


async def _run(environment: Callable[..., Any], play: Play, options: bytes) -> object:
    """Return the environment's result within its time limit."""
    try:
        async with asyncio.timeout(play.seconds) as limit:
            session = AgentSession(play.access, play.seconds, json.loads(options))
            waiting = environment(session, json.loads(play.row))
            if not inspect.isawaitable(waiting):
                return Broken(f"returned {type(waiting).__name__} at once, expected an async function", "")
            return await waiting
    except TimeoutError as error:
        if not limit.expired():
            raise
        return Broken(f"no reward within {play.seconds:g} s", _traceback(error))


def _rewards(value: object) -> Played | Broken:
    """Return the environment's result as numbers. The pool checks their size."""
    values = value if isinstance(value, list) else [value]
    rewards = []
    for turn, reward in enumerate(values):
        if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
            place = f" for turn {turn}" if isinstance(value, list) else ""
            return Broken(f"returned {type(reward).__name__}{place}, expected a finite number", "")
        rewards.append(float(reward))
    return Played(rewards if isinstance(value, list) else rewards[0])


def _traceback(error: BaseException) -> str:
    """Return the traceback of an exception and its causes. A long one loses its beginning."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # str(exception) itself may raise
        text = "".join(traceback.format_tb(error.__traceback__))
    return text.encode("ascii", "backslashreplace").decode("ascii")[-_MAX_TRACEBACK:]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
