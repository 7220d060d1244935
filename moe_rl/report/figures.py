"""Draws one plot of a page: an inline SVG in the page's text colour, or a sentence on why there is none.

All pages share the colours, axes and legends defined here. Colours have the same meaning in all plots: blue is the
routing that the run trains on, orange is native routing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colorbar import Colorbar
from matplotlib.colorizer import ColorizingArtist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import ArrayLike

BLUE, ORANGE, GREEN, PURPLE = "#3f7fd9", "#dd8427", "#2f9e73", "#8d6fd1"
RED, GREY, CYAN, YELLOW, OLIVE = "#d4524e", "#8b919b", "#2aa3b8", "#b9a04a", "#6e7f3a"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, CYAN, YELLOW, GREY)
"""One for each run, where several runs are in one plot."""
PHASES = (
    ("sample", BLUE),
    ("reward", PURPLE),
    ("routes", CYAN),
    ("logprobs", ORANGE),
    ("train", GREEN),
    ("sync", RED),
    ("eval", GREY),
    ("checkpoint", YELLOW),
    ("export", OLIVE),
)
"""The colour of each part of a step, in the order of the parts."""

MOST_POINTS = 1000
"""Largest number of points that outline one line or one band, however long the run is."""
MOST_MARKS = 250
"""Largest number of marks on a line: more would overlap in the width of a plot."""
_BAR_POINTS = 8  # points that outline one bar

_LEGEND = {"borderaxespad": 0.3, "borderpad": 0.1, "handlelength": 1.4, "columnspacing": 1.4}

INK = "#010203"  # placeholder that `_svg` replaces with `currentColor`

STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """Holds one plot of a page. If nothing was measured, svg and figure are None and `reading` says so.

    Attributes:
        direction: in words, whether high or low values are good.
        wide: whether the plot takes the whole width of the page.
    """

    name: str
    title: str
    direction: str
    reading: str
    svg: str | None
    figure: Figure | None = None
    wide: bool = False


def figure_of(
    *, rows: int = 1, columns: int = 1, wide: bool = False, height: float | None = None, xlabel: str = "step"
):
    """Create a figure and its axes: one, or an array of `rows` or `columns`. height: in inches."""
    size = (11.2 if wide else 5.6, height or (2.9 if wide else 3.0))
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(rows, columns, sharex=rows > 1, squeeze=False)
    for plot in axes.flat:
        plot.patch.set_alpha(0)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True))
        plot.yaxis.set_major_locator(MaxNLocator(nbins=4 if rows > 1 else 5))
        plot.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # no common factor, which would lie on the legend
    for plot in axes[-1]:
        plot.set_xlabel(xlabel)
    return figure, axes[0, 0] if axes.size == 1 else axes.ravel()


def thinned(*series: ArrayLike, most: int) -> np.ndarray:
    """Return the ascending indices of the points to draw of series of equal length; all of them up to `most`.

    Longer series are cut into runs of equal length. The indices of each run's minimum and maximum are kept, and the
    first and the last index. An index kept for one series is kept for all.
    """
    rows = np.atleast_2d(np.asarray(series, float))
    count = rows.shape[1]
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, (most - 2) // (2 * len(rows)) + 1).astype(int)
    runs = [(begin, rows[:, begin:end]) for begin, end in pairwise(edges)]
    kept = [begin + find(run, axis=1) for begin, run in runs for find in (np.argmin, np.argmax)]
    return np.unique(np.concatenate([[0, count - 1], *kept]))


def line(axes: Axes, steps: ArrayLike, values: ArrayLike, color: str, label: str | None, **style) -> None:
    """Draw a line, thinned if it is long; nothing without points."""
    if not np.size(steps):
        return
    # A single point makes no line: show it as a dot.
    style.setdefault("marker", "o" if np.size(steps) == 1 else None)
    kept = thinned(values, most=MOST_MARKS if style["marker"] else MOST_POINTS)
    axes.plot(np.asarray(steps)[kept], np.asarray(values)[kept], color=color, label=label, **style)


def band(axes: Axes, steps: ArrayLike, low: ArrayLike, high: ArrayLike, color: str, alpha: float) -> None:
    """Fill the area between two lines, thinned if they are long."""
    kept = thinned(low, high, most=MOST_POINTS // 2)
    ends = (np.asarray(values)[kept] for values in (low, high))
    axes.fill_between(np.asarray(steps)[kept], *ends, color=color, alpha=alpha, linewidth=0)


def stacked_bars(axes: Axes, steps: ArrayLike, parts: Sequence[tuple[str, str, ArrayLike]]) -> int:
    """Stack parts on each other, one bar per step, and return the number of bars.

    With many steps, only those with the lowest and the highest bars are drawn (see `thinned`). A bar then extends to
    the next one. Each part is one path, so the cost of drawing does not grow with the steps.

    Args:
        parts: label, colour and heights of each part, from the bottom up.
    """
    heights = np.array([values for _, _, values in parts])
    kept = thinned(heights.sum(axis=0), most=MOST_POINTS // _BAR_POINTS)
    positions = np.asarray(steps, float)[kept]
    edges = np.stack([positions - 0.425, np.append(positions[1:] - 0.575, positions[-1] + 0.425)], axis=1).ravel()
    # Bar, gap, bar, gap, ..., bar: a gap has no top.
    base, top = np.zeros(len(edges) - 1), np.full(len(edges) - 1, np.nan)
    for (label, color, _), height in zip(parts, heights[:, kept], strict=True):
        top[::2] = base[::2] + height
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=label, linewidth=0)
        base[::2] = top[::2]
    return len(positions)


def from_zero(axes: Axes, least: float = 0.0, *, percent: bool = False) -> None:
    """Start the vertical axis at 0 and end it a little above the highest point, or above `least`."""
    axes.set_ylim(0, 1.08 * max(least, axes.dataLim.y1) or 1)
    if percent:
        in_percent(axes)


def in_percent(axes: Axes) -> None:
    """Label the vertical axis in percent, for fractions."""
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def layers_upward(axes: Axes, layers: Sequence[int], most: int) -> None:
    """Label the rows of a map that has one row per layer, with at most about `most` layer numbers."""
    every = max(1, -(-len(layers) // most))
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    axes.grid(visible=False)


def color_bar(figure: Figure, image: ColorizingArtist, axes: Axes | Sequence[Axes], label: str, **style) -> Colorbar:
    bar = figure.colorbar(image, ax=axes, **style)
    bar.outline.set_visible(False)
    bar.set_label(label)
    return bar


def missing(name: str, title: str, direction: str, why: str, wide: bool = False) -> Panel:
    """Return a panel with text instead of a plot."""
    return Panel(name, title, direction, why, None, wide=wide)


def panel[**P](name: str, title: str, direction: str, wide: bool = False):
    """Make a function that draws into one that returns the panel with this name.

    The function returns a reading and its figure, or only a sentence on why there is no plot.
    """

    def of(draw: Callable[P, str | tuple[str, Figure]]) -> Callable[P, Panel]:
        @wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> Panel:
            drawing = draw(*args, **kwargs)
            if isinstance(drawing, str):
                return missing(name, title, direction, drawing, wide)
            return panel_of(name, title, direction, *drawing, wide)

        return drawn

    return of


def panel_of(name: str, title: str, direction: str, reading: str, figure: Figure, wide: bool = False) -> Panel:
    """Finish a figure: legends above their axes, and the figure as SVG."""
    for axes in figure.axes:
        low, high = axes.dataLim.intervalx
        # With a single step the axis would otherwise count hundredths of a step.
        if axes.get_xlabel() == "step" and 0 <= high - low < 1:
            axes.set_xlim(low - 1, high + 1)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            ncols = len(labels) if wide else min(3, len(labels))
            axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, **_LEGEND)
    return Panel(name, title, direction, reading, _svg(figure, name, f"{title}. {reading}"), figure, wide)


def _svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as an inline SVG without header and metadata, with unique ids, and text and axes in
    `currentColor`.
    """
    buffer, unsaid = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=unsaid)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{name}-\1"', text)
    text = text.replace(INK, "currentColor")
    view = text[text.index('viewBox="') :].split('"')[1]
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = f'<svg viewBox="{view}" role="img" aria-label="{label}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()
