"""One verifier process as its pool sees it: start, send, read, kill. Nothing here waits without a bound."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import moe_rl
from moe_rl.tasks import frames

# What a verifier may know of this process's environment. An allow-list: torchrun's variables would make a verifier join
# the run, and tokens and keys are none of its business.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_READ_BYTES = 1 << 16
_TAIL_BYTES = 2048
_KILL_SECONDS = 10.0


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return kept | {
        "PYTHONPATH": str(Path(moe_rl.__file__).parents[1]),
        "PYTHONHASHSEED": "0",  # a verifier that walks a set must give the same verdict in every run
        "OMP_NUM_THREADS": "1",
    }


class WorkerProcess:
    """A child running `moe_rl.tasks.verifier_worker`, the socket to it and the last of what it printed."""

    def __init__(self, setup: frames.Setup):
        self._buffer = frames.AnswerBuffer()
        self._unsent = bytearray()
        self._tail = bytearray()
        self.channel, theirs = socket.socketpair()
        self.output, their_output = os.pipe()
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
            self.channel.close()
            os.close(self.output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        self.pid = self._process.pid
        # The socket's end is not enough to know that the process died: a child that it forked may hold a copy.
        self.pidfd = os.pidfd_open(self.pid)
        self.channel.setblocking(False)
        os.set_blocking(self.output, False)
        self.send(frames.encode(setup))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Queue encoded frames and send what the socket takes now."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        # A dead worker is noticed by its pidfd, which also says how it died.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self.channel.send(self._unsent)]

    def read(self) -> tuple[list[frames.Answer], bool]:
        """The frames that are there now, and whether the worker has closed its end. ValueError for a bad frame."""
        answers: list[frames.Answer] = []
        while True:
            try:
                data = self.channel.recv(_READ_BYTES)
            except BlockingIOError:
                return answers, False
            except ConnectionError:
                return answers, True
            if not data:
                return answers, True
            answers += self._buffer.feed(data)

    def drain_output(self) -> bool:
        """Take some of what the verifiers printed and keep the end of it; False when there will be no more."""
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return True
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def tail(self) -> str:
        """The last of what the verifiers printed, on one line of ASCII."""
        with contextlib.suppress(BlockingIOError):
            self._tail = (self._tail + os.read(self.output, _READ_BYTES))[-_TAIL_BYTES:]
        text = self._tail.decode("utf-8", "replace").encode("ascii", "backslashreplace").decode("ascii")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())

    def kill(self) -> str:
        """Kill the process group, reap the worker, say how it ended. Once."""
        # Its pid names the group until it is reaped, so the kill comes first, even when the worker is already dead:
        # what it forked is in the group too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait(_KILL_SECONDS)
        return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"

    def close(self) -> None:
        """Close this side's descriptors. After `kill`."""
        self.channel.close()
        os.close(self.output)
        os.close(self.pidfd)
