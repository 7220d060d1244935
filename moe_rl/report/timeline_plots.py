"""Draws when samplers, verifiers and trainers worked, with a sentence on how long each side waited."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.report.figures import BLUE, GREEN, INK, PHASES, STYLE, Panel, figure_of, in_percent, line, panel
from moe_rl.report.format import duration, percent
from moe_rl.report.timeline import WEIGHTS, Interval, Side, Window, idle_share, windows

_SHOWN = 8  # steps
_COLORS = (*PHASES, ("placement", "#c46aa8"), ("sleep", "#5b6b8c"))
_ROWS: dict[Side, tuple[str, float]] = {
    "sampler": ("samplers", 2.0),
    "verifier": ("verifiers", 1.0),
    "trainer": ("trainers", 0.0),
}
_WAITING: tuple[Side, ...] = ("sampler", "trainer")  # sides whose idle time is reported


def panels(intervals: Sequence[Interval]) -> list[Panel]:
    """Return the timeline of the last steps, and the idle share of each side in all steps."""
    steps = windows(intervals)
    with matplotlib.rc_context(STYLE):
        return [_timeline(intervals, steps), _idle(steps)]


@panel("timeline", "Who worked when", "a gap is a side that waits, fewer are better", wide=True)
def _timeline(intervals: Sequence[Interval], steps: Sequence[Window]) -> str | tuple[str, Figure]:
    if not steps:
        return "No time line was written."
    last = steps[-_SHOWN:]
    begin, end = last[0].begin, last[-1].end
    shown = [interval for interval in intervals if interval.begin < end and interval.end > begin]
    figure, axes = figure_of(wide=True, height=2.6, xlabel="seconds")
    for what, color in _COLORS:
        label: str | None = "weights" if what == WEIGHTS else what
        for side, (_, row) in _ROWS.items():
            drawn = [interval for interval in shown if (interval.what, interval.side) == (what, side)]
            starts = [max(interval.begin, begin) for interval in drawn]
            spans = [
                (start - begin, min(interval.end, end) - start) for interval, start in zip(drawn, starts, strict=True)
            ]
            if spans:
                axes.broken_barh(spans, (row - 0.36, 0.72), color=color, linewidth=0, label=label)
                label = None
    _steps(axes, last, begin)
    axes.set_yticks([row for _, row in _ROWS.values()], [label for label, _ in _ROWS.values()])
    axes.set_ylim(-0.5, 2.75)
    axes.set_xlim(0, end - begin)
    axes.grid(visible=False)
    waited = "; ".join(
        f"{_ROWS[side][0]} waited {percent(idle_share(steps, side), 0)} of the time" for side in _WAITING
    )
    reading = f"Over all {len(steps)} steps, {duration(sum(step.end - step.begin for step in steps))}: {waited}."
    if len(last) < len(steps):
        reading += f" The last {len(last)} steps are shown."
    return reading, figure


def _steps(axes: Axes, steps: Sequence[Window], begin: float) -> None:
    """Number the steps above the rows, and separate them by lines."""
    for step in steps:
        axes.axvline(step.end - begin, color=INK, alpha=0.3, linewidth=0.7)
        axes.text((step.begin + step.end) / 2 - begin, 2.55, f"{step.step}", ha="center", va="center", fontsize=8.5)


@panel("idle", "Idle share of each side", "fraction of a step in which a side did nothing, lower is better")
def _idle(steps: Sequence[Window]) -> str | tuple[str, Figure]:
    if not steps:
        return "No time line was written."
    figure, axes = figure_of()
    colors: dict[Side, str] = {"sampler": BLUE, "trainer": GREEN}
    for side, color in colors.items():
        line(axes, [step.step for step in steps], [step.idle(side) for step in steps], color, _ROWS[side][0])
    axes.set_ylim(0, 1)
    in_percent(axes)
    shares = {_ROWS[side][0]: percent(median(step.idle(side) for step in steps), 0) for side in _WAITING}
    return f"Median over the steps: {', '.join(f'{label} {share}' for label, share in shares.items())}.", figure
