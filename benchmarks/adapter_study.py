"""Measures what replay does beside adapters: `python benchmarks/adapter_study.py --work DIR [--json FILE] [--write
DOCS]`.

The study repeats complete runs of the main job: all weights, and adapters of several ranks on the attention alone, on
experts too, and on experts that share their outer matrices; each without replay and with R3, with the same seeds. The
settings are those of configs/stability_study.yaml, but the sampler gets its weights in bfloat16, not in float8, which
would round most of an adapter away. DIR keeps the result of each run, and an interrupted study continues from there.
--write puts the table into adapter_study.md in the folder DOCS (docs/generated).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stability_study import MODES, result_of, spread, write_table

# Decided before the runs. The scale falls with the rank, so that one learning rate suits all ranks.
ALPHA, LEARNING_RATE = 32, 5e-4
RANKS = (1, 8, 32)
KINDS = {
    "all weights": (),
    "attention": ("train.lora.targets=[attention]",),
    "attention, experts": ("train.lora.targets=[attention, experts]",),
    "attention, experts with shared outer matrices": (
        "train.lora.targets=[attention, experts]", "train.lora.shared_outer=true",
    ),
}  # fmt: skip
REPLAY = ("off", "r3")


class Cell(NamedTuple):
    kind: str
    rank: int  # 0 for all weights
    mode: str
    seed: int

    @property
    def name(self) -> str:
        return f"{list(KINDS).index(self.kind)}-rank{self.rank}-{self.mode}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        shared = [f"replay.mode={self.mode}", f"run.seed={self.seed}", "rollout.weights=exact", "replay.native_every=3"]
        if not self.rank:
            return shared
        lora = [f"train.lora.rank={self.rank}", f"train.lora.alpha={ALPHA}", f"train.optimizer.lr={LEARNING_RATE}"]
        return [*shared, *lora, *KINDS[self.kind]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="folder that keeps the result of each run"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs, each on its own core")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="folder of adapter_study.md: docs/generated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = [("all weights", 0), *itertools.product(list(KINDS)[1:], RANKS)]
    cells = [Cell(*row, mode, seed) for seed in range(1, options.seeds + 1) for row in rows for mode in REPLAY]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = dict(zip(cells, pool.map(lambda cell: result_of(cell, options.work), cells), strict=True))
    table = markdown(runs)
    print(table)
    if options.json:
        options.json.write_text(json.dumps([cell._asdict() | run for cell, run in runs.items()], indent=1) + "\n")
    if options.write:
        write_table(table, options.write / "adapter_study.md")
    return 0


def markdown(runs: dict[Cell, dict]) -> str:
    """Return one row for each (kind, rank, mode): the mean over the seeds, and their range if there are several."""
    titles = ("trained", "rank", "replay", "routes that differ", "policy KL k3", "F(2)", "held-out pass rate, gain")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for kind, rank, mode in dict.fromkeys(cell[:3] for cell in runs):
        of_row = [run for cell, run in runs.items() if cell[:3] == (kind, rank, mode)]
        kl, f2 = (spread([run[name] for run in of_row]) for name in ("kl_mean", "f2_mean"))
        gain = spread([100 * (run["last"] - run["first"]) for run in of_row])
        routes = spread([statistics.fmean(run["series"]["mismatch"]) for run in of_row])
        lines.append(
            f"| {kind} | {rank or '-'} | {MODES[mode]} | {routes('.1%')} | {kl('.1e')} | {f2('.1e')} | {gain('+.1f')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
