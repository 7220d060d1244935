"""Says what this process is at. A watching thread tells the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Whereabouts:
    """Names the microbatch and layer whose forward pass began last, also a recomputed one; None outside of passes.

    moves: how often anything has begun. While it stays the same, the process computes one thing, or waits.
    listener: is called with the number of each microbatch that begins, and with None where something else does.
    """

    microbatch: int | None = None
    layer: int | None = None
    moves: int = 0
    listener: Callable[[int | None], None] | None = None

    def begin_microbatch(self, number: int) -> None:
        """Note that the pass of a microbatch begins."""
        self.microbatch, self.layer = number, None
        self._move()

    def begin_layer(self, number: int) -> None:
        """Note that a layer begins. `number` is global and counts from 0."""
        self.layer = number
        self.moves += 1

    def leave(self) -> None:
        """Note that something begins that has no microbatches."""
        self.microbatch = self.layer = None
        self._move()

    def _move(self) -> None:
        self.moves += 1
        if self.listener is not None:
            self.listener(self.microbatch)


HERE = Whereabouts()
"""What this process is at."""
