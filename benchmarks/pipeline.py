"""Compares the modes of `pipeline.mode`: `python benchmarks/pipeline.py [--rounds 1] [--steps 6] [--json FILE]`.

It runs the demo in every mode, see benchmarks/pipeline_runs.py, and prints the ratios to sync:

    ratio_one_step_off_to_sync, ratio_async_to_sync                     as the demo is
    ratio_one_step_off_to_sync_latency, ratio_async_to_sync_latency     with verifiers that take a long-tailed time

--simulated: compare them on a modelled cluster instead, see benchmarks/simulate_pipeline.py. The result is then under
"simulated" in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from output import write
from pipeline_runs import measured
from simulate_pipeline import simulated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode")
    parser.add_argument("--simulated", action="store_true", help="simulate a cluster, and run nothing")
    parser.add_argument("--ranks", type=int, default=64, help="GPUs of the simulated cluster, a multiple of 16")
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each mode, with other lengths")
    parser.add_argument("--steps", type=int, help="steps of a run after the warm-up: by default 6, simulated 24")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not options.simulated:
        write(measured(rounds=options.rounds, steps=options.steps or 6), options.json)
        return 0
    result = {"simulated": simulated(ranks=options.ranks, seeds=options.seeds, steps=options.steps or 24)}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
