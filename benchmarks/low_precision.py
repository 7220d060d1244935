"""Measures what gradients and Adam's moments in bfloat16 do to learning: `python benchmarks/low_precision.py --work DIR
[--json FILE]`.

The study repeats the demo with bfloat16 weights and three settings, each with several seeds: gradients and moments in
float32, gradients in bfloat16 (`grad_reduce_in_fp32: false`), and moments in bfloat16 too. Moments below float32 need
TransformerEngine, which needs a GPU, so low_precision_rank.py rounds them on the CPU. DIR keeps the result of each run,
and an interrupted study continues from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from stability_study import ROOT, result_of, spread

_GRADIENTS = "train.megatron_optimizer={grad_reduce_in_fp32: false}"
_SCRIPTS = {"float32": "tools/train_moe_rl.py", "bfloat16": "benchmarks/low_precision_rank.py"}


class Cell(NamedTuple):
    gradients: str
    moments: str
    seed: int

    @property
    def name(self) -> str:
        return f"gradients-{self.gradients}-moments-{self.moments}-seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        shared = ["train.dtype=bfloat16", f"run.seed={self.seed}"]
        return shared if self.gradients == "float32" else [*shared, _GRADIENTS]


SETTINGS = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="folder that keeps the result of each run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    runs = {}
    for cell in [Cell(*setting, seed) for seed in range(1, options.seeds + 1) for setting in SETTINGS]:
        config = ROOT / "configs/tiny_moe_cpu.yaml"
        runs[cell] = result_of(cell, options.work, config=config, ranks=2, script=_SCRIPTS[cell.moments])
    print(markdown(runs))
    if options.json:
        options.json.write_text(json.dumps([cell._asdict() | run for cell, run in runs.items()], indent=1) + "\n")
    return 0


def markdown(runs: dict[Cell, dict]) -> str:
    """Return one row for each setting: the mean over the seeds, and their range if there are several."""
    titles = ("gradients", "moments", "held-out pass rate, end", "mean reward, last ten steps", "policy KL k3")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for setting in SETTINGS:
        of_row = [run for cell, run in runs.items() if cell[:2] == setting]
        last, kl = (spread([run[name] for run in of_row]) for name in ("last", "kl_mean"))
        reward = spread([statistics.fmean(run["series"]["reward"][-10:]) for run in of_row])
        lines.append(f"| {' | '.join(setting)} | {last('.1%')} | {reward('.3f')} | {kl('.1e')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
