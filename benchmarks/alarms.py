"""Counts false alarms and missed faults of the tests of recorded routes, over passes of many shapes.

    python -m benchmarks.alarms --json FILE [--passes N] [--rollouts N] [--faults N] [--seed S]

Half of the synthetic passes have one of the named shapes of alarm_parts/zoo.py, the others drawn ones; three in four of
these have weights that are older than the trainer's. Rollouts are of real tiny models of every family, whose weights
moved by updates (alarm_parts/models.py). Each pass is judged by the alignment test and by the rules of
trace/variety.py. A fault counts as planted if it changes a quarter of the ids in at least 80% of the rows that it is
about: equal rows of other places are no fault. It is missed if nothing is refused. It is "missed with power" if the
claim that is about it was proven on the same pass before.

Keys: healthy_passes, rollouts, false_alarms, false_alarm_bound (that the sample allows, with 95% confidence),
faults_planted, faults_missed, faults_missed_with_power, proven_share and proven_share_fine (of the core and the other
claims, in the passes with a shape of a shipped config; of one pass each), by_claim, by_fault, by_shape, cpu.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from benchmarks.alarm_parts.faults import FAULTS
from benchmarks.alarm_parts.models import rollout, settings
from benchmarks.alarm_parts.zoo import NAMED, SHIPPED, Pass, drawn, healthy
from moe_rl.replay.claims import CORE, FINE

_PER_PASS = 3


def main() -> None:
    """Run the passes, and print and write what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--passes", type=int, default=10_000, help="synthetic passes")
    parser.add_argument("--rollouts", type=int, default=len(settings()), help="rollouts of real models")
    parser.add_argument("--faults", type=int, default=600, help="faults to plant, at most three into a pass")
    parser.add_argument("--seed", type=int, default=0, help="of the first pass")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, count = time.process_time(), _Count()
    for number, setting in enumerate(settings()[: given.rollouts]):
        name = f"{setting.family}, {'trained' if setting.trained else 'random'}"
        count.add(name, rollout(setting, given.seed + number), given.seed + number, plant=True)
        count.rollouts += 1
    for number in range(given.passes):
        count.synthetic(given.seed + number, plant=count.planted < given.faults)
        if (number + 1) % 100 == 0:
            said = f"{number + 1} passes, {count.alarms} false alarms, {count.missed_proven} faults missed with power"
            print(said, flush=True)
    seconds = time.process_time() - began
    result = count.result() | {"processor_seconds": seconds}
    given.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if not isinstance(value, dict)}, indent=1))


class _Count:
    """Counts over passes."""

    def __init__(self) -> None:
        self.passes = self.rollouts = self.alarms = self.planted = self.missed_proven = 0
        self.claims: dict[str, Counter[str]] = {name: Counter() for name in CORE + FINE}
        self.shapes: dict[str, Counter[str]] = {}
        self.faults: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}

    def synthetic(self, seed: int, *, plant: bool) -> None:
        """Judge a healthy pass of the zoo."""
        names = [*NAMED]
        name = names[seed // 2 % len(names)] if seed % 2 else "drawn"
        self.add(name, healthy(NAMED[name] if seed % 2 else drawn(seed), seed), seed, plant=plant)

    def add(self, name: str, one: Pass, seed: int, *, plant: bool) -> None:
        """Judge a healthy pass and, with `plant`, the same pass with some faults. name: of its shape."""
        found = one.judge()
        status = {claim.name: claim.status for claim in found.claims}
        alarms = [*found.faults, *(() if one.varied() else ["no variety"])]
        self.passes += 1
        shape = self.shapes.setdefault(name, Counter())
        shape.update(passes=1, alarms=bool(alarms))
        shape.update(f"proven {claim}" for claim, of in status.items() if of == "proven")
        for claim, of in status.items():
            self.claims[claim][of] += 1
        if alarms:
            self.alarms += 1
            print(f"false alarm in pass {seed} ({name}): {'; '.join(alarms[:3])}\n  {one.shape}")
        rng = np.random.default_rng(seed)
        for fault in rng.choice([*FAULTS], _PER_PASS, replace=False).tolist() if plant else []:
            self._plant(one, fault, status, seed)

    def _plant(self, one: Pass, fault: str, status: dict[str, str], seed: int) -> None:
        claim, plant = FAULTS[fault]
        rng = np.random.default_rng([seed, 1])
        record = plant(one, rng)
        if record is None or (record == one.record).all():
            return
        missed, proven = not one.judge(record).faults, status[claim] == "proven"
        self.planted += 1
        self.missed_proven += missed and proven
        self.faults[fault].update(planted=1, missed=missed, proven=proven, missed_with_power=missed and proven)
        if missed and proven:
            print(f"missed with power in pass {seed}: {fault}\n  {one.shape}")

    def result(self) -> dict[str, object]:
        """Return the keys of the JSON file."""
        shipped = [self.shapes[name] for name in SHIPPED if name in self.shapes]

        def share(names: tuple[str, ...]) -> float:
            proven = sum(shape[f"proven {name}"] for shape in shipped for name in names)
            return proven / max(1, len(names) * sum(shape["passes"] for shape in shipped))

        return {
            "healthy_passes": self.passes,
            "rollouts": self.rollouts,
            "false_alarms": self.alarms,
            "false_alarm_bound": 1 - 0.05 ** (1 / self.passes) if not self.alarms else None,
            "faults_planted": self.planted,
            "faults_missed": sum(one["missed"] for one in self.faults.values()),
            "faults_missed_with_power": self.missed_proven,
            "proven_share": share(CORE),
            "proven_share_fine": share(FINE),
            "by_claim": self.claims,
            "by_fault": self.faults,
            "by_shape": self.shapes,
            "cpu": _cpu(),
        }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
