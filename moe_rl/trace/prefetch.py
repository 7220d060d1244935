"""Reads records ahead of time, in a background thread, into bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from moe_rl.trace.record import RouteRecord
from moe_rl.types import RouteRef

Key = tuple[RouteRef, tuple[int, ...] | None]


class Prefetcher:
    """Reads the records of one plan in order, and pauses while `limit` bytes wait to be taken.

    A new plan replaces the old one. Every record is handed out once. A record that could not be read is left to the
    caller, which then sees the error itself. `read` is called as read(ref, layers=layers); like any caller, it may call
    take() first.
    """

    def __init__(self, read: Callable[..., RouteRecord], limit: int):
        self._read, self._limit = read, limit
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._plan = self._bytes = 0
        self._running = False
        self._todo: dict[RouteRef, None] = {}
        self._layers: tuple[int, ...] | None = None
        self._ahead: dict[Key, tuple[int, Future[RouteRecord | None]]] = {}

    def start(self, refs: Iterable[RouteRef], layers: tuple[int, ...] | None) -> None:
        """Start to read these records in the background; an empty plan only drops what was read ahead."""
        with self._lock:
            self._plan += 1
            self._todo, self._layers = dict.fromkeys(refs), layers
            self._ahead, self._bytes, self._running = {}, 0, False
            self._go()

    def take(self, ref: RouteRef, layers: tuple[int, ...] | None) -> RouteRecord | None:
        """Return the record if it was read ahead, or is being read by another thread; else None."""
        if getattr(self._thread, "reads_ahead", False):
            return None
        with self._lock:
            plan, future = self._ahead.pop((ref, layers), (0, None))
            if layers == self._layers:
                self._todo.pop(ref, None)  # the caller reads the record itself
        record = future.result() if future is not None else None
        if record is not None:
            with self._lock:
                if plan == self._plan:
                    self._bytes -= record.routes.nbytes
                    self._go()
        return record

    def _go(self) -> None:
        """Start a thread if there is work and room. The thread ends when there is neither, so no thread ever waits."""
        if self._todo and self._bytes < self._limit and not self._running:
            self._running = True
            threading.Thread(target=self._run, args=(self._plan,), name="trace-prefetch", daemon=True).start()

    def _run(self, plan: int) -> None:
        self._thread.reads_ahead = True
        while True:
            with self._lock:
                if plan != self._plan:
                    return
                if not self._todo or self._bytes >= self._limit:
                    self._running = False
                    return
                ref = next(iter(self._todo))
                del self._todo[ref]
                layers = self._layers
                key = (ref, layers)
                future: Future[RouteRecord | None] = Future()
                self._ahead[key] = (plan, future)
            record = None
            try:
                record = self._read(ref, layers=layers)
            except Exception:  # the caller gets the error when it reads the record itself
                with self._lock:
                    if plan == self._plan:
                        self._ahead.pop(key, None)
            else:
                with self._lock:
                    if plan == self._plan:
                        self._bytes += record.routes.nbytes
            finally:
                future.set_result(record)
