"""The verifier process: imports the reward functions and calls them, one at a time, for a `VerifierPool`.

Started as `python -m moe_rl.tasks.verifier_worker SOCKET_FD PARENT_PID`, in a session of its own. It reads one call at
a time and never ahead, so that while a function runs, this process holds no more of the task than the function was
given.
"""

from __future__ import annotations

import ctypes
import numbers
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from moe_rl.tasks import frames
from moe_rl.tasks.reward_functions import resolve

_PR_SET_PDEATHSIG = 1
_MAX_FILE_BYTES = 64 << 20
_MAX_DETAIL = 500


def _die_with(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it was gone before the signal was asked for
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


def _receive(channel: socket.socket) -> frames.Setup | frames.Call | None:
    """The next frame; None when the pool has closed its end."""
    header = _exactly(channel, 4)
    body = header and _exactly(channel, frames.length_of(header))
    return frames.decode_question(body) if body else None


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _sentence(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose own str() raises
        text = type(error).__name__
    return text.encode("ascii", "backslashreplace").decode("ascii")[:_MAX_DETAIL]


def _load(channel: socket.socket, functions: dict[str, str]) -> tuple[dict[str, Callable[..., object]], frames.Answer]:
    loaded, arguments, problems = {}, {}, {}
    for reward, path in functions.items():
        channel.sendall(frames.encode(frames.Started(-1, reward)))
        try:
            loaded[reward], arguments[reward] = resolve(path)
        except ValueError as error:
            problems[reward] = str(error)
        except BaseException as error:  # importing runs user code, which may raise anything, SystemExit included
            problems[reward] = f"importing {path} raised {_sentence(error)}"
    return loaded, frames.Refused(problems) if problems else frames.Ready(arguments)


def _answer(function: Callable[..., object], call: frames.Call) -> frames.Returned | frames.Failed:
    try:
        value = function(**call.arguments)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return frames.Returned(call.item, call.reward, float(value))
        detail = f"returned {type(value).__name__}, expected a finite number"
    except BaseException as error:  # whatever it raises, SystemExit included, is this call's failure and no one else's
        detail = f"raised {_sentence(error)}"
    return frames.Failed(call.item, call.reward, detail)


def main(socket_fd: int, parent_pid: int) -> None:
    _die_with(parent_pid)
    # Schedulers send it to every process of a job: the trainer says when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(socket_fd, False)
    channel = socket.socket(fileno=socket_fd)
    setup = _receive(channel)
    if setup is None:
        return
    _limit(setup.memory_limit_bytes)
    sys.path[:] = setup.sys_path
    functions, answer = _load(channel, setup.functions)
    channel.sendall(frames.encode(answer))
    del setup
    pid = os.getpid()
    while (call := _receive(channel)) is not None:
        channel.sendall(frames.encode(frames.Started(call.item, call.reward)))
        answer = _answer(functions[call.reward], call)
        if os.getpid() != pid:  # a child that the function forked and let run on into this loop
            os._exit(1)
        channel.sendall(frames.encode(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
