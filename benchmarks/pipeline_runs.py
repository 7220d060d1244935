"""Measures the modes of `pipeline.mode` on this machine: real vLLM, two Megatron ranks, the demo's config.

Every mode runs as it is, and with verifiers that take a long-tailed time (slow_verifier.py). A round runs every mode
once, with sync between the two others, and every second round goes backwards, so that other work on the machine
disturbs all alike. A run is ended as soon as it has taken its steps. The first WARMUP steps count for nothing: all
modes begin with an empty pipeline.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from output import quartiles

from moe_rl.config.load import load_config
from moe_rl.report.timeline import Window, idle_share, read_timeline, windows

BENCHMARKS = Path(__file__).parent
CONFIG = BENCHMARKS.parent / "configs/tiny_moe_cpu.yaml"
MODES = {
    "one_step_off": ["pipeline.mode=one_step_off"],
    "sync": ["pipeline.mode=sync"],
    "async": ["pipeline.mode=async", "pipeline.max_staleness=1"],
}
CONDITIONS = {
    "": [],
    "_latency": [
        "task.rewards.exact_match.function=slow_verifier.exact_match",
        "task.verifier_workers=64",
        "task.verifier_timeout_seconds=60",
    ],
}
"""Settings by the end of a ratio's name: as they are, and with slow verifiers."""
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Speed:
    """Holds what a mode did after its warm-up, in all rounds.

    Attributes:
        step_seconds: of each measured step.
        sampler_idle, trainer_idle: shares of the time.
    """

    groups_per_second: float
    sampler_idle: float
    trainer_idle: float
    step_seconds: list[float] = field(default_factory=list)


def measured(*, rounds: int, steps: int) -> dict[str, object]:
    """Run every mode, print a table, and return the ratios to sync by name, and under "measured" all speeds.

    Args:
        steps: of each run that are measured, after the warm-up.
    """
    groups = load_config(CONFIG).rollout.prompts_per_step
    found: dict[tuple[str, str], list[list[Window]]] = {(end, mode): [] for end in CONDITIONS for mode in MODES}
    for number in range(rounds):
        for end, mode in list(found)[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {rounds}: {mode}{end}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                found[end, mode].append(_windows(Path(folder), [*MODES[mode], *CONDITIONS[end]], WARMUP + steps))
    speeds = {key: speed([one[WARMUP:] for one in runs], groups) for key, runs in found.items()}
    print(table(speeds))
    return ratios(speeds) | {"measured": {f"{mode}{end}": asdict(one) for (end, mode), one in speeds.items()}}


def speed(runs: Sequence[Sequence[Window]], groups: int) -> Speed:
    """Return the speed of a mode.

    Args:
        runs: the measured steps of each round.
        groups: number of groups of a step.
    """
    steps = list(chain.from_iterable(runs))
    seconds = [one.end - one.begin for one in steps]
    idle = (idle_share(steps, side) for side in ("sampler", "trainer"))
    return Speed(groups * len(steps) / sum(seconds), *idle, seconds)


def ratios(speeds: dict[tuple[str, str], Speed]) -> dict[str, object]:
    """Return the ratios of groups per second to those of sync, each with the quartiles of the ratios step by step."""
    result: dict[str, object] = {}
    for (end, mode), one in speeds.items():
        if mode != "sync":
            sync, name = speeds[end, "sync"], f"ratio_{mode}_to_sync{end}"
            pairs = [a / b for a, b in zip(sync.step_seconds, one.step_seconds, strict=True)]
            low, _, high = quartiles(pairs)
            result[name] = one.groups_per_second / sync.groups_per_second
            result[f"{name}_quartiles"] = [low, high]
    return result


def table(speeds: dict[tuple[str, str], Speed]) -> str:
    """Return the speeds as a table in Markdown."""
    found = ratios(speeds)
    rows = [
        ["verifiers", "mode", "groups/s", "s a step", "ratio to sync", "samplers idle", "trainers idle"],
        ["---"] * 7,
    ]
    for (end, mode), one in speeds.items():
        ratio = "1"
        if mode != "sync":
            name = f"ratio_{mode}_to_sync{end}"
            low, high = found[f"{name}_quartiles"]
            ratio = f"{found[name]:.2f} ({low:.2f} - {high:.2f})"
        rows.append(
            [
                "slow" if end else "as they are",
                mode,
                f"{one.groups_per_second:.2f}",
                f"{statistics.mean(one.step_seconds):.1f}",
                ratio,
                f"{one.sampler_idle:.0%}",
                f"{one.trainer_idle:.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _windows(folder: Path, settings: Sequence[str], steps: int) -> list[Window]:
    """Return the first steps of a run."""
    sys.path.insert(0, str(BENCHMARKS.parent))  # to import `tools.dev`
    from tools.dev.runs import Launch

    paths = os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)])
    launch = Launch(
        folder,
        *("--config", CONFIG, f"run.runs_dir={folder}", f"run.steps={steps + 2}", "eval.prompts=8", *settings),
        environment={"PYTHONPATH": paths},
    )
    try:
        launch.until(lambda: re.search(rf"\n\s*{steps}/", launch.text()), timeout=900)
    finally:
        launch.kill()
    return windows(read_timeline(launch.folder))[:steps]
