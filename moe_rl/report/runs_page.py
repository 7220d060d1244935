"""Writes a page that compares several runs: their results, the config keys in which they differ, and their plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from moe_rl.disk import write_whole
from moe_rl.report import summary
from moe_rl.report.figures import COLOURS, STYLE, Panel, figure_of, in_percent, line, missing, panel_of
from moe_rl.report.format import count, duration, percent, scientific, seconds, short
from moe_rl.report.lines import RunLines, read_run
from moe_rl.report.page import Tile, render
from moe_rl.report.run_config import differing, flat, read_config

MOST = len(COLOURS)
"""Largest number of runs on one page: each has its own colour."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """Holds the data of one run for the page. `label` names it in plots. `config` is flat, by dotted key."""

    label: str
    name: str
    lines: RunLines
    results: dict[str, Any]
    config: dict[str, Any]


# (name, key of summary.json, formatter)
_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Steps", "steps", count),
    ("Held-out pass rate, first", "heldout_pass_rate_first", percent),
    ("Held-out pass rate, last", "heldout_pass_rate_last", percent),
    ("Held-out pass rate, last, greedy", "heldout_pass_rate_greedy_last", percent),
    ("Training pass rate, last step", "train_pass_rate_last", percent),
    ("Policy KL k3, mean, nats/token", "policy_kl_k3", scientific),
    ("Extreme tokens, mean", "policy_extreme_fraction", lambda value: percent(value, 3)),
    ("Routing mismatch inside replay, mean", "routing_shadow_mismatch", lambda value: percent(value, 2)),
    ("Skipped updates", "skipped_updates", count),
    ("Time of a step, median", "step_seconds_median", seconds),
    ("Time of all steps", "train_seconds_total", duration),
    ("Sampled tokens per second, median", "sampled_tokens_per_second_median", short),
    ("Trained tokens per second, median", "trained_tokens_per_second_median", short),
)

# (name, title, direction, key)
_PLOTS = (
    ("heldout", "Held-out pass rate", "fraction, higher is better", "eval/pass_rate"),
    ("reward", "Reward", "mean per completion, higher is better", "reward/mean"),
    ("kl", "Policy KL k3", "nats/token, log axis, lower is better", "policy_kl/k3"),
    ("length", "Completion length", "mean tokens", "rollout/completion_tokens_mean"),
    ("entropy", "Entropy", "nats per token", "policy/entropy"),
    ("rate", "Learning rate", "of the last update of a step", "optim/lr"),
    ("norm", "Gradient norm", "spikes are bad", "optim/grad_norm"),
    ("time", "Time of a step", "seconds, lower is better", "time/step"),
)


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a page that compares 2 to `MOST` runs, which may still be running. Returns `path`.

    Raises:
        MoeRLError: lines of a run cannot be read.
        DiskError: the page cannot be written.
    """
    runs = [_read(number, folder) for number, folder in enumerate(run_dirs, start=1)]
    with matplotlib.rc_context(STYLE):
        panels = [_panel(runs, *plot) for plot in _PLOTS]
    text = render(
        "runs.html",
        title="Runs compared - moe_rl",
        kicker="moe_rl comparison of runs",
        heading=f"{len(runs)} runs",
        facts=[run.name for run in runs],
        tiles=_tiles(runs),
        names=[run.label for run in runs],
        rows=[(name, [write(run.results.get(key)) for run in runs]) for name, key, write in _ROWS],
        differing=differing([run.config for run in runs]),
        panels=panels,
    )
    write_whole(path, text)
    return path


def _read(number: int, folder: Path) -> ReportedRun:
    lines, label = read_run(folder), f"run {number}"
    return ReportedRun(label, f"{label}: {folder}", lines, summary.measure(lines), flat(read_config(folder)))


def _tiles(runs: Sequence[ReportedRun]) -> list[Tile]:
    known = [(run.results["heldout_pass_rate_last"], run) for run in runs]
    rates = [(rate, run) for rate, run in known if rate is not None]
    if not rates:
        return [Tile("Held-out pass rate", "-", "no run has an evaluation")]
    best, run = max(rates, key=lambda rated: rated[0])
    worst = min(rate for rate, _ in rates)
    under = f"{run.label}, after step {run.results['heldout_step_last']}; the lowest is {percent(worst)}"
    return [Tile("Best last held-out pass rate", percent(best), under if len(rates) > 1 else run.label)]


def _panel(runs: Sequence[ReportedRun], name: str, title: str, direction: str, key: str) -> Panel:
    held = key.startswith("eval/")
    kind = "eval" if held else "train"
    series = [(run.label, colour, *run.lines.series(key, kind)) for run, colour in zip(runs, COLOURS, strict=False)]
    drawn = [curve for curve in series if curve[2]]
    if not drawn:
        return missing(name, title, direction, "No run has logged it.")
    figure, axes = figure_of()
    for label, colour, steps, values in drawn:
        line(axes, steps, values, colour, label, marker="o" if held else None, markersize=4)
    if "log axis" in direction and all(value > 0 for *_, values in drawn for value in values):
        axes.set_yscale("log")
    if held:
        axes.set_ylim(0, 1)
        in_percent(axes)
    written = percent if held else short
    last = ", ".join(f"{label} {written(float(f'{values[-1]:.3g}'))}" for label, _, _, values in drawn)
    return panel_of(name, title, direction, f"Last values: {last}.", figure)
