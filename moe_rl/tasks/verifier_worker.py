"""Runs as the verifier process: imports the reward functions and calls them, one at a time, for a `VerifierPool`.

It is started as `python -m moe_rl.tasks.verifier_worker SOCKET_FD PARENT_PID`, in a session of its own. It reads one
call at a time and never ahead, so while a function runs, the process holds only the data of that call.

A reward function is a plain callable. It gets those of `REWARD_ARGUMENTS` that it names as parameters, and nothing
else. A parameter with another name must have a default.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import numbers
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from msgspec.msgpack import Decoder

from moe_rl.messages import REWARD_ARGUMENTS, Channel, Message, decoder, unknown_argument

_PR_SET_PDEATHSIG = 1
_MAX_FILE_BYTES = 64 << 20
_MAX_DETAIL = 500


class Load(Message, frozen=True):
    """Sent by the pool first: what to import, and how much address space the worker may map."""

    sys_path: list[str]
    functions: dict[str, str]
    memory_limit_bytes: int


class Call(Message, frozen=True):
    """Sent by the pool: call one reward function, with only the arguments that it names."""

    reward: str
    arguments: dict[str, Any]


class Begun(Message, frozen=True):
    """Sent by the worker: this call begins now. Before the first call: the import of this function begins now."""

    reward: str


class Loaded(Message, frozen=True):
    """Sent by the worker: all functions are imported. Carries the arguments that each names."""

    arguments: dict[str, list[str]]


class Unusable(Message, frozen=True):
    """Sent by the worker: {reward name: why its function cannot be used}."""

    problems: dict[str, str]


class Returned(Message, frozen=True):
    value: float


class Raised(Message, frozen=True):
    """Sent by the worker: the function raised an exception, or did not return a number."""

    detail: str


QUESTIONS: Decoder[Load | Call] = decoder(Load | Call)
Answer = Begun | Loaded | Unusable | Returned | Raised
ANSWERS: Decoder[Answer] = decoder(Answer)


def main(socket_fd: int, parent_pid: int) -> None:
    _die_with(parent_pid)
    # Schedulers send SIGTERM to every process of a job. The trainer decides when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(socket_fd, False)
    channel = Channel(socket.socket(fileno=socket_fd), QUESTIONS)
    pid = os.getpid()
    try:
        load = channel.receive()
        assert isinstance(load, Load)  # the pool sends Setup first, and only calls after it
        _limit(load.memory_limit_bytes)
        sys.path[:] = load.sys_path
        answer: Answer
        functions, answer = _load(channel, load.functions)
        del load
        while True:
            channel.send(answer)
            call = channel.receive()
            assert isinstance(call, Call)
            channel.send(Begun(call.reward))
            answer = _answer(functions[call.reward], call)
            if os.getpid() != pid:  # a child that the function forked has returned into this loop
                os._exit(1)
    except EOFError:  # the pool has closed the socket
        return


def _die_with(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the signal was requested
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _load(channel: Channel, functions: dict[str, str]) -> tuple[dict[str, Callable[..., object]], Unusable | Loaded]:
    loaded, arguments, problems = {}, {}, {}
    for reward, path in functions.items():
        channel.send(Begun(reward))
        try:
            loaded[reward], arguments[reward] = _resolve(path)
        except ValueError as error:
            problems[reward] = str(error)
        except BaseException as error:  # importing runs user code, which may raise anything, even SystemExit
            problems[reward] = f"importing {path} raised {_sentence(error)}"
    return loaded, Unusable(problems) if problems else Loaded(arguments)


def _resolve(path: str) -> tuple[Callable[..., object], list[str]]:
    """Import a reward function; return it with the `REWARD_ARGUMENTS` that it names.

    Raises:
        ValueError: with a message for the user. Exceptions of the imported module pass through.
    """
    module_name, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module_name), name, None)
    if function is None:
        raise ValueError(f"module {module_name} has no {name!r}")
    if not callable(function):
        raise ValueError(f"{path} is not callable: got {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{path} is a coroutine function. Make it a plain function")
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in REWARD_ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ValueError(unknown_argument(path, parameter.name))
    return function, wanted


def _answer(function: Callable[..., object], call: Call) -> Returned | Raised:
    try:
        value = function(**call.arguments)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return Returned(float(value))
        return Raised(f"returned {type(value).__name__}, expected a finite number")
    except BaseException as error:  # any exception, even SystemExit, is a failure of this call alone
        return Raised(f"raised {_sentence(error)}")


def _sentence(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # str(exception) itself may raise
        text = type(error).__name__
    return text.encode("ascii", "backslashreplace").decode("ascii")[:_MAX_DETAIL]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
