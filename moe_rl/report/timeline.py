"""Writes and reads `timeline.jsonl`: what samplers, verifiers and trainers did in a run and when, one interval a line.

A side that does nothing has no interval: it waits. In a synchronous run each side waits while another one works.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

from moe_rl.report.json_lines import StepFile, read_lines

FILE = "timeline.jsonl"
Side = Literal["sampler", "verifier", "trainer"]
WEIGHTS = "sync"  # new weights travel: samplers and trainers take part
_SHORTEST = 1e-3  # seconds

SIDES: dict[str, tuple[Side, ...]] = {
    "sample": ("sampler",),
    "reward": ("verifier",),
    "sleep": ("sampler",),
    "eval": ("sampler",),
    "placement": ("trainer",),
    "routes": ("trainer",),
    "logprobs": ("trainer",),
    "train": ("trainer",),
    "checkpoint": ("trainer",),
    "export": ("trainer",),
    WEIGHTS: ("sampler", "trainer"),
}
"""The sides of each part of a step. The names are those of the metrics time/<name>. Where a batch is sampled at once,
"reward" begins when its last completion has ended, and earlier verdicts are part of "sample"."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Describes what a side did from `begin` to `end`, in seconds since 1970.

    Attributes:
        what: a key of SIDES.
        step: the step that was under way, or the next one.
    """

    side: Side
    what: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Window:
    """Describes the time of one step: from the end of the last weight transfer, or of a restart, to the end of its own.

    Attributes:
        busy: seconds in which each side did something, transfers of weights included.
    """

    step: int
    begin: float
    end: float
    busy: dict[Side, float]

    def idle(self, side: Side) -> float:
        """Return the share of the time in which a side did nothing."""
        return 1 - self.busy[side] / (self.end - self.begin)


class Timeline(StepFile[Interval]):
    """Appends to timeline.jsonl of a run. It lives on one rank.

    Attributes:
        step: the step that is under way, or the next one.
    """

    def __init__(self, run_dir: Path):
        super().__init__(run_dir / FILE, Interval, "the time line of the run")
        self.step = 1
        self._epoch = time.time() - time.perf_counter()

    def add(self, what: str, begin: float, end: float) -> None:
        """Append what went on from `begin` to `end`. Left out is what is of no side, or shorter than a millisecond.

        begin, end: of time.perf_counter, which all processes of a host share.
        """
        sides = SIDES.get(what, ())
        if sides and end - begin >= _SHORTEST:
            begin, end = (round(self._epoch + at, 6) for at in (begin, end))
            self.write(Interval(side, what, begin, end, self.step) for side in sides)

    def rewind(self, step: int) -> None:
        """Go on with `step`: drop the intervals of it and of later steps."""
        super().rewind(step)
        self.step = step


def read_timeline(run_dir: Path) -> list[Interval]:
    """Read timeline.jsonl of a run, in the order written. Raises MoeRLError, naming the line, if one is damaged."""
    return read_lines(Path(run_dir) / FILE, Interval)


def windows(intervals: Sequence[Interval]) -> list[Window]:
    """Cut a run into the steps that have ended. The time between two processes of the run belongs to none of them."""
    by_step: dict[int, list[Interval]] = {}
    for one in intervals:
        by_step.setdefault(one.step, []).append(one)
    merged: dict[Side, list[tuple[float, float]]] = {
        side: _merged(one for one in intervals if one.side == side) for side in get_args(Side)
    }
    found, reached = [], float("-inf")
    for step in sorted(by_step):
        begin = max(reached, min(one.begin for one in by_step[step]))
        end = max((one.end for one in by_step[step] if one.what == WEIGHTS), default=begin)
        if end > begin:
            reached = end
            busy = {side: _within(spans, begin, end) for side, spans in merged.items()}
            found.append(Window(step, begin, end, busy))
    return found


def idle_share(found: Sequence[Window], side: Side) -> float:
    """Return the share of the time of these steps in which a side did nothing."""
    return 1 - sum(one.busy[side] for one in found) / sum(one.end - one.begin for one in found)


def _merged(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Return the union of intervals as intervals that do not meet, in order."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((one.begin, one.end) for one in intervals):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _within(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between two times that lie in these spans, which `_merged` made."""
    first, last = bisect_right(spans, begin, key=itemgetter(1)), bisect_left(spans, end, key=itemgetter(0))
    return sum(min(end, to) - max(begin, since) for since, to in spans[first:last])
