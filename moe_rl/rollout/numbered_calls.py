"""Makes several numbered calls to a child process at once; a thread hands every reply to its caller."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

from moe_rl.errors import EngineError
from moe_rl.messages import Message
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.types import Completion
from moe_rl.vllm import wire

_Hears = Callable[[list[tuple[int, Completion]]], None]


class NumberedCalls:
    """Sends numbered calls to a started child, and receives on its own thread while any call is pending.

    If the child dies, hangs or sends an invalid reply, every pending call fails with that error.
    """

    def __init__(self, child: ChildProcess):
        self._child = child
        self._numbers = itertools.count()
        # Guards the state shared by the receiving thread and the callers. It is not held while a call is sent: the
        # child may not read until its own reply has been read.
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[Future[Message], _Hears]] = {}
        self._receiver: threading.Thread | None = None

    def submit(self, call: wire.Call, hears: _Hears = lambda completions: None) -> tuple[int, Future[Message]]:
        """Send a call. Returns its number, and the future that gets its reply or SamplerGone.

        hears: called on the receiving thread with the completions that have ended, see wire.RequestsEnded.
        """
        answer: Future[Message] = Future()
        answer.set_running_or_notify_cancel()  # the caller can no longer cancel it
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer, hears
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive, name="replies of the engine", daemon=True)
                self._receiver.start()
        self._send(wire.Numbered(number, call))
        return number, answer

    def leave(self, number: int) -> None:
        """End a Generate call early, see wire.Leave."""
        with self._lock:
            known = number in self._waiting
        if known:
            self._send(wire.Leave(number))

    def _send(self, message: Message) -> None:
        with self._sending:
            self._child.send(message)

    def _receive(self) -> None:
        """Hand out replies while calls wait for them."""
        while True:
            try:
                message = self._child.receive()
                numbered = isinstance(message, wire.Answered | wire.RequestsEnded)
                with self._lock:
                    call = self._waiting.get(message.number) if numbered else None
                if call is None:
                    raise self._child.broken("sent an invalid frame", type(message).__name__)
            except EngineError as error:
                with self._lock:
                    left, self._waiting, self._receiver = self._waiting, {}, None
                for answer, _ in left.values():
                    answer.set_exception(error)
                return
            answer, hears = call
            if isinstance(message, wire.RequestsEnded):
                hears(message.completions)
                continue
            with self._lock:
                del self._waiting[message.number]
                if last := not self._waiting:
                    self._receiver = None
            answer.set_result(message.reply)
            if last:
                return
