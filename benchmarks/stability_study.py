"""Tests whether replay keeps a run stable: `python benchmarks/stability_study.py --work DIR [--json FILE] [--write
DOCS]`.

The study repeats complete runs of the main job with GRPO and GSPO, without replay, with R2 and with R3, with 1, 2 and 4
updates per rollout batch, each with several seeds. As configs/stability_study.yaml says, the sampler has a lower
precision than the trainer. DIR keeps the result of each run, and an interrupted study continues from there. --write
puts the table and the plots into stability_study.md and beside it, in the folder DOCS (docs/generated).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from moe_rl.parent import torchrun
from moe_rl.report.figures import BLUE, GREEN, ORANGE
from moe_rl.report.lines import read_run

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/stability_study.yaml"
OBJECTIVES = {
    "grpo": ("objective.name=grpo", "objective.clip_low=0.2", "objective.clip_high=0.2"),
    "gspo": ("objective.name=gspo",),
}
MODES = {"off": "none", "r2": "R2", "r3": "R3"}
COLORS = {"off": ORANGE, "r2": GREEN, "r3": BLUE}
UPDATES = (1, 2, 4)
SERIES = {
    "kl": "policy_kl/k3",
    "f2": "policy/extreme_fraction",
    "reward": "reward/mean",
    "clip": "objective/clip_fraction",
    "mismatch": "routing/native_mismatch",
}
MARKERS = "<!-- study: begin -->", "<!-- study: end -->"

# Decided before the runs: a run is lost when its pass rate falls far, or when sampler and trainer disagree about one
# token in ten.
LOST_PASS_RATE = 0.5
LOST_F2 = 0.1


class Cell(NamedTuple):
    objective: str
    mode: str
    updates: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-{self.mode}-{self.updates}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        of_cell = [f"replay.mode={self.mode}", f"train.updates_per_step={self.updates}", f"run.seed={self.seed}"]
        return [*OBJECTIVES[self.objective], *of_cell]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="folder that keeps the result of each run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs, each on its own core")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="folder of stability_study.md: docs/generated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    cells = [Cell(*c) for c in itertools.product(OBJECTIVES, MODES, UPDATES, range(1, options.seeds + 1))]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = dict(zip(cells, pool.map(lambda cell: result_of(cell, options.work), cells), strict=True))
    table = markdown(runs)
    print(table)
    if options.json:
        options.json.write_text(json.dumps([cell._asdict() | run for cell, run in runs.items()], indent=1) + "\n")
    if options.write:
        write(runs, table, options.write)
    return 0


def result_of(cell, work: Path, **how) -> dict[str, object]:
    """Return the result of one run of the main job, from DIR if it is there; else make the run.

    Args:
        cell: has the run's `name`, and `overrides` of the shared settings.
        **how: arguments of `run_once`.
    """
    kept = work / f"{cell.name}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            run_once(cell, Path(folder), work / f"{cell.name}.log", **how)
            (run_dir,) = (path for path in Path(folder).iterdir() if path.is_dir())
            unfinished = kept.with_suffix(".tmp")
            unfinished.write_text(json.dumps(measure(run_dir)) + "\n")
            unfinished.replace(kept)
        print(f"done: {cell.name}", file=sys.stderr, flush=True)
    return json.loads(kept.read_text())


def run_once(
    cell, folder: Path, log: Path, *, config: Path = CONFIG, ranks: int = 1, script: str = "tools/train_moe_rl.py"
) -> None:
    given = ["--config", str(config), *cell.overrides, f"run.runs_dir={folder}"]
    command = [*torchrun(ranks), script, *given]
    with log.open("w") as out:
        status = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
    if status:
        raise SystemExit(f"{cell.name} ended with status {status}, see {log}")


def measure(run_dir: Path) -> dict[str, object]:
    """Return the numbers of one run."""
    run = read_run(run_dir)
    series = {name: run.series(key)[1] for name, key in SERIES.items()}
    rates = run.series("eval/pass_rate", "eval")[1]
    applied = run.series("routing/applied_mismatch")[1]
    return {
        "first": rates[0],
        "last": rates[-1],
        "kl_mean": statistics.fmean(series["kl"]),
        "kl_max": max(series["kl"]),
        "f2_mean": statistics.fmean(series["f2"]),
        "f2_max": max(series["f2"]),
        "applied_mismatch": sum(applied) if applied else None,
        "skipped": sum(run.series("optim/skipped")[1]),
        "lost": rates[-1] < LOST_PASS_RATE * rates[0] or max(series["f2"]) > LOST_F2,
        "series": series,
    }


def markdown(runs: dict[Cell, dict]) -> str:
    """Return one row for each (objective, updates, mode): mean, minimum and maximum over the seeds."""
    titles = ("objective", "updates", "replay", "policy KL k3", "F(2)", "held-out pass rate, end", "runs lost")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for objective, updates, mode in itertools.product(OBJECTIVES, UPDATES, MODES):
        of_row = [run for cell, run in runs.items() if cell[:3] == (objective, mode, updates)]
        kl, f2, last = (spread([run[name] for run in of_row]) for name in ("kl_mean", "f2_mean", "last"))
        lost = sum(run["lost"] for run in of_row)
        lines.append(
            f"| {objective} | {updates} | {MODES[mode]} | {kl('.1e')} | {f2('.1e')} | {last('.1%')} "
            f"| {lost} of {len(of_row)} |"
        )
    return "\n".join(lines)


def spread(values: list[float]):
    """Return a function that formats the mean of `values`, with their range if there are several, in a given number
    format."""
    if len(values) == 1:
        return lambda form: f"{values[0]:{form}}"
    return lambda form: f"{statistics.fmean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def write(runs: dict[Cell, dict], table: str, docs: Path) -> None:
    write_table(table, docs / "stability_study.md")
    for name, label, scale in (
        ("kl", "policy KL k3, nats/token", "log"),
        ("f2", "F(2), mean so far", "linear"),
        ("reward", "mean reward", "linear"),
    ):
        draw(runs, name, label, scale, docs / f"stability_{name}.svg")


def write_table(table: str, page: Path) -> None:
    """Put a table between the markers of a page."""
    begin, end = MARKERS
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the markers {begin} and {end}")
    page.write_text(f"{head}{begin}\n\n{table}\n\n{end}{tail}", encoding="utf-8")


def draw(runs: dict[Cell, dict], name: str, label: str, scale: str, file: Path) -> None:
    """Draw small multiples: one row per objective, one column per number of updates.

    Thin lines are single seeds, thick lines their mean.
    """
    style = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 4.8), layout="constrained")
        grid = figure.subplots(len(OBJECTIVES), len(UPDATES), sharex=True, sharey=True)
        for (row, objective), (column, updates) in itertools.product(enumerate(OBJECTIVES), enumerate(UPDATES)):
            axes = grid[row][column]
            axes.set_title(f"{objective}, {updates} update{'s' if updates > 1 else ''} per batch", fontsize=9)
            for mode in MODES:
                lines = [r["series"][name] for cell, r in runs.items() if cell[:3] == (objective, mode, updates)]
                if name == "f2":  # on most steps the value is 0
                    sums = [itertools.accumulate(line) for line in lines]
                    lines = [[total / step for step, total in enumerate(each, start=1)] for each in sums]
                for line in lines:
                    axes.plot(range(1, len(line) + 1), line, color=COLORS[mode], alpha=0.3, linewidth=0.8)
                mean = [statistics.fmean(column) for column in zip(*lines, strict=False)]
                axes.plot(range(1, len(mean) + 1), mean, color=COLORS[mode], linewidth=2, label=MODES[mode])
            axes.set_yscale(scale)
            axes.grid(alpha=0.2)
            if row == len(OBJECTIVES) - 1:
                axes.set_xlabel("step")
            if column == 0:
                axes.set_ylabel(label)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(MODES), frameon=False, title="replay")
        with file.open("w", encoding="utf-8") as out:
            FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    sys.exit(main())
