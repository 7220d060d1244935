"""Counts false alarms and missed faults of the checks of a run, over healthy and faulty data of many shapes.

    python -m benchmarks.alarms --json FILE [--passes N] [--rollouts N] [--runs N] [--faults N] [--seed S]

Synthetic passes come in chains of eight, which share a shape, a model and the history of the alignment test, as the
steps of a run do. Half of the chains have one of the named shapes of alarm_parts/zoo.py, the others drawn ones; three
in four of these have weights that are older than the trainer's. Rollouts, in chains of four, are of real tiny models of
every family, whose weights moved by updates (alarm_parts/models.py). Each pass is judged by the alignment test and by
the rules of trace/variety.py. The canary's comparison judges 256 rows of the first pass of each chain without older
weights. Faults are planted into the first pass of a chain, and judged without a history. A fault counts as planted if
it changes a quarter of the ids in at least 80% of the rows that it is about: equal rows of other places are no fault.
It is missed if nothing is refused. It is "missed with power" if the claim that is about it was proven on the same pass
before. Runs train such a model for six steps, and every other guard judges each step: second witness, canary,
conservation, lag 0 and collapse (alarm_parts/guards.py).

The results are written every minute. With an existing FILE the benchmark goes on from it.

Keys: healthy_passes, rollouts, runs, false_alarms, false_alarm_bound (that the sample allows, with 95% confidence),
faults_planted, faults_missed, faults_missed_with_power, proven_share and proven_share_fine (of the core and the other
claims, in the passes with a shape of a shipped config; of one pass each), by_claim, by_fault, by_shape, by_guard
(checks of healthy data, alarms among them, faults, misses among them), cpu, processor_seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repository root, to import `benchmarks`

from benchmarks.alarm_parts.faults import FAULTS
from benchmarks.alarm_parts.models import Setting, rollouts, settings
from benchmarks.alarm_parts.zoo import MODELS, NAMED, SHIPPED, Pass, drawn, healthy
from moe_rl.replay.claims import CORE, FINE, PASSES, History

CHAIN = 8
_PER_PASS = 3


def main() -> None:
    """Run what is missing, and print and write what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the results; a run goes on from it")
    parser.add_argument("--passes", type=int, default=10_000, help="synthetic passes")
    parser.add_argument("--rollouts", type=int, default=len(settings()), help="chains of rollouts of real models")
    parser.add_argument("--runs", type=int, default=len(settings()), help="runs of real models with the other guards")
    parser.add_argument("--faults", type=int, default=600, help="faults to plant, at most three into a pass")
    parser.add_argument("--seed", type=int, default=0, help="of the first pass")
    given = parser.parse_args()
    torch.set_num_threads(1)
    count, written = _Count(), time.monotonic()
    if given.json.exists():
        earlier = json.loads(given.json.read_text())
        if earlier.get("chain") != CHAIN:
            raise SystemExit(f"{given.json} is of another version of this benchmark: give a new file")
        count.restore(earlier["state"])
    wanted = settings()[: given.rollouts]
    for number in range(count.rollouts // PASSES, len(wanted)):
        name, history = f"{wanted[number].family}, {'trained' if wanted[number].trained else 'random'}", History()
        for step, one in enumerate(rollouts(wanted[number], given.seed + number)):
            count.add(name, one, given.seed + number, history, first=step == 0, plant=step == 0)
            count.rollouts += 1
        count.write(given.json)
    for number in range(count.runs, min(given.runs, len(settings()))):
        count.run(settings()[number], given.seed + number)
        count.write(given.json)
    done = count.passes - count.rollouts
    begun = (given.seed + done) % CHAIN if done < given.passes else 0  # a chain was left in the middle
    for number in range(max(0, done - begun), done):
        count.synthetic(given.seed + number, plant=False, again=True)
    for number in range(done, given.passes):
        planted = sum(one["planted"] for one in count.faults.values())
        count.synthetic(given.seed + number, plant=planted < given.faults)
        if time.monotonic() > written + 60:
            count.write(given.json)
            written = time.monotonic()
            said = f"{number + 1} passes, {count.alarms} false alarms, {count.missed_proven} faults missed with power"
            print(said, flush=True)
    count.write(given.json)
    print(json.dumps({key: one for key, one in count.result().items() if not isinstance(one, dict)}, indent=1))


class _Count:
    """Counts over passes."""

    def __init__(self) -> None:
        self.passes = self.rollouts = self.runs = self.alarms = self.planted = self.missed_proven = 0
        self.seconds, self._began = 0.0, time.process_time()
        self.claims: dict[str, Counter[str]] = {name: Counter() for name in CORE + FINE}
        self.shapes: dict[str, Counter[str]] = {}
        self.faults: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
        self.guards: dict[str, Counter[str]] = {}
        self._history = History()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what an earlier run counted."""
        for name, value in state.items():
            counters = isinstance(value, dict)
            setattr(self, name, {of: Counter(one) for of, one in value.items()} if counters else value)

    def write(self, file: Path) -> None:
        """Write the results, whole or not at all."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(self.result(), indent=1))
        part.replace(file)

    def synthetic(self, seed: int, *, plant: bool, again: bool = False) -> None:
        """Judge a healthy pass of the zoo. One in 36 has the shape of a large model, which takes ten times as long.
        again: only for the history, since the pass was counted before.
        """
        chain, step = divmod(seed, CHAIN)
        if step == 0:
            self._history = History()
        turn, drawn_shape = divmod(chain, 2)
        small, large = [name for name in NAMED if name not in MODELS], [*MODELS]
        at = turn % (len(small) + 1)
        name = small[at] if at < len(small) else large[turn // (len(small) + 1) % len(large)]
        name, shape = ("drawn", drawn(chain)) if drawn_shape else (name, NAMED[name])
        one = healthy(shape, chain, step)
        if again:
            one.judge(history=self._history)
        else:
            self.add(name, one, seed, self._history, first=step == 0, plant=plant and step == 0)

    def run(self, setting: Setting, seed: int) -> None:
        """Let the other guards judge a run."""
        from benchmarks.alarm_parts.guards import run as guard_checks  # loads Megatron

        for guard, fault, refused in guard_checks(setting, seed):
            found = self.guards.setdefault(guard, Counter())
            if fault:
                found.update(faults=1, missed=not refused)
            else:
                found.update(checks=1, alarms=refused)
            self.planted += bool(fault)
            self.missed_proven += bool(fault) and not refused
            self.alarms += refused and not fault
            if refused != bool(fault):
                print(
                    f"{'missed' if fault else 'false alarm'} in run {seed} by {guard} {fault}\n  {setting}", flush=True
                )
        self.runs += 1

    def add(self, name: str, one: Pass, seed: int, history: History, *, first: bool, plant: bool) -> None:
        """Judge a healthy pass and, with `plant`, the same pass with some faults. name: of its shape. first: of its
        chain."""
        found = one.judge(history=history)
        status = {claim.name: claim.status for claim in found.claims}
        alarms = [*found.faults, *(() if one.varied() else ["no variety"])]
        if first and not one.lag.any():
            heard = one.canary()
            self.guards.setdefault("canary", Counter()).update(checks=1, alarms=bool(heard))
            alarms += heard
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
            "runs": self.runs,
            "false_alarms": self.alarms,
            "false_alarm_bound": 1 - 0.05 ** (1 / self.passes) if self.passes and not self.alarms else None,
            "faults_planted": self.planted,
            "faults_missed": sum(one["missed"] for one in (*self.faults.values(), *self.guards.values())),
            "faults_missed_with_power": self.missed_proven,
            "proven_share": share(CORE),
            "proven_share_fine": share(FINE),
            "by_claim": self.claims,
            "by_fault": self.faults,
            "by_shape": self.shapes,
            "by_guard": self.guards,
            "cpu": _cpu(),
            "processor_seconds": self._spent(),
            "chain": CHAIN,
            "state": {name: getattr(self, name) for name in vars(self) if name[0] != "_"} | {"seconds": self._spent()},
        }

    def _spent(self) -> float:
        return self.seconds + time.process_time() - self._began


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
