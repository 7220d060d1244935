"""Works in parallel to the engine's steps: in one thread, in order of submission, with bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class WritingThread:
    """Runs one piece of work after another in its own thread.

    Attributes:
        waits: how often a caller had to wait for room.

    Args:
        limit: bytes that waiting work may hold. A larger piece waits until no other work is left.
    """

    def __init__(self, limit: int):
        self._limit, self._bytes, self.waits = limit, 0, 0
        self._room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "trace-writing")  # starts its thread at the first piece of work

    def submit[T](self, work: Callable[[], T], size: int) -> Future[T]:
        """Run `work`, which holds `size` bytes, after all earlier work. Waits until there is room for it."""

        def there_is_room() -> bool:
            return not self._bytes or self._bytes + size <= self._limit

        with self._room:
            if not there_is_room():
                self.waits += 1
                self._room.wait_for(there_is_room)
            self._bytes += size
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self._leave(size))
        return future

    def _leave(self, size: int) -> None:
        with self._room:
            self._bytes -= size
            self._room.notify()
