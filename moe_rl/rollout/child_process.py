"""Runs a module of this package in a child process and calls it over a socket: the vLLM engine, and the pool.

The child answers each call with one reply, after any number of signs of life. It ends whenever the parent ends. A child
that ends or stops answering raises SamplerGone here.

One thread may send while another receives: see `engine.NumberedCalls`.
"""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moe_rl.errors import About, EngineError, SamplerGone, describe
from moe_rl.messages import Channel, Message
from moe_rl.vllm.process import Scratch

_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 10.0
_LOG_TAIL_LINES = 15


class ChildProcess:
    """Holds a child and the socket to it. Every call raises SamplerGone, with process and log, once it is dead or hung.

    Construction spawns the child with the socket's descriptor and this process's id as its arguments. It must happen on
    the main thread: the kernel ties the child's life to the thread that spawned it, not to the process.

    Args:
        name: the child's name in messages.
        module: what the child runs.
        log_path: file for all output of the child.
        environment: the child's environment variables.
        replies: decoder of the child's messages.
        alive: the type of its signs of life.
        silence_seconds: a child that is silent for this long during a call counts as hung.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        log_path: Path,
        environment: Mapping[str, str],
        replies: msgspec.msgpack.Decoder,
        alive: type[Message],
        silence_seconds: float,
    ):
        if threading.current_thread() is not threading.main_thread():
            raise EngineError(f"The {name} must be started from the main thread", do="start it there")
        self._name, self.log_path, self._alive, self._silence = name, log_path.absolute(), alive, silence_seconds
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # A killed child cannot remove its temporary files, so this process removes their folder.
        self._scratch = Scratch()
        parent_end, child_end = socket.socketpair()
        with child_end, open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(child_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": self._scratch.name},
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        parent_end.settimeout(silence_seconds)
        self._channel: Channel[Any] = Channel(parent_end, replies)
        self._failure = ""
        self._ending = threading.Lock()
        self._ready = False
        self.pid: int = self._process.pid

    def send(self, call: Message) -> None:
        """Send a call whose reply `receive` will return."""
        self._exchange(lambda _: self._channel.send(call), None)

    def receive(self) -> Any:
        """Return the next reply. `silence_seconds` limits the silence before it."""
        return self._exchange(lambda limit: self._received(limit, signs=True), None)

    def started(self, ready: type[Message], seconds: float) -> Any:
        """Return the reply to the first call, within `seconds`. A reply of type `ready` marks the child as ready."""
        reply = self._exchange(lambda limit: self._received(limit, signs=False), seconds)
        self._ready = isinstance(reply, ready)
        return reply

    def expect[R: Message](self, reply: Message, kind: type[R]) -> R:
        """Return a reply of the expected type. A child that sends another type is unusable."""
        if not isinstance(reply, kind):
            raise self.broken("gave the wrong answer", type(reply).__name__)
        return reply

    def alive(self) -> bool:
        """Return whether the process runs and no call has failed for good."""
        return not self._failure and self._process.poll() is None

    def broken(self, what: str, got: str) -> EngineError:
        """Record that the child is unusable, end it, and return the error.

        The error is SamplerGone only if the child was once ready: one that cannot start would fail again.
        """
        where: About = {"pid": self.pid, "log": self.log_path}
        do = "read its log and start again"
        self._failure = self._failure or describe(f"The {self._name} {what}", where=where, got=got, do=do)
        self._kill()
        kind = SamplerGone if self._ready else EngineError
        return kind(f"{self._failure}\n{_tail(self.log_path)}".rstrip())

    def desert(self) -> None:
        """Record that a call was abandoned. The child is unusable, because it still works on that call."""
        self._failure = self._failure or describe(
            f"The {self._name} was left in the middle of a call", where={"pid": self.pid}
        )

    def close(self, goodbye: Message, *, hears: bool = False) -> None:
        """End the child and everything it started. May be called at any time, and repeatedly.

        Args:
            hears: a child that was deserted in the middle of a call hears the goodbye, and gets time to leave.
        """
        patience = 0.0 if self._failure and not (hears and self._ready) else _CLOSE_SECONDS
        self._failure = self._failure or describe(f"The {self._name} was closed", where={"pid": self.pid})
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                self._channel.socket.settimeout(_POLL_SECONDS)
                self._channel.send(goodbye)
            self._channel.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self._kill()

    def _exchange(self, act: Any, seconds: float | None) -> Any:
        """Run `act` within the time limit. A failure of the child raises an error that names it."""
        if self._failure:
            raise SamplerGone(self._failure)
        limit = self._silence if seconds is None else seconds
        try:
            return act(limit)
        except TimeoutError:
            what = "was not ready in time" if seconds is not None else "hangs"
            raise self.broken(what, f"no sign of life for {limit:g} s") from None
        except (EOFError, OSError):
            raise self.broken("died", self._exit()) from None
        except ValueError as error:
            raise self.broken("sent an invalid frame", str(error)) from error
        except BaseException:
            # After an interruption, the late reply to this call would be taken for the reply to the next one.
            self.desert()
            raise

    def _received(self, limit: float, *, signs: bool) -> Any:
        """Return the next reply. With `signs`, each sign of life restarts the limit."""
        deadline = time.monotonic() + limit
        while True:
            if not select.select([self._channel.socket], [], [], _POLL_SECONDS)[0]:
                if self._process.poll() is not None:
                    raise EOFError("its process ended")
                if time.monotonic() > deadline:
                    raise TimeoutError
                continue
            reply = self._channel.receive()
            if not isinstance(reply, self._alive):
                return reply
            if signs:
                deadline = time.monotonic() + limit

    def _exit(self) -> str:
        """Describe how the process ended. Its socket closes a moment earlier."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        with self._ending:
            self._channel.socket.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._scratch.cleanup()


def _tail(log_path: Path) -> str:
    try:
        with open(log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines)
