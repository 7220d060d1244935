"""One plot as the report shows it: an inline SVG in the page's own text colour, or the words why there is none."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, PURPLE, RED, GREY, CYAN = (
    "#3f7fd9",
    "#dd8427",
    "#2f9e73",
    "#8d6fd1",
    "#d4524e",
    "#8b919b",
    "#2aa3b8",
)
INK = "#010203"  # stands for the page's text colour until `_svg` puts `currentColor` in its place

STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of the report. svg is None when nothing was measured, and `reading` then says so.

    direction: which way is good, in words. wide: takes the whole width of the page.
    """

    name: str
    title: str
    direction: str
    reading: str
    svg: str | None
    wide: bool = False


def figure_of(*, rows: int = 1, wide: bool = False, xlabel: str = "step"):
    figure = Figure(figsize=(11.2, 2.9) if wide else (5.6, 3.0), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(rows, 1, sharex=True)
    for each in [axes] if rows == 1 else axes:
        each.patch.set_alpha(0)
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
        each.yaxis.set_major_locator(MaxNLocator(nbins=4 if rows > 1 else 5))
    (axes if rows == 1 else axes[-1]).set_xlabel(xlabel)
    return figure, axes


def line(axes: Axes, steps: list[int], values: list[float], color: str, label: str | None, **style) -> None:
    # A single point makes no line: show it as a dot.
    style.setdefault("marker", "o" if len(steps) == 1 else None)
    axes.plot(steps, values, color=color, label=label, **style)


def from_zero(axes: Axes, least: float = 0.0) -> None:
    """A vertical axis from 0 to a little above the highest point, or above `least`."""
    top = max([least, *(value for drawn in axes.lines for value in drawn.get_ydata())])
    axes.set_ylim(0, 1.08 * top or 1)


def missing(name: str, title: str, direction: str, why: str, wide: bool = False) -> Panel:
    return Panel(name, title, direction, why, None, wide)


def panel_of(name: str, title: str, direction: str, reading: str, figure: Figure, wide: bool = False) -> Panel:
    for axes in figure.axes:
        low, high = axes.dataLim.intervalx
        # One step: without this its axis would count in hundredths of a step.
        if axes.get_xlabel() == "step" and high - low < 1:
            axes.set_xlim(low - 1, high + 1)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            axes.legend(
                handles,
                labels,
                loc="lower left",
                bbox_to_anchor=(0, 1.0),
                ncols=len(labels) if wide else min(3, len(labels)),
                borderaxespad=0.3,
                borderpad=0.1,
                handlelength=1.4,
                columnspacing=1.4,
            )
    return Panel(name, title, direction, reading, _svg(figure, name, f"{title}. {reading}"), wide)


def _svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an inline SVG element: no header, no metadata, ids of its own, text and axes in `currentColor`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{name}-\1"', text)
    text = text.replace(INK, "currentColor")
    view = re.search(r'viewBox="[^"]*"', text).group(0)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r"<svg[^>]*>", lambda _: f'<svg {view} role="img" aria-label="{label}">', text, count=1).strip()
