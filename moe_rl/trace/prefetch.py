"""Reading ahead: records that will be asked for soon, read by a background thread into bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from moe_rl.trace.record import RouteRecord
from moe_rl.types import RouteRef

Key = tuple[RouteRef, tuple[int, ...] | None]


class Prefetcher:
    """Reads the records of one plan in order, until `limit` bytes are ahead of those that were taken.

    A new plan replaces the old one. Every record of it is handed out once. What could not be read is left to the
    caller, who then gets the error where it can be dealt with. read: called as read(ref, layers=layers); it may ask
    take() first, as for any other caller.
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
        """Begin to read these in the background; none: only drop what was read ahead."""
        with self._lock:
            self._plan += 1
            self._todo, self._layers = dict.fromkeys(refs), layers
            self._ahead, self._bytes, self._running = {}, 0, False
            self._go()

    def take(self, ref: RouteRef, layers: tuple[int, ...] | None) -> RouteRecord | None:
        """The record if it was read ahead, or is being read by another thread than this; else None."""
        if getattr(self._thread, "reads_ahead", False):
            return None
        with self._lock:
            plan, future = self._ahead.pop((ref, layers), (0, None))
            if layers == self._layers:
                self._todo.pop(ref, None)  # the caller was faster
        record = future.result() if future is not None else None
        if record is not None:
            with self._lock:
                if plan == self._plan:
                    self._bytes -= record.routes.nbytes
                    self._go()
        return record

    def _go(self) -> None:
        """Have a thread if there is work and room; it ends when there is not, so none is left waiting."""
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
            except Exception:  # the reader that asks for it will meet it again
                with self._lock:
                    if plan == self._plan:
                        self._ahead.pop(key, None)
            else:
                with self._lock:
                    if plan == self._plan:
                        self._bytes += record.routes.nbytes
            finally:
                future.set_result(record)
