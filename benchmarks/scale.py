"""Measures what the host does at the size of a published model, with the real code on this machine:
`python benchmarks/scale.py [--model NAME ...] [--part NAME ...] [--before COMMIT] [--rounds 3] [--json FILE]`.

Every part (benchmarks/scale_parts/) takes the sizes of a model's step from its config, works through some fractions of
them with random routes, fits a law to the processor seconds, and gives what the whole step takes by this law. It runs
in a process of its own. Figures are medians over the rounds. Those of the first model are at the top of the file, those
of all under "models". The sum of what nothing overlaps is `serial_seconds_before_step`, where all its parts were
measured.

--before COMMIT: measure the moe_rl of this commit too, in turns. A key then also has a `before_<key>`, and a
    `ratio_<key>`, now : before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from output import show, write

ROOT = Path(__file__).parents[1]
PARTS = (
    "expert_counts",
    "checksums",
    "manifest",
    "recording",
    "packing_plans",
    "send_orders",
    "report_page",
    "logits_memory",
    "verdicts",
    "checkpoint_memory",
    "weight_broadcast",
)
"""Modules with a function `measured(Target) -> dict[str, float]`; a size or count is the same in every round."""
SERIAL = ("manifest_seconds_at_10000_steps", "packing_seconds", "tables_seconds", "send_orders_seconds")
"""What a rank does in turn before the first pass of a step, when the GPUs wait."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3_30b_a3b"], metavar="NAME", help="configs/NAME.yaml")
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--before", metavar="COMMIT", help="compare with the code of this commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # in the process of one part
    options = parser.parse_args()
    if options.measure:
        from scale_parts.target import Target

        (model,), (part,) = options.model, options.part
        print(json.dumps(import_module(f"scale_parts.{part}").measured(Target.of(model))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees = {"": ROOT}
        if options.before:
            trees["before_"] = _checked_out(options.before, Path(folder))
        models = {name: _measured(name, options.part, trees, options.rounds) for name in options.model}
    for name, figures in models.items():
        print(name)
        show(figures)
    write({**models[options.model[0]], "models": models}, options.json)
    return 0


def _measured(model: str, parts: list[str], trees: dict[str, Path], rounds: int) -> dict[str, float]:
    """Return the medians of a model's parts, for every tree under its prefix, and ratios to the second tree."""
    seen: dict[str, list[float]] = {}
    for part in parts:
        for number in range(rounds):
            print(f"{model}: {part}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for prefix in [*trees][:: -1 if number % 2 else 1]:
                for key, value in _run(model, part, trees[prefix]).items():
                    seen.setdefault(prefix + key, []).append(value)
    found = {key: statistics.median(values) for key, values in seen.items()}
    for prefix in trees:
        if all(prefix + key in found for key in SERIAL):
            found[f"{prefix}serial_seconds_before_step"] = sum(found[prefix + key] for key in SERIAL)
    return found | {f"ratio_{key}": found[key] / found[f"before_{key}"] for key in found if f"before_{key}" in found}


def _run(model: str, part: str, tree: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", "--model", model, "--part", part],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _checked_out(commit: str, folder: Path) -> Path:
    """Unpack the package as it was at a commit, and return its folder."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit, "moe_rl"], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
