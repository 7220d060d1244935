"""Pictures of a trace store, as PNG files and one HTML page: how popular experts are, which are chosen together, and
where two stores of the same sequences disagree.

Legend for shapes: T tokens, L MoE layers, E experts per layer, K top-k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from moe_rl.errors import TraceError, describe
from moe_rl.report.figures import BLUE, GREY, ORANGE, STYLE, Panel, from_zero, panel_of
from moe_rl.report.format import binary, count, percent
from moe_rl.report.lines import write_atomic
from moe_rl.report.page import render
from moe_rl.trace.difference import Disagreement, compare
from moe_rl.trace.inspection import Selection, coactivation, expert_counts, inspect

FILE = "trace.html"
_DPI = 160
# Loads and lifts further from 1 than this factor have the colour of the end of the scale.
_SCALE = 3.0
_COLORS = "RdBu_r"
# Pairs of experts, seen and expected, that are added to every count of theirs.
_PRIOR = 5.0
# Sets below which the share at a position is not drawn: it would be noise.
_FEW_SETS = 200


@dataclass(frozen=True, slots=True)
class Picture:
    """A panel of the page, and the same figure for a PNG file."""

    panel: Panel
    figure: Figure


def write_plots(selection: Selection, folder: Path, other: Selection | None = None) -> list[Path]:
    """Write trace.html and one PNG per plot into a folder; returns their paths.

    other: a second store, for disagreement: records of equal keys are compared. Raises TraceError when a store is
    empty or of several models, and when the two have no sequence in common.
    """
    facts = inspect(selection)
    if len(facts["models"]) != 1 or not facts["models"][0]["sequences"]:
        raise TraceError(
            describe(
                "plots are of one model",
                where=selection.root,
                got=f"{len(facts['models'])} models in {facts['shards']} shards",
                do="give one shard, or a store that is not empty",
            )
        )
    spec, counts_LE = expert_counts(selection)
    with matplotlib.rc_context(STYLE):
        pictures = [
            _popularity(counts_LE, spec.moe_layers),
            _balance(counts_LE, spec.moe_layers),
            _coactivation(*coactivation(selection, _some_layers(spec.moe_layers)), spec.top_k),
        ]
        if other is not None:
            found = compare(selection, other)
            pictures += [_layers_that_differ(found), _positions_that_differ(found)]
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for picture in pictures:
            paths.append(folder / f"{picture.panel.name}.png")
            picture.figure.patch.set(alpha=1, facecolor="white")
            picture.figure.suptitle(picture.panel.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            FigureCanvasAgg(picture.figure).print_figure(paths[-1], dpi=_DPI)
    page = folder / FILE
    write_atomic(page, _page(selection, facts, [picture.panel for picture in pictures], other))
    return [*paths, page]


def _popularity(counts_LE: np.ndarray, layers: tuple[int, ...]) -> Picture:
    load_LE = _load(counts_LE)
    height = min(7.0, 2.2 + 0.07 * len(layers))
    figure = Figure(figsize=(11.2, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    _heat(figure, axes, load_LE, "load / mean")
    axes.set_xlabel("expert")
    _layer_ticks(axes, layers)
    top = np.unravel_index(load_LE.argmax(), load_LE.shape)
    idle = int((counts_LE == 0).sum())
    reading = f"Busiest: expert {top[1]} of layer {layers[top[0]]}, {load_LE[top]:.1f} times the mean. " + (
        f"{idle} of {counts_LE.size} experts were never chosen (grey)." if idle else "Every expert was chosen."
    )
    direction = "how often each expert of a layer was chosen; white is an even load"
    return _picture("popularity", "Expert popularity per layer", direction, reading, figure, wide=True)


def _balance(counts_LE: np.ndarray, layers: tuple[int, ...]) -> Picture:
    load_LE = np.sort(_load(counts_LE), axis=1)
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    style = {"marker": "o", "markersize": 3.2, "linewidth": 1.4}
    axes.plot(layers, load_LE[:, -1], color=ORANGE, label="busiest expert", **style)
    axes.plot(layers, np.median(load_LE, axis=1), color=BLUE, label="median", **style)
    axes.plot(layers, load_LE[:, 0], color=GREY, label="least used", **style)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel("layer")
    axes.set_ylabel("load, times the mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    from_zero(axes)
    worst = int(load_LE[:, -1].argmax())
    reading = (
        f"The busiest expert of a layer has {load_LE[:, -1].mean():.1f} times the mean load, "
        f"{load_LE[worst, -1]:.1f} in layer {layers[worst]}."
    )
    direction = "load of the busiest, the median and the least used expert of each layer; 1 is even"
    return _picture("balance", "Balance of load", direction, reading, figure)


def _coactivation(layers: tuple[int, ...], pairs_LEE: np.ndarray, top_k: int) -> Picture:
    width = 3.7 * len(layers)
    figure = Figure(figsize=(width, 3.9), layout="constrained")
    figure.patch.set_alpha(0)
    strongest = (0.0, 0, 0, 0)
    for at, (layer, pairs_EE) in enumerate(zip(layers, pairs_LEE, strict=True)):
        lift_EE = _lift(pairs_EE, top_k)
        sure = np.where(pairs_EE >= 4 * _PRIOR, lift_EE, 0.0)
        first, second = np.unravel_index(np.nanargmax(sure), sure.shape)
        strongest = max(strongest, (float(sure[first, second]), layer, int(first), int(second)))
        order = _together(lift_EE)
        axes = figure.add_subplot(1, len(layers), at + 1)
        _heat(figure, axes, lift_EE[np.ix_(order, order)], "seen / by chance", bar=at == len(layers) - 1)
        axes.set_title(f"layer {layer}", fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("experts, alike ones side by side")
    reading = "No pair of experts was seen often enough to say."
    if strongest[0]:
        lift, layer, first, second = strongest
        pair = f"experts {min(first, second)} and {max(first, second)} of layer {layer}"
        reading = f"Strongest: {pair}, chosen together {lift:.1f} times as often as by chance."
    direction = "how often two experts are chosen for the same token, against independent choices as popular as they"
    return _picture("coactivation", "Experts chosen together", direction, reading, figure, wide=True)


def _layers_that_differ(found: Disagreement) -> Picture:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    sets_L, experts_L = found.sets_L / found.rows, found.experts_L / found.rows / found.top_k
    axes.bar(found.layers, sets_L, width=0.8, color=BLUE, alpha=0.85, label="sets that differ", linewidth=0)
    axes.plot(found.layers, experts_L, color=ORANGE, marker="o", markersize=3.2, label="experts that differ")
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylim(0, max(1.12 * sets_L.max(), 0.01))
    worst = int(sets_L.argmax())
    reading = (
        f"{percent(float(sets_L.mean()), 2)} of sets differ over {found.rows:,} tokens of {found.sequences} sequences, "
        f"{percent(float(sets_L[worst]), 2)} in layer {found.layers[worst]}; "
        f"{percent(found.tokens / found.rows)} of tokens in at least one layer."
    )
    direction = "share of expert sets, and of single experts, that the two stores have not in common"
    return _picture("disagreement", "Disagreement per layer", direction, reading, figure)


def _positions_that_differ(found: Disagreement) -> Picture:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    seen = found.bin_sets >= min(_FEW_SETS, found.bin_sets.max())
    share = found.bin_differ[seen] / found.bin_sets[seen]
    middle = (np.flatnonzero(seen) + 0.5) * found.bin_rows
    axes.plot(middle, share, color=BLUE, marker="o", markersize=3.2)
    axes.set_xlabel("position in the sequence")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylim(0, max(1.12 * share.max(), 0.01))
    reading = f"Mean of all layers, in steps of {found.bin_rows} tokens."
    if len(share) > 1:
        half = len(share) // 2
        reading = (
            f"{percent(float(share[:half].mean()), 2)} in the first half of positions, "
            f"{percent(float(share[half:].mean()), 2)} in the second. " + reading
        )
    direction = "share of expert sets that differ, by where their token stands"
    return _picture("disagreement-position", "Disagreement along the sequence", direction, reading, figure)


def _picture(name: str, title: str, direction: str, reading: str, figure: Figure, wide: bool = False) -> Picture:
    return Picture(panel_of(name, title, direction, reading, figure, wide), figure)


def _heat(figure: Figure, axes: Axes, ratio: np.ndarray, label: str, *, bar: bool = True) -> None:
    """Ratios to 1 on a logarithmic scale of colours; 0 and unknown are grey."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.ma.masked_invalid(np.log2(ratio))
    colors = matplotlib.colormaps[_COLORS].with_extremes(bad="#c3c7cd")
    norm = TwoSlopeNorm(0, -_SCALE, _SCALE)
    image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="none", origin="lower")
    axes.grid(False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    if bar:
        scale = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.045, extend="both")
        scale.set_ticks(range(-3, 4))
        scale.ax.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"{2.0**power:.3g}"))
        scale.set_label(label)
        scale.outline.set_visible(False)


