"""Draws the plots of the comparison, in the colours of a run's report: native routing is orange, replay is blue."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import batched
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from moe_rl.comparison.experiment import Detail
from moe_rl.comparison.quantities import busiest, extreme_fractions, policy_sums
from moe_rl.report.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    STYLE,
    Panel,
    color_bar,
    figure_of,
    in_percent,
    layers_upward,
    line,
    panel_of,
)
from moe_rl.report.format import percent, scientific

NATIVE, REPLAY = "native routing", "replay (R3)"
LONGEST_MAP = 48
_ROUTE_COLORS = {"native": ORANGE, "R2": GREEN, "R3": BLUE}


def panels(result: dict[str, Any], detail: Detail, decode: Callable[[list[int]], str]) -> list[Panel]:
    """Return all plots in page order. `decode` turns token ids into text."""
    with matplotlib.rc_context(STYLE):
        return [
            _rows(result),
            _layers(result),
            _histogram(detail),
            _extremes(detail),
            _pairs(detail),
            _map(detail, decode, result),
        ]


def row_name(row: dict[str, Any]) -> str:
    """Describe the sampler, trainer and staleness of a table row."""
    updates = row["staleness_updates"]
    age = "same weights" if not updates else f"{updates} update{'s' if updates > 1 else ''} later"
    fresh = ", sampled now" if row["source"] == "sampled now" else ""
    return f"{row['sampler']} / {row['trainer_dtype']}, {age}{fresh}"


def settings(rows: list[dict[str, Any]]) -> list[tuple[str, tuple[dict[str, Any], ...]]]:
    """Return the name and the rows of each setting, one row for each routing.

    Two settings may have equal names: two checkpoints, when every update between them was skipped.
    """
    return [(row_name(setting[0]), setting) for setting in batched(rows, len(_ROUTE_COLORS))]


def _rows(result: dict[str, Any]) -> Panel:
    name, title = "k3-rows", "Policy KL k3 of every setting"
    direction = "KL(rollout || trainer), nats/token, 95% interval over sequences, log axis, lower is better"
    groups = settings(result["rows"])
    figure, axes = figure_of(wide=True, height=1.2 + 0.62 * len(groups), xlabel="k3, nats/token")
    floor = min(row["policy"]["k3"]["value"] or math.inf for row in result["rows"])
    for position, (_, rows) in enumerate(groups):
        for shift, row in zip((-0.24, 0, 0.24), rows, strict=True):
            k3 = row["policy"]["k3"]
            color = _ROUTE_COLORS[row["routing"]]
            label = {"native": NATIVE, "R2": "R2", "R3": REPLAY}[row["routing"]] if not position else None
            low = max(k3["low"], floor / 20)
            axes.plot([low, k3["high"]], [position + shift] * 2, color=color, linewidth=2.2, alpha=0.6)
            axes.plot([k3["value"]], [position + shift], "o", color=color, markersize=5.5, label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(groups)), [label for label, _ in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    lower = sum(rows[2]["native_less_this"]["k3"]["low"] > 0 for _, rows in groups)
    reading = (
        f"In {lower} of {len(groups)} settings the whole interval of the paired difference, native less R3, is above "
        "0. Labels give sampler / trainer precision. With the same weights as the sampler, R2 replays the trainer's "
        "own choice and changes nothing."
    )
    return panel_of(name, title, direction, reading, figure, wide=True)


def _layers(result: dict[str, Any]) -> Panel:
    name, title = "layers", "Disagreement by layer"
    direction = "tokens whose expert set differs from the recorded one, lower is better"
    layers = [entry["layer"] for entry in result["layers"]]
    figure, both_axes = figure_of(rows=2, xlabel="layer")
    rates = [entry[part]["set_mismatch"] for entry in result["layers"] for part in ("completion", "prompt")]
    # Completions of one token have no rows.
    measured = [rate for each in rates for rate in (each["before"], each["after"]) if rate is not None]
    highest = max(measured, default=0.0)
    for axes, part in zip(both_axes, ("completion", "prompt"), strict=True):
        for when, color, label in (("before", ORANGE, "native forward"), ("after", BLUE, "shadow choice in replay")):
            values = [entry[part]["set_mismatch"][when] for entry in result["layers"]]
            shown = label if part == "completion" else None
            line(axes, layers, values, color, shown, marker="o", markersize=3.5)
        axes.set_ylim(0, 1.1 * highest or 0.01)
        in_percent(axes)
        axes.set_ylabel(part)
    first, last = result["layers"][0]["all"]["set_mismatch"], result["layers"][-1]["all"]["set_mismatch"]
    reading = (
        f"All rows: layer {layers[0]} {percent(first['before'], 2)} native and {percent(first['after'], 2)} shadow, "
        f"layer {layers[-1]} {percent(last['before'], 2)} and {percent(last['after'], 2)}. Shadow is what the router "
        "would choose in the replayed forward. The disagreement that remains there comes from the router itself; the "
        "disagreement that disappeared came from earlier layers."
    )
    return panel_of(name, title, direction, reading, figure)


def _histogram(detail: Detail) -> Panel:
    name, title = "log-ratio", "Log ratio of every completion token"
    direction = "d = log p_trainer - log p_sampler, nats; narrower is better; tokens on a log axis"
    before, after = _distances(detail)
    most = max(np.abs(before).max(), np.abs(after).max(), 1e-6)
    edges = np.linspace(-most, most, 62)
    figure, axes = figure_of(xlabel="d, nats")
    for values, color, label in ((before, ORANGE, NATIVE), (after, BLUE, REPLAY)):
        counts, _ = np.histogram(values, edges)
        axes.stairs(counts, edges, baseline=0.7, color=color, label=label, linewidth=1.5, fill=color == ORANGE,
                    alpha=0.45 if color == ORANGE else 1)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.set_ylabel("tokens")
    reading = (
        f"{len(before):,} tokens. Largest |d| {np.abs(before).max():.3g} native and {np.abs(after).max():.3g} under "
        f"replay; 99th percentile {np.percentile(np.abs(before), 99):.3g} and {np.percentile(np.abs(after), 99):.3g}."
    )
    return panel_of(name, title, direction, reading, figure)


def _extremes(detail: Detail) -> Panel:
    name, title = "extremes", "Extreme tokens against tau"
    direction = "F(tau): tokens whose probabilities differ by more than a factor of tau; both axes log, lower is better"
    before, after = _distances(detail)
    top = max(math.log(6), 1.1 * max(np.abs(before).max(), np.abs(after).max()))
    sizes = np.geomspace(1e-3, top, 300)
    figure, axes = figure_of(xlabel="tau")
    for values, color, label in ((before, ORANGE, NATIVE), (after, BLUE, REPLAY)):
        fractions = extreme_fractions(values, np.exp(sizes))
        shown = fractions > 0
        axes.step(sizes[shown], fractions[shown], color=color, label=label, where="post")
    # The axis is ln tau, which is |d|, with labels for tau.
    axes.set_xscale("log")
    axes.set_yscale("log")
    taus = [tau for tau in (1.001, 1.01, 1.1, 1.5, 2, 5, 20, 1000) if math.log(tau) <= top]
    axes.set_xticks([math.log(tau) for tau in taus], [f"{tau:g}" for tau in taus])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(LogLocator(subs=()))
    axes.set_xlim(sizes[0], sizes[-1])
    axes.set_ylim(0.7 / len(before), 1.3)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    for tau in (2, 5):
        axes.axvline(math.log(tau), color=INK, alpha=0.3, linewidth=0.9, linestyle=(0, (2, 3)))
    native, replayed = (extreme_fractions(distances, np.array([2.0, 5.0])) for distances in (before, after))
    reading = (
        f"F(2): {scientific(native[0])} native, {scientific(replayed[0])} under replay; F(5): "
        f"{scientific(native[1])} and {scientific(replayed[1])}. One token of {len(before):,} is "
        f"{scientific(1 / len(before))}; lines end below that."
    )
    return panel_of(name, title, direction, reading, figure)


def _pairs(detail: Detail) -> Panel:
    name, title = "pairs", "Every sequence, native against replay"
    direction = "k3 of a sequence, nats/token, both axes log; below the line replay is nearer to the sampler"
    owners = detail.owners
    before, after = (
        policy_sums(forward.logprobs, owners.rollout_logprobs, owners.tokens, owners.sequences)["k3"] / owners.lengths
        for forward in (detail.before, detail.after)
    )
    k3 = np.concatenate([before, after])
    least, most = np.percentile(k3[k3 > 0], 2) if (k3 > 0).any() else 1e-12, max(k3.max(), 1e-11)
    figure, axes = figure_of(xlabel="native routing")
    shown = np.maximum(before, least), np.maximum(after, least)
    axes.plot([least, most], [least, most], color=INK, alpha=0.4, linewidth=1)
    axes.plot(*shown, "o", color=BLUE, markersize=3, alpha=0.35, markeredgewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel(REPLAY)
    lower, higher = int((after < before).sum()), int((after > before).sum())
    equal = owners.sequences - lower - higher
    reading = (
        f"Replay is nearer on {lower:,} sequences, farther on {higher:,}, equal on {equal:,}. "
        f"Values below {scientific(float(least))} are drawn at that value. Points at the upper right dominate the mean."
    )
    return panel_of(name, title, direction, reading, figure)


def _map(detail: Detail, decode: Callable[[list[int]], str], result: dict[str, Any]) -> Panel:
    name, title = "map", "One sequence, token by layer"
    direction = "experts of the router's own choice that are not in the recorded set; grey is none, lower is better"
    owners, top_k = detail.owners, detail.before.choices.top_k
    chosen = busiest(detail.before.choices.differs, owners.rows, range(owners.sequences), LONGEST_MAP)
    rows = np.flatnonzero(owners.rows == chosen)[: 4 * LONGEST_MAP]
    layers = [entry["layer"] for entry in result["layers"]]
    figure, both_axes = figure_of(rows=2, wide=True, height=4.4, xlabel="token that was fed")
    colors = ListedColormap([f"{GREY}22", *matplotlib.colormaps["Oranges"](np.linspace(0.35, 1, top_k))])
    counts = []
    for axes, forward, label in zip(both_axes, (detail.before, detail.after), ("native", "shadow"), strict=True):
        missing_experts = top_k - forward.choices.shared[:, rows]
        counts.append(int((missing_experts > 0).sum()))
        image = axes.pcolormesh(
            np.arange(len(rows) + 1) - 0.5, np.arange(len(layers) + 1) - 0.5, missing_experts, cmap=colors,
            vmin=-0.5, vmax=top_k + 0.5, edgecolors="none", linewidth=0,
        )  # fmt: skip
        border = int(owners.prompt[rows].sum()) - 0.5
        axes.axvline(border, color=INK, linewidth=1.2, alpha=0.7)
        axes.set_ylabel(f"{label}\nlayer")
        layers_upward(axes, layers, 8)
    tokens = [detail.token_ids[chosen][place] for place in range(len(rows))]
    if len(rows) <= LONGEST_MAP:
        both_axes[-1].set_xticks(range(len(rows)), [_shown(decode([token])) for token in tokens])
    else:
        both_axes[-1].set_xticks(range(0, len(rows), 16))
    color_bar(figure, image, list(both_axes), "experts", ticks=range(top_k + 1), fraction=0.025, pad=0.01)
    reading = (
        f"The sequence with most disagreement, out of those with at most {LONGEST_MAP} tokens: {counts[0]} of "
        f"{len(rows) * len(layers)} positions native, {counts[1]} shadow. The prompt is left of the line."
    )
    return panel_of(name, title, direction, reading, figure, wide=True)


def _shown(text: str) -> str:
    return text.replace("\n", "\\n").replace(" ", "\N{OPEN BOX}").replace("$", r"\$")[:8] or "?"


def _distances(detail: Detail) -> tuple[np.ndarray, np.ndarray]:
    sampler = detail.owners.rollout_logprobs.astype(np.float64)
    return detail.before.logprobs - sampler, detail.after.logprobs - sampler
