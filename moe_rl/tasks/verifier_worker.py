"""Runs as the verifier process: imports the reward functions and calls them, one call at a time, for a `VerifierPool`.

It is started as `python -m moe_rl.tasks.verifier_worker SOCKET_FD PARENT_PID`, in its own session. It reads one
call at a time and never ahead, so while a function runs, the process holds only the data of that call.

A reward function is a plain or async callable. It gets only the arguments that it names as parameters, and with
`**kwargs` all columns.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import os
import sys
from collections.abc import Callable
from typing import Any

from msgspec.msgpack import Decoder

from moe_rl.messages import Channel, Message, decoder
from moe_rl.tasks.reward_arguments import RewardParameters
from moe_rl.tasks.worker_side import limit_resources, open_channel, resolve, sentence

_MAX_FILE_BYTES = 64 << 20


class RewardFunction(Message, frozen=True):
    """Describes what to import. settings: None for the function itself, otherwise arguments of a callable that returns
    it.

    batched: whether each argument is a list with one item per row.
    """

    path: str
    settings: dict[str, Any] | None
    batched: bool


class Load(Message, frozen=True):
    """Sent by the pool first: what to import, and how much address space the worker may map."""

    sys_path: list[str]
    functions: dict[str, RewardFunction]
    memory_limit_bytes: int


class Call(Message, frozen=True):
    """Sent by the pool: call one reward function. Each row is a JSON object of only the arguments that it names. A
    function that is not batched gets one row.
    """

    reward: str
    rows: list[bytes]


class Begun(Message, frozen=True):
    """Sent by the worker: this call begins now. Before the first call: the import of this function begins now."""

    reward: str


class Loaded(Message, frozen=True):
    """Sent by the worker: all functions are imported, and have these parameters."""

    parameters: dict[str, RewardParameters]


class Unusable(Message, frozen=True):
    """Sent by the worker: {reward name: why its function cannot be used}."""

    problems: dict[str, str]


class Returned(Message, frozen=True):
    """Sent by the worker: for each row the number, or the reason why there is none. no_memory: one is a MemoryError."""

    values: list[float | str]
    no_memory: bool = False


class Raised(Message, frozen=True):
    """Sent by the worker: the function raised an exception, or returned a wrong value. no_memory: a MemoryError."""

    detail: str
    no_memory: bool = False


QUESTIONS: Decoder[Load | Call] = decoder(Load | Call)
Answer = Begun | Loaded | Unusable | Returned | Raised
ANSWERS: Decoder[Answer] = decoder(Answer)


class _Function:
    """Holds a loaded reward function."""

    def __init__(self, load: RewardFunction):
        """Import the function.

        Raises:
            ValueError: with a message for the user. Exceptions of the imported module pass through.
        """
        self._batched = load.batched
        named: Any = resolve(load.path)
        self._function: Callable[..., object] = named if load.settings is None else named(**load.settings)
        self.parameters = _parameters(load.path, self._function)

    def __call__(self, rows: list[dict[str, Any]], runner: asyncio.Runner) -> Returned | Raised:
        arguments = {name: [row[name] for row in rows] for name in rows[0]} if self._batched else rows[0]
        value = self._function(**arguments)
        if inspect.isawaitable(value):
            value = runner.run(_wait_for(value))
        if not self._batched:
            return Returned([_number(value)])
        if not isinstance(value, list | tuple) or len(value) != len(rows):
            got = f"{len(value)} items" if isinstance(value, list | tuple) else type(value).__name__
            return Raised(f"returned {got}, expected a list of {len(rows)} numbers")
        return Returned([_number(reward) for reward in value], any(isinstance(item, MemoryError) for item in value))


async def _wait_for(awaitable: Any) -> object:
    return await awaitable


def _number(value: object) -> float | str:
    """Return a reward as float, or the reason why it is not one."""
    if isinstance(value, BaseException):
        return sentence(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except Exception as error:
            return f"raised {sentence(error)}"
    return f"returned {type(value).__name__}, expected a finite number"


def main(socket_fd: int, parent_pid: int) -> None:
    channel = open_channel(socket_fd, parent_pid, QUESTIONS)
    pid = os.getpid()
    runner = asyncio.Runner()  # one event loop for all calls, so that a function may keep its connections
    try:
        load = channel.receive()
        assert isinstance(load, Load)  # the pool sends Load first, and only calls after it
        limit_resources(load.memory_limit_bytes, _MAX_FILE_BYTES)
        sys.path[:] = load.sys_path
        answer: Answer
        functions, answer = _load(channel, load.functions)
        del load
        while True:
            channel.send(answer)
            call = channel.receive()
            assert isinstance(call, Call)
            channel.send(Begun(call.reward))
            answer = _answer(functions[call.reward], call, runner)
            if os.getpid() != pid:  # a child that the function forked has returned into this loop
                os._exit(1)
    except EOFError:  # the pool has closed the socket
        return


def _load(channel: Channel, functions: dict[str, RewardFunction]) -> tuple[dict[str, _Function], Unusable | Loaded]:
    loaded, problems = {}, {}
    for reward, function in functions.items():
        channel.send(Begun(reward))
        try:
            loaded[reward] = _Function(function)
        except ValueError as error:
            problems[reward] = str(error)
        except BaseException as error:  # importing runs user code, which may raise anything, even SystemExit
            problems[reward] = f"importing {function.path} raised {sentence(error)}"
    if problems:
        return loaded, Unusable(problems)
    return loaded, Loaded({reward: function.parameters for reward, function in loaded.items()})


def _parameters(path: str, function: Callable[..., object]) -> RewardParameters:
    """Return the parameters that can be given by name. Raises ValueError for a positional one without a default."""
    needed, optional, others = [], [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            others |= parameter.kind is parameter.VAR_KEYWORD
        elif parameter.default is not parameter.empty:
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                optional.append(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{path} has the parameter {parameter.name!r}, which cannot be given by name")
        else:
            needed.append(parameter.name)
    return RewardParameters(tuple(needed), tuple(optional), others)


def _answer(function: _Function, call: Call, runner: asyncio.Runner) -> Returned | Raised:
    try:
        return function([json.loads(row) for row in call.rows], runner)
    except BaseException as error:  # any exception, even SystemExit, fails only this call
        return Raised(f"raised {sentence(error)}", isinstance(error, MemoryError))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
