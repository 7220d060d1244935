"""Compares the modes of `pipeline.mode`: `python benchmarks/pipeline.py --simulated [--json FILE]`.

--simulated: on a modelled cluster, see benchmarks/simulate_pipeline.py. The result is under "simulated" in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simulate_pipeline import simulated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", required=True, help="simulate a cluster")
    parser.add_argument("--ranks", type=int, default=64, help="GPUs of the simulated cluster, a multiple of 16")
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each mode, with other lengths")
    parser.add_argument("--steps", type=int, default=24, help="simulated steps after the warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = {"simulated": simulated(ranks=options.ranks, seeds=options.seeds, steps=options.steps)}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
