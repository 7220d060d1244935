"""Plants faults into trainers and causes into engines, and counts how many `moe_rl.audit` and `moe_rl.bisect` name.

    python -m benchmarks.diagnosis --json FILE [--seeds N]

Each fault of diagnosis_parts/own_replay.py is planted into a trainer on megatron-core's own replay, with each seed. It
counts as named if the audit gives its name first in every seed. Sound trainers of every layout are audited too;
whatever is named there is a false alarm.

Each cause of diagnosis_parts/causes.py, also two at once, is planted into the sampler and into the trainer. It counts
as found if exactly these causes are found, on this side, in every seed.

Keys: faults_planted, faults_named, healthy_steps, false_alarms, claims_proven (share of the claims about the records of
sound trainers that are proven, not weak), by_fault, by_layout, causes_planted, causes_found, by_cause,
processor_seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.megatron import world

# Enough rows for every claim, also that two experts are not exchanged. A rank of two has half of the rows.
SIZE = {"layers": 4, "sequences": 8, "width": 64, "microbatches": 6}
ROOM = {
    "dense layers": {"layers": 5},
    "context parallel": {"sequences": 16, "width": 80, "microbatches": 8},
    "many experts": {"sequences": 16, "microbatches": 12},
    "one sequence": {"sequences": 1, "microbatches": 80},
    "virtual stages": {"microbatches": 8},
}


def main() -> None:
    """Plant the faults, and print and write what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--seeds", type=int, default=3, help="models and batches for each fault and layout")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    world.start(ParallelConfig(), seed=1, timeout_seconds=60)
    result = measure(given.seeds)
    world.stop()
    result |= causes(given.seeds) | {"processor_seconds": time.process_time() - began}
    given.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if not isinstance(value, dict)}, indent=1))


def measure(seeds: int) -> dict[str, object]:
    """Return the keys of the result."""
    from benchmarks.diagnosis_parts.own_replay import LAYOUTS, PLANTED, healthy  # behind the CPU back end

    by_fault = {}
    for fault, (name, plant) in PLANTED.items():
        told = [plant(seed).names for seed in range(seeds)]
        by_fault[fault] = {"name": name, "told": told, "named": all(names[:1] == [name] for names in told)}
        print(f"{fault}: {', '.join(told[0]) or 'nothing'}", flush=True)
    by_layout, proven, claims = {}, 0, 0
    for layout in LAYOUTS:
        reports = [healthy(layout, seed, **SIZE | ROOM.get(layout, {})) for seed in range(seeds)]
        found = [claim for one in reports for claim in one.record.claims]
        proven, claims = proven + sum(one.status == "proven" for one in found), claims + len(found)
        by_layout[layout] = {
            "alarms": [one.names for one in reports if one.names],
            "weak": sorted({one.name for one in found if one.status == "weak"}),
        }
        print(f"{layout}: {by_layout[layout]}", flush=True)
    return {
        "faults_planted": len(by_fault),
        "faults_named": sum(one["named"] for one in by_fault.values()),
        "healthy_steps": seeds * len(LAYOUTS),
        "false_alarms": sum(len(one["alarms"]) for one in by_layout.values()),
        "claims_proven": proven / claims,
        "by_fault": by_fault,
        "by_layout": by_layout,
    }


def causes(seeds: int) -> dict[str, object]:
    """Return the keys of the result about causes."""
    from benchmarks.diagnosis_parts.causes import NOISE, PLANTED, QUIET, Batch, found

    by_cause: dict[str, dict] = {
        name: {"settings": planted, "wrong": []} for name, planted in (PLANTED | QUIET).items()
    }
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            batch = Batch(Path(folder), seed)
            for (name, planted), side in itertools.product((PLANTED | QUIET).items(), ("sampler", "trainer")):
                told = found(batch.bisected(planted, side, 0.0 if name in QUIET else NOISE))
                if told != {side: planted}:
                    by_cause[name]["wrong"].append({"seed": seed, "side": side, "found": told})
    for name, one in by_cause.items():
        print(f"{name}: {one['wrong'] or 'found'}", flush=True)
    counted = {"causes_planted": len(by_cause), "causes_found": sum(not one["wrong"] for one in by_cause.values())}
    return counted | {"by_cause": by_cause}


if __name__ == "__main__":
    main()
