"""Keeps reads and writes of the KV slots in the order in which vLLM decided them, while copies are in flight.

On an accelerator a step's experts reach the host after vLLM's next decisions. Each read or write of slots is queued,
and done once all earlier ones are done and its own copy has arrived.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from moe_rl.vllm.slots import BlockTable, SlotTable

# Steps whose copies may be in flight before the next step waits; this bounds memory.
_MAX_STEPS_IN_FLIGHT = 4
# A step takes the rows of one request, and of more until this time has passed.
_TAKING_SECONDS = 1e-3


@dataclass(slots=True)
class Allotted:
    """Lists the blocks that one step allots. `fresh` go to new owners; `grown` are tables with their new blocks."""

    fresh: list[int] = field(default_factory=list)
    grown: list[tuple[BlockTable, list[int]]] = field(default_factory=list)

    def add(self, table: BlockTable, blocks: list[int], hits: int) -> None:
        """Record blocks for a request. It shares the first `hits` of them with their current owner."""
        self.fresh += blocks[hits:]
        self.grown.append((table, blocks))

    def apply(self, slots: SlotTable) -> None:
        """Register all new owners, then extend the tables: a request may share a block that another gets in this
        step."""
        slots.give(self.fresh)
        for table, blocks in self.grown:
            slots.extend(table, blocks)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Holds a finished request whose rows are still in their slots.

    Several requests may finish in one step. Taking all their rows would delay the step, so a step takes those of one
    request, of more only within a millisecond, and of the others only if their blocks get new owners.
    """

    sink: str
    blocks: frozenset[int]
    take: Callable[[], None]


class SlotJournal:
    """Holds the pending reads and writes.

    Args:
        stats: `waits` is incremented for each wait for a copy.
    """

    def __init__(self, stats: Counter[str]):
        self._stats = stats
        self._acts: deque[tuple[torch.Event | None, Callable[[], None]]] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._untaken: list[str] = []  # the shard of each finished request that is queued or leaving

    @property
    def copies(self) -> int:
        """Return how many copies are in flight."""
        return sum(event is not None for event, _ in self._acts)

    def add(self, act: Callable[[], None], ready: torch.Event | None = None) -> None:
        """Queue a callback to run once `ready` completes."""
        self._acts.append((ready, act))

    def give(self, allotted: Allotted, slots: SlotTable) -> None:
        """Queue a change of the owners of blocks. The rows in them are taken first."""
        self.add(partial(self._give, allotted, slots))

    def leave(self, sink: str, table: BlockTable, take: Callable[[], None]) -> None:
        """Queue the end of a request. `take` takes its rows for a shard."""
        self._untaken.append(sink)
        # The table is read late: queued changes may still give it blocks.
        self.add(lambda: self._leaving.append(_Leaving(sink, frozenset(table.blocks), take)))

    def awaits(self, sink: str) -> bool:
        """Return whether rows for a shard are still to be taken."""
        return sink in self._untaken

    def work_off(self, *, wait: bool = False) -> None:
        """Run the callbacks that are ready, in order. Wait for copies if `wait` is set or too many are in flight.

        Then take the rows of finished requests: of all of them if `wait` is set, else for a short time.
        """
        while self._acts:
            ready, act = self._acts[0]
            if ready is not None and not ready.query():
                if not wait and self.copies <= _MAX_STEPS_IN_FLIGHT:
                    break
                self._stats["waits"] += 1
                ready.synchronize()
            self._acts.popleft()
            act()
        ends = time.perf_counter() + _TAKING_SECONDS
        self._take(len(self._leaving) if wait else 1)
        while self._leaving and time.perf_counter() < ends:
            self._take(1)

    def _give(self, allotted: Allotted, slots: SlotTable) -> None:
        lose = [index for index, leaving in enumerate(self._leaving) if not leaving.blocks.isdisjoint(allotted.fresh)]
        self._take(lose[-1] + 1 if lose else 0)
        allotted.apply(slots)

    def _take(self, most: int) -> None:
        """Take the rows of finished requests, in order."""
        for _ in range(min(most, len(self._leaving))):
            leaving = self._leaving.popleft()
            self._untaken.remove(leaving.sink)
            leaving.take()