def _layer_ticks(axes: Axes, layers: tuple[int, ...]) -> None:
    step = max(1, -(-len(layers) // 12))
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")


def _some_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The first, the middle and the last."""
    return tuple(dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])))


def _load(counts_LE: np.ndarray) -> np.ndarray:
    return counts_LE / np.maximum(counts_LE.mean(axis=1, keepdims=True), 1e-300)


def _lift(pairs_EE: np.ndarray, top_k: int) -> np.ndarray:
    """Pairs seen over pairs expected, with _PRIOR of each added: few of either say nothing. NaN on the diagonal and for
    experts that were never chosen.

    pairs_EE: tokens for which both experts were chosen; on the diagonal, those for which one was. With K of them chosen
    at once, independent ones of shares p and q meet in about p q (K - 1) / K of the tokens.
    """
    chosen_E = np.diag(pairs_EE).astype(np.float64)
    tokens = chosen_E.sum() / top_k
    expected = np.outer(chosen_E, chosen_E) / max(tokens, 1) * ((top_k - 1) / top_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = np.where(expected > 0, (pairs_EE + _PRIOR) / (expected + _PRIOR), np.nan)
    np.fill_diagonal(lift, np.nan)
    return lift


def _together(lift_EE: np.ndarray) -> np.ndarray:
    """An order of experts in which those that are chosen together stand together: along the slowest vibration of the
    graph whose edges are lifts."""
    near = np.clip(np.nan_to_num(lift_EE), 0, 4)
    degree = near.sum(axis=1)
    scale = 1 / np.sqrt(np.maximum(degree, 1e-9))
    _, vectors = np.linalg.eigh(np.eye(len(near)) - scale[:, None] * near * scale)
    return np.argsort(vectors[:, min(1, len(near) - 1)] * scale, kind="stable")


def _page(selection: Selection, facts: dict, panels: list[Panel], other: Selection | None) -> str:
    (model,) = facts["models"]
    name = Path(selection.root).name or selection.root
    against = f", against {escape(other.root)}" if other else ""
    header = (
        f'<header><p class="kicker">moe_rl trace</p><h1>{escape(name)}</h1><p class="facts">'
        f"{count(model['shards'])} shards, {binary(model['bytes'])}; {model['top_k']} of {model['num_experts']} "
        f"experts in {len(model['popularity'])} layers; model {escape(model['fingerprint'][:16])}{against}</p></header>"
    )
    evenness = [row["evenness"] for row in model["popularity"]]
    tiles = [
        ("Sequences", count(model["sequences"]), f"{count(model['tokens'])} tokens forwarded"),
        (
            "Bits a set",
            f"{model['bits_per_set']:.1f}",
            f"bound {model['bits_per_set_bound']:.1f}; by popularity alone {model['bits_per_set_order0']:.1f}",
        ),
        (
            "Bytes a token",
            f"{model['bytes_per_token']:.0f}",
            f"all of the file; raw routes alone {model['raw_bytes_per_token']}",
        ),
        ("Evenness", percent(float(np.mean(evenness))), "entropy of picks; 100% is an even load"),
    ]
    tile = "".join(
        f'<div class="tile{" lead" if not at else ""}"><h3>{title}</h3><p class="value">{value}</p>'
        f'<p class="under">{under}</p></div>'
        for at, (title, value, under) in enumerate(tiles)
    )
    figures = "".join(
        f'<figure{" class=wide" if panel.wide else ""} id="{panel.name}"><h3>{escape(panel.title)}</h3>'
        f'<p class="direction">{escape(panel.direction)}</p>{panel.svg}<figcaption>{escape(panel.reading)}</figcaption>'
        "</figure>"
        for panel in panels
    )
    rows = "".join(
        f"<tr><td class=n>{row['layer']}</td><td class=n>{count(row['sets'])}</td><td class=n>{row['busiest_expert']}"
        f"</td><td class=n>{row['busiest_load']:.2f}</td><td class=n>{row['idle_experts']}</td>"
        f"<td class=n>{percent(row['evenness'])}</td></tr>"
        for row in model["popularity"]
    )
    table = (
        "<h2>Every layer</h2><table><thead><tr><th class=n>layer</th><th class=n>sets</th><th class=n>busiest expert"
        "</th><th class=n>its load</th><th class=n>never chosen</th><th class=n>evenness</th></tr></thead><tbody>"
        f"{rows}</tbody></table>"
    )
    body = f'{header}<section class="tiles">{tile}</section><h2>Experts</h2><div class="plots">{figures}</div>{table}'
    return render(f"{name} - moe_rl trace", body)
