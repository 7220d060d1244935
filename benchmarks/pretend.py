"""Runs the code for GPUs on a pretend CUDA device, and counts how often the host waits for the device:
`python benchmarks/pretend.py [--json FILE]`.

Two expert-parallel ranks train one step in bfloat16 (optimizer, data parallelism, dispatch plans, guards), take the
digests of the weights and hand them over. Then faults are planted into a step and into the recorder, each of which must
be noticed. `docs/measurements/gpu.md` has the table and says what a pretend device does not show.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from output import tell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # to import `tests` and `tools.dev`

from moe_rl.parent import torchrun  # noqa: E402
from moe_rl.proof.batch import make_checkpoint  # noqa: E402
from tools.dev.runs import python_path  # noqa: E402

RANKS = 2
SETTINGS = ("parallel.expert=2", "train.dtype=bfloat16")

BUDGET = {
    "layer": ("layer, forward and backward", 0),
    "microbatch": ("microbatch and pass", 0),
    "packing": ("microbatch, before the passes", 1),
    "thread": ("microbatch, in the thread that makes the plans", 0),
    "pass": ("pass", 7),
    "update": ("update, besides its pass", 20),
    "norm": ("parameter and update, without TransformerEngine", 1),
    "step": ("step, of two updates", 44),
}
"""{level: (what it is counted for, how often the host may wait in it)}."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe_rl-pretend-") as folder:
        result = measure(make_checkpoint(Path(folder) / "model"), Path(folder))
    for level, (what, most) in BUDGET.items():
        print(f"the host waits {result['waits'][level]:g} times for each {what}; at most {most}")
    tell(result, options.json)
    return 0


def measure(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run the step, and plant the faults."""
    from tests.support.pretend_plants import noticed

    script = ROOT / "tests/support/pretend_ranks.py"
    subprocess.run(
        [*torchrun(RANKS), str(script), str(folder), str(checkpoint), *SETTINGS],
        env=os.environ | python_path() | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        check=True,
    )
    seen = json.loads((folder / "seen.json").read_text())
    recorder = noticed(folder / "recorder")
    faults = [*seen["faults"], *filter(None, [recorder.pop("nothing")])]
    plants = seen["plants"] | {name: bool(how) for name, how in recorder.items()}
    total, counts = Counter[str](), seen["counts"]
    for level, _, _, number in seen["syncs"]:
        total[level] += number
    of = {"microbatch": "forwards", "packing": "packed", "thread": "packed", "pass": "passes", "update": "updates"}
    waits = {level: total[level] / (counts[of[level]] if level in of else 1) for level in BUDGET}
    waits["norm"] /= counts["updates"] * counts["parameters"]
    return {
        "host_syncs_in_layers": total["layer"],
        "plants": len(plants),
        "plants_caught": sum(plants.values()),
        "not_noticed": sorted(name for name, caught in plants.items() if not caught),
        "faults": faults,
        "waits": waits,
        "places": seen["syncs"],
        "counts": counts,
        "weights": seen["weights"],
        "proof": seen["proof"],
        "metrics": seen["metrics"],
    }


def table() -> list[str]:
    """Return the table of docs/measurements/gpu.md."""
    rows = [f"| {what} | {most} |" for what, most in BUDGET.values()]
    return ["| for each | the host waits at most |", "|---|---|", *rows]


if __name__ == "__main__":
    sys.exit(main())
