"""Draws a trace store as PNG files and one HTML page.

The plots show the popularity of experts, which are chosen together, and where two stores of the same sequences
disagree.

Legend for shapes: T tokens, L MoE layers, E experts per layer, K top-k experts per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moe_rl.disk import write_whole
from moe_rl.errors import TraceError
from moe_rl.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    STYLE,
    Panel,
    color_bar,
    figure_of,
    from_zero,
    layers_upward,
    line,
    panel_of,
)
from moe_rl.report.format import binary, count, percent
from moe_rl.report.page import Tile, render
from moe_rl.trace.difference import Disagreement, compare
from moe_rl.trace.inspection import Selection, coactivation, expert_counts, inspect

FILE = "trace.html"
_DPI = 160
# The colour scale ends at this factor above and below 1, for loads and lifts.
_SCALE = 3.0
_COLORS = "RdBu_r"
# Pseudo-count added to the observed and expected number of each pair of experts.
_PRIOR = 5.0
# Positions with fewer sets than this are not drawn, because their fraction would be noise.
_FEW_SETS = 200


def write_plots(selection: Selection, folder: Path, other: Selection | None = None) -> list[Path]:
    """Write trace.html and one PNG per plot into a folder; return their paths.

    Args:
        other: a second store for the disagreement plots. Records with equal keys are compared.

    Raises:
        TraceError: a store is empty or has several models, or the two stores share no sequence.
    """
    facts: dict[str, Any] = inspect(selection)
    if len(facts["models"]) != 1 or not facts["models"][0]["stored_tokens"]:
        got = f"{len(facts['models'])} models in {facts['shards']} shards"
        do = "give one shard, or a store that is not empty"
        raise TraceError("plots are of one model", where={"folder": selection.root}, got=got, do=do)
    spec, counts_LE = expert_counts(selection)
    layers = tuple(row["layer"] for row in facts["models"][0]["popularity"])  # a stage's shard lacks the others
    counts_LE = counts_LE[counts_LE.any(axis=1)]
    some = tuple(dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])))
    with matplotlib.rc_context(STYLE):
        panels = [
            _popularity(counts_LE, layers),
            _balance(counts_LE, layers),
            _coactivation(*coactivation(selection, some), spec.top_k),
        ]
        if other is not None:
            disagreement = compare(selection, other)
            panels += [_layers_that_differ(disagreement), _positions_that_differ(disagreement)]
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for panel in panels:
            if (figure := panel.figure) is not None:
                paths.append(folder / f"{panel.name}.png")
                figure.patch.set(alpha=1, facecolor="white")
                figure.suptitle(panel.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
                FigureCanvasAgg(figure).print_figure(paths[-1], dpi=_DPI)
    page = folder / FILE
    write_whole(page, _page(selection, facts, panels, other))
    return [*paths, page]


def _popularity(counts_LE: np.ndarray, layers: tuple[int, ...]) -> Panel:
    load_LE = _load(counts_LE)
    figure, axes = figure_of(wide=True, height=min(7.0, 2.2 + 0.07 * len(layers)), xlabel="expert")
    _heat(figure, axes, load_LE, "load / mean")
    layers_upward(axes, layers, 12)
    axes.set_ylabel("layer")
    top = np.unravel_index(load_LE.argmax(), load_LE.shape)
    idle = int((counts_LE == 0).sum())
    reading = f"Busiest: expert {top[1]} of layer {layers[top[0]]}, {load_LE[top]:.1f} times the mean. " + (
        f"{idle} of {counts_LE.size} experts were never chosen (grey)." if idle else "Every expert was chosen."
    )
    direction = "how often each expert of a layer was chosen; white is an even load"
    return panel_of("popularity", "Expert popularity per layer", direction, reading, figure, wide=True)


def _balance(counts_LE: np.ndarray, layers: tuple[int, ...]) -> Panel:
    load_LE = np.sort(_load(counts_LE), axis=1)
    figure, axes = figure_of(height=3.4, xlabel="layer")
    style = {"marker": "o", "markersize": 3.2, "linewidth": 1.4}
    line(axes, layers, load_LE[:, -1], ORANGE, "busiest expert", **style)
    line(axes, layers, np.median(load_LE, axis=1), BLUE, "median", **style)
    line(axes, layers, load_LE[:, 0], GREY, "least used", **style)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylabel("load, times the mean")
    from_zero(axes)
    worst = int(load_LE[:, -1].argmax())
    reading = (
        f"The busiest expert of a layer has {load_LE[:, -1].mean():.1f} times the mean load on "
        f"average, and {load_LE[worst, -1]:.1f} times in layer {layers[worst]}."
    )
    direction = "load of the busiest, the median and the least used expert of each layer; 1 is even"
    return panel_of("balance", "Balance of load", direction, reading, figure)


def _coactivation(layers: tuple[int, ...], pairs_LEE: np.ndarray, top_k: int) -> Panel:
    wide = len(layers) > 1
    figure, every = figure_of(columns=len(layers), wide=wide, height=3.9, xlabel="experts, similar ones side by side")
    strongest = (0.0, 0, 0, 0)
    for axes, layer, pairs_EE in zip(np.atleast_1d(every), layers, pairs_LEE, strict=True):
        lift_EE = _lift(pairs_EE, top_k)
        sure = np.where(pairs_EE >= 4 * _PRIOR, lift_EE, 0.0)
        expert, other = map(int, np.unravel_index(np.nanargmax(sure), sure.shape))
        strongest = max(strongest, (float(sure[expert, other]), layer, expert, other))
        order = _together(lift_EE)
        _heat(figure, axes, lift_EE[np.ix_(order, order)], "seen / expected", bar=layer == layers[-1])
        axes.set_title(f"layer {layer}", fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
    reading = "No pair of experts was seen often enough to say."
    if strongest[0]:
        lift, layer, first, second = strongest
        pair = f"experts {min(first, second)} and {max(first, second)} of layer {layer}"
        reading = f"Strongest: {pair}, chosen together {lift:.1f} times as often as by chance."
    direction = (
        "how often two experts are chosen for the same token, compared with independent choices of the same popularity"
    )
    return panel_of("coactivation", "Experts chosen together", direction, reading, figure, wide=wide)


def _layers_that_differ(sums: Disagreement) -> Panel:
    figure, axes = figure_of(height=3.4, xlabel="layer")
    sets_L, experts_L = sums.sets_L / sums.rows, sums.experts_L / sums.rows / sums.top_k
    axes.bar(sums.layers, sets_L, width=0.8, color=BLUE, alpha=0.85, label="sets that differ", linewidth=0)
    line(axes, sums.layers, experts_L, ORANGE, "experts that differ", marker="o", markersize=3.2)
    from_zero(axes, least=0.01, percent=True)
    worst = int(sets_L.argmax())
    reading = (
        f"{percent(float(sets_L.mean()), 2)} of sets differ over {sums.rows:,} tokens of {sums.sequences} sequences, "
        f"{percent(float(sets_L[worst]), 2)} in layer {sums.layers[worst]}; "
        f"{percent(sums.tokens / sums.rows)} of tokens in at least one layer."
    )
    direction = "fraction of expert sets, and of single experts, in which the two stores differ"
    return panel_of("disagreement", "Disagreement per layer", direction, reading, figure)


def _positions_that_differ(sums: Disagreement) -> Panel:
    figure, axes = figure_of(height=3.4, xlabel="position in the sequence")
    drawn = sums.bin_sets >= min(_FEW_SETS, sums.bin_sets.max())
    share = sums.bin_differ[drawn] / sums.bin_sets[drawn]
    middle = (np.flatnonzero(drawn) + 0.5) * sums.bin_rows
    line(axes, middle, share, BLUE, None, marker="o", markersize=3.2)
    from_zero(axes, least=0.01, percent=True)
    reading = f"Mean of all layers, in bins of {sums.bin_rows} tokens."
    if len(share) > 1:
        half = len(share) // 2
        reading = (
            f"{percent(float(share[:half].mean()), 2)} in the first half of positions, "
            f"{percent(float(share[half:].mean()), 2)} in the second. " + reading
        )
    direction = "fraction of expert sets that differ, by position of the token"
    return panel_of("disagreement-position", "Disagreement along the sequence", direction, reading, figure)


def _heat(figure: Figure, axes: Axes, ratio: np.ndarray, label: str, *, bar: bool = True) -> None:
    """Draw ratios around 1 on a logarithmic colour scale. 0 and unknown are grey."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.ma.masked_invalid(np.log2(ratio))
    colors = matplotlib.colormaps[_COLORS].with_extremes(bad="#c3c7cd")
    norm = TwoSlopeNorm(0, -_SCALE, _SCALE)
    image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="none", origin="lower")
    axes.grid(False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    if bar:
        scale = color_bar(figure, image, axes, label, pad=0.015, fraction=0.045, extend="both")
        scale.set_ticks(range(-3, 4))
        scale.ax.yaxis.set_major_formatter(FuncFormatter(lambda power, _: f"{2.0**power:.3g}"))


def _load(counts_LE: np.ndarray) -> np.ndarray:
    return counts_LE / np.maximum(counts_LE.mean(axis=1, keepdims=True), 1e-300)


def _lift(pairs_EE: np.ndarray, top_k: int) -> np.ndarray:
    """Return observed pairs / expected pairs, with _PRIOR added to each so that rare pairs stay near 1.

    The result is NaN on the diagonal and for experts that were never chosen.

    pairs_EE: tokens for which both experts were chosen; on the diagonal, tokens for which the expert was chosen. With K
    experts per token, independent experts with frequencies p and q are both chosen for about p q (K - 1) / K of the
    tokens.
    """
    chosen_E = np.diag(pairs_EE).astype(np.float64)
    tokens = chosen_E.sum() / top_k
    expected = np.outer(chosen_E, chosen_E) / max(tokens, 1) * ((top_k - 1) / top_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = np.where(expected > 0, (pairs_EE + _PRIOR) / (expected + _PRIOR), np.nan)
    np.fill_diagonal(lift, np.nan)
    return lift


def _together(lift_EE: np.ndarray) -> np.ndarray:
    """Return an order that puts experts next to each other if they are chosen together.

    It sorts by the eigenvector of the second smallest eigenvalue of the graph Laplacian with lifts as edge weights.
    """
    near = np.clip(np.nan_to_num(lift_EE), 0, 4)
    degree = near.sum(axis=1)
    scale = 1 / np.sqrt(np.maximum(degree, 1e-9))
    _, vectors = np.linalg.eigh(np.eye(len(near)) - scale[:, None] * near * scale)
    return np.argsort(vectors[:, min(1, len(near) - 1)] * scale, kind="stable")


def _page(selection: Selection, facts: dict, panels: list[Panel], other: Selection | None) -> str:
    (model,) = facts["models"]
    name = Path(selection.root).name or selection.root
    description = (
        f"{count(model['shards'])} shards, {binary(model['bytes'])}; {model['top_k']} of {model['num_experts']} "
        f"experts in {len(model['popularity'])} layers; model {model['fingerprint'][:16]}"
    )
    tokens = f"{count(model['tokens'])} tokens, {count(model['stored_tokens'])} stored"
    bounds = f"bound {model['bits_per_set_bound']:.1f}; from popularity alone {model['bits_per_set_order0']:.1f}"
    raw = f"all of the file; {model['bytes_per_stored_token']:.0f} a stored token; raw {model['raw_bytes_per_token']}"
    evenness = percent(float(np.mean([row["evenness"] for row in model["popularity"]])))
    return render(
        "trace.html",
        title=f"{name} - moe_rl trace",
        kicker="moe_rl trace",
        heading=name,
        facts=[description + (f", against {other.root}" if other else "")],
        tiles=[
            Tile("Sequences", count(model["sequences"]), tokens),
            Tile("Bits a set", f"{model['bits_per_set']:.1f}", bounds),
            Tile("Bytes a token", f"{model['bytes_per_token']:.0f}", raw),
            Tile("Evenness", evenness, "entropy of picks; 100% is an even load"),
        ],
        panels=panels,
        layers=model["popularity"],
    )
