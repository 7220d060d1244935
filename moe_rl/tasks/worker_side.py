"""Provides the worker's side of `WorkerProcess`: its channel, its limits, and its error messages."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import signal
import socket
from collections.abc import Callable

import msgspec

from moe_rl.messages import Channel, Message
from moe_rl.parent import belong_to

_MAX_DETAIL = 500


def open_channel[Incoming: Message](
    socket_fd: int, parent_pid: int, questions: msgspec.msgpack.Decoder[Incoming]
) -> Channel[Incoming]:
    """Return the channel to the parent, and make this process end with it."""
    belong_to(parent_pid)
    # Programs started by this process would inherit an ignored SIGTERM, so they could not be asked to end. A handler is
    # not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_inheritable(socket_fd, False)
    return Channel(socket.socket(fileno=socket_fd), questions)


def limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """Limit this process and those that it starts: address space, file size, and no core dumps."""
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def resolve(path: str) -> Callable[..., object]:
    """Import a callable. Raises ValueError with a message for the user; exceptions of the module pass through."""
    module_name, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module_name), name, None)
    if function is None:
        raise ValueError(f"module {module_name} has no {name!r}")
    if not callable(function):
        raise ValueError(f"{path} is not callable: got {type(function).__name__}")
    return function


def sentence(error: BaseException) -> str:
    """Return the type and text of an exception in ASCII, cut to a message's length. Names the limit of
    `limit_resources` that the process has hit."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # str(exception) itself may raise
        text = type(error).__name__
    return text.encode("ascii", "backslashreplace").decode("ascii")[:_MAX_DETAIL] + _limit_met(error)


def _limit_met(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f" (here a file may have at most {resource.getrlimit(resource.RLIMIT_FSIZE)[0] >> 20} MiB)"
    if isinstance(error, MemoryError):
        return f" (here a process may map at most {resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MiB of memory)"
    return ""
