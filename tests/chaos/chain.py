"""One run that meets fault after fault, is resumed after each, and in the end is the run that nobody touched."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.plants import RANK, WAITS, arm, witnesses
from tools.dev.runs import ROOT, Launch, still_running

PLUG = ROOT / "tests/chaos/plug"
CONFIG = [
    "--config", "configs/tiny_moe_cpu.yaml", "run.steps=3", "run.peer_timeout_seconds=30",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.kv_cache_mib=64", "eval.prompts=8",
    "eval.every_steps=2", "checkpoint.every_steps=1", "placement.experts=traced", "placement.every_steps=1",
]  # fmt: skip
_END_SECONDS = 30.0


@dataclass
class Met:
    """What came of a fault. harmed: what it was done to, each time that it happened. said: the whole output. statuses:
    of the ranks, as torchrun names them. seconds: from the last time that it happened to the end of the last process.
    left: processes that did not end."""

    fault: str
    harmed: list[str] = field(default_factory=list)
    said: str = ""
    statuses: list[int] = field(default_factory=list)
    seconds: float = 0.0
    left: list[int] = field(default_factory=list)


class Control:
    """The file that says which fault is armed, in a folder that runs are started in."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder, self.path = folder, folder / "armed"
        arm(self.path, "")

    def launch(self, *arguments: object, fault: str = "", **how) -> Launch:
        """A run with a fault armed. how: see `Launch`."""
        arm(self.path, fault)
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUG)])}
        return Launch(self.folder, *arguments, environment={"CHAOS": str(self.path), **paths}, **how)

    def end(self, launch: Launch, fault: str) -> Met:
        """Wait for the run to end of the fault."""
        everyone: set[int] = set()
        while launch.process.poll() is None:
            everyone |= set(launch.processes())
            time.sleep(0.2)
        left = still_running(sorted(everyone), _END_SECONDS)
        seen, ended = witnesses(self.path, fault.partition(RANK)[0]), time.monotonic()
        statuses = [int(status) for status in re.findall(r"exitcode +: (-?\d+)", launch.text())]
        seconds = ended - seen[-1].at if seen else 0.0
        return Met(fault, [one.harmed for one in seen], launch.text(), statuses, seconds, left)


def run_untouched(folder: Path) -> Path:
    """The run that the other must equal."""
    launch = Control(folder).launch(*CONFIG, f"run.runs_dir={folder}")
    assert launch.wait() == 0, launch.text()[-4000:]
    return launch.folder


def run_through(folder: Path, faults: list[str]) -> tuple[Path, list[Met]]:
    """Meet the faults in their order, then go on to the end. Returns the run's folder and what came of each."""
    control, met = Control(folder), []
    launch = control.launch(*CONFIG, f"run.runs_dir={folder}", fault=faults[0])
    for at, fault in enumerate(faults):
        met.append(control.end(launch, fault))
        saved = list((launch.folder / "checkpoints").glob("step-*"))
        going_on = ["--resume", launch.folder, *([] if saved else ["--step", 0])]
        launch = control.launch(*going_on, fault=faults[at + 1] if at + 1 < len(faults) else WAITS)
    launch.until(lambda: witnesses(control.path, WAITS))
    second = Launch(control.folder, "--resume", launch.folder)
    met.append(control.end(second, WAITS))
    arm(control.path, "")
    assert launch.wait() == 0, launch.text()[-4000:]
    return launch.folder, met
