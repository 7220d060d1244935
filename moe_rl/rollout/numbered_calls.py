"""Makes several calls to a child process at once: each has a number, and a thread hands every reply to its caller."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

from moe_rl.errors import EngineError
from moe_rl.messages import Message
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.vllm import wire


class NumberedCalls:
    """Sends numbered calls to a child that was started, and receives on a thread of its own while any is under way.

    If the child dies, hangs or sends nonsense, every call under way fails with the error that says so.
    """

    def __init__(self, child: ChildProcess):
        self._child = child
        self._numbers = itertools.count()
        # Held while sending, and for what the receiving thread shares with the callers.
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Message]] = {}
        self._hears: dict[int, Callable[[int], None]] = {}
        self._receiver: threading.Thread | None = None

    def submit(self, call: wire.Call, hears: Callable[[int], None] | None = None) -> tuple[int, Future[Message]]:
        """Send a call. Returns its number, and the future that gets its reply or SamplerGone.

        hears: called on the receiving thread with the number of requests that have ended, see wire.RequestsEnded.
        """
        answer: Future[Message] = Future()
        answer.set_running_or_notify_cancel()  # who waits for it can no longer cancel it
        with self._lock:
            number = next(self._numbers)
            self._child.send(wire.Numbered(number, call))
            self._waiting[number] = answer
            if hears is not None:
                self._hears[number] = hears
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive, name="replies of the engine", daemon=True)
                self._receiver.start()
        return number, answer

    def leave(self, number: int) -> None:
        """Have a Generate call end early, see wire.Leave."""
        with self._lock:
            if number in self._waiting:
                self._child.send(wire.Leave(number))

    def _receive(self) -> None:
        """Hand out replies for as long as calls wait for them."""
        while True:
            try:
                message = self._child.receive()
                if isinstance(message, wire.RequestsEnded):
                    if (hears := self._hears.get(message.number)) is not None:
                        hears(message.requests)
                    continue
                if not isinstance(message, wire.Answered):
                    raise self._child.broken("sent an invalid frame", type(message).__name__)
            except EngineError as error:
                with self._lock:
                    left, self._waiting, self._receiver = self._waiting, {}, None
                    self._hears.clear()
                for answer in left.values():
                    answer.set_exception(error)
                return
            with self._lock:
                answer = self._waiting.pop(message.number)
                self._hears.pop(message.number, None)
                if last := not self._waiting:
                    self._receiver = None
            answer.set_result(message.reply)
            if last:
                return
