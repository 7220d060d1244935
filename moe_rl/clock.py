"""Measures how long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures the seconds spent in named parts of a step. Using a name again adds to its time.

    Args:
        begun: Called with the name of each part as it begins.
        ended: Called with the name of each part that has ended, and its begin and end on time.perf_counter.
    """

    def __init__(
        self,
        begun: Callable[[str], None] = lambda name: None,
        ended: Callable[[str, float, float], None] = lambda name, begin, end: None,
    ):
        self.seconds: dict[str, float] = {}
        self.begun, self.ended = begun, ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.begun(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        self.ended(name, start, end)
