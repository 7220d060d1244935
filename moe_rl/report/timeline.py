"""Writes and reads `timeline.jsonl`: when samplers, verifiers and trainers did what in a run, one interval per line.

A waiting side has no interval. In a synchronous run each side waits while another works.
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
WEIGHTS = "sync"  # transfer of new weights: occupies samplers and trainers
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
"""The sides of each part of a step. The names are those of the metrics time/<name>. If a batch is sampled at once,
"reward" begins when its last completion has ended, and earlier verdicts are part of "sample"."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Describes a side's work from `begin` to `end`, in seconds since 1970.

    Attributes:
        what: a key of SIDES.
        step: the step that was running, or the next one.
    """

    side: Side
    what: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Window:
    """Describes the time of one step: from the end of the previous weight transfer, or of a restart, to the end of its
    own.

    Attributes:
        busy: seconds in which each side did something, transfers of weights included.
    """

    step: int
    begin: float
    end: float
    busy: dict[Side, float]

    def idle(self, side: Side) -> float:
        """Return the share of the time in which a side was idle."""
        return 1 - self.busy[side] / (self.end - self.begin)


class Timeline(StepFile[Interval]):
    """Appends to timeline.jsonl of a run. It lives on one rank.

    Attributes:
        step: the current step, or the next one.
    """

    def __init__(self, run_dir: Path):
        super().__init__(run_dir / FILE, Interval, "the time line of the run")
        self.step = 1
        self._epoch = time.time() - time.perf_counter()

    def add(self, what: str, begin: float, end: float) -> None:
        """Append an interval from `begin` to `end`, unless it belongs to no side or is shorter than a millisecond.

        begin, end: times of time.perf_counter, which all processes of a host share.
        """
        sides = SIDES.get(what, ())
        if sides and end - begin >= _SHORTEST:
            begin, end = (round(self._epoch + moment, 6) for moment in (begin, end))
            self.write(Interval(side, what, begin, end, self.step) for side in sides)

    def rewind(self, step: int) -> None:
        """Continue with `step`: drop its intervals and those of later steps."""
        super().rewind(step)
        self.step = step


def read_timeline(run_dir: Path) -> list[Interval]:
    """Read timeline.jsonl of a run, in the order written. Raises MoeRLError, naming the line, if one is damaged."""
    return read_lines(Path(run_dir) / FILE, Interval)


def windows(intervals: Sequence[Interval]) -> list[Window]:
    """Cut a run into its ended steps. The time between two processes of the run belongs to no step."""
    by_step: dict[int, list[Interval]] = {}
    for interval in intervals:
        by_step.setdefault(interval.step, []).append(interval)
    merged: dict[Side, list[tuple[float, float]]] = {
        side: _merged(interval for interval in intervals if interval.side == side) for side in get_args(Side)
    }
    step_windows, reached = [], float("-inf")
    for step in sorted(by_step):
        begin = max(reached, min(interval.begin for interval in by_step[step]))
        end = max((interval.end for interval in by_step[step] if interval.what == WEIGHTS), default=begin)
        if end > begin:
            reached = end
            busy = {side: _within(spans, begin, end) for side, spans in merged.items()}
            step_windows.append(Window(step, begin, end, busy))
    return step_windows


def idle_share(windows: Sequence[Window], side: Side) -> float:
    """Return the share of these steps' time in which a side was idle."""
    return 1 - sum(window.busy[side] for window in windows) / sum(window.end - window.begin for window in windows)


def _merged(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals, in order."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((interval.begin, interval.end) for interval in intervals):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _within(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between two times that are inside these spans from `_merged`."""
    first, last = bisect_right(spans, begin, key=itemgetter(1)), bisect_left(spans, end, key=itemgetter(0))
    return sum(min(end, to) - max(begin, since) for since, to in spans[first:last])
