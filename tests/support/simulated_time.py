"""Runs coroutines in simulated time: a sleep takes none, and what happens at one time happens in one order."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _NoWait(selectors.DefaultSelector):
    """Passes the time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None):
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing will ever happen again")
        if not found:
            self.now += max(0.0, timeout or 0.0)
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that is due."""

    def __init__(self):
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does, in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
