"""Runs a user's code in a child process: starts it, talks to it within time limits, and ends everything it started.

The process boundary contains accidents, not attacks: the code is the user's own. Ending a worker also ends its process
group and, even if they left it, all processes that were started with its mark in their environment. Only a process that
leaves the group and clears that environment survives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import moe_rl
from moe_rl.messages import Channel, Message
from moe_rl.parent import kill_marked, mark_children

_KILL_SECONDS = 10.0
_READ_BYTES = 1 << 16
# Environment variables that a worker may see. This is an allow-list: with torchrun's variables it would join the run,
# and it must not see tokens and keys.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


class WorkerProcess[Answer: Message]:
    """Holds a child process that runs one of our worker modules, its channel, and the end of its output.

    The kernel kills the worker when the thread that started it ends.

    Args:
        module: run as `python -m MODULE SOCKET_FD PARENT_PID`, in its own session.
        answers: decodes its messages.
        longest: largest answer in bytes.
        tail_bytes: how much of the end of its output is kept.
        python: interpreter to run it with; None: this one. Another one needs the packages that the module imports, and
            moe_rl itself unless that is a checkout.

        variables: names of further environment variables that it may see.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        module: str,
        answers: msgspec.msgpack.Decoder[Answer],
        *,
        longest: int,
        tail_bytes: int,
        python: Path | None = None,
        variables: Sequence[str] = (),
    ):
        self._tail, self._tail_bytes = b"", tail_bytes
        environment = _environment(python, variables)
        self._mark = mark_children(environment)
        our_socket, their_socket = socket.socketpair()
        self._output, their_output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [str(python or sys.executable), "-P", "-u", "-X", "faulthandler", "-m", module]
                + [str(their_socket.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                env=environment,
                pass_fds=[their_socket.fileno()],
                start_new_session=True,
            )
        except BaseException:
            our_socket.close()
            os.close(self._output)
            raise
        finally:
            their_socket.close()
            os.close(their_output)
        self.pid = self._process.pid
        # A closed socket is not enough to detect the end of the process, because its forked children may keep it open.
        self._pidfd = os.pidfd_open(self.pid)
        self._channel = Channel(our_socket, answers, longest)
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        for file in (our_socket, self._output, self._pidfd):
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
        """Read some of the worker's output and keep its end. Return False at the end of the output."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-self._tail_bytes :]
        return bool(data)

    def end(self) -> None:
        """Kill the process group."""
        # The pid names the group until the worker is reaped, even if it is already dead: its forked processes are in
        # the group too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> tuple[str, str]:
        """Kill the process group and all marked processes, reap the worker and close this side.

        Returns:
            How it ended, and the end of its output in ASCII.
        """
        self.end()
        code = self._process.wait(_KILL_SECONDS)
        kill_marked(self._mark)
        self._drain()
        self._channel.socket.close()
        os.close(self._output)
        os.close(self._pidfd)
        text = self._tail.decode("utf-8", "replace").encode("ascii", "backslashreplace").decode("ascii")
        return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}", text


def _environment(python: Path | None, variables: Sequence[str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*_ENVIRONMENT, *variables) if name in os.environ}
    home = Path(moe_rl.__file__).parents[1]
    if python is None or not home.is_relative_to(sys.prefix):  # another interpreter must not see our packages
        kept["PYTHONPATH"] = str(home)
    return kept | {
        "PYTHONHASHSEED": "0",  # code that iterates over a set must give the same result in every run
        "OMP_NUM_THREADS": "1",
    }
