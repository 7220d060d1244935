"""One run that meets fault after fault, is resumed after each, and in the end is the run that nobody touched."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.chaos.faults import SECONDS, Fault
from tests.chaos.plants import RANK, STATES, STRIKES, WAITS, arm, struck, witnesses
from tools.dev.runs import ROOT, Launch, python_path, still_running

PLUG = ROOT / "tests/chaos/plug"
CONFIG = [
    "--config", "configs/tiny_moe_cpu.yaml", "run.steps=3", "run.peer_timeout_seconds=30",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.kv_cache_mib=64", "eval.prompts=8",
    "eval.every_steps=2", "checkpoint.every_steps=1", "placement.experts=traced", "placement.every_steps=1",
]  # fmt: skip
# Each launch takes a step or two. With 8 requests at once the engine is never idle.
ASYNCHRONOUS = [
    "--config", "configs/tiny_moe_cpu.yaml", "run.steps=90", "run.peer_timeout_seconds=15",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.kv_cache_mib=64", "rollout.max_concurrent=8",
    "eval.prompts=8", "eval.every_steps=1000", "checkpoint.every_steps=1", "replay.native_every=0",
    "pipeline.mode=async", "pipeline.max_staleness=2", "rollout.sleep_level=0", "rollout.dynamic_sampling_rounds=1",
    "objective.old_logprobs=sampler", "task.verifier_timeout_seconds=2",
]  # fmt: skip
# A verifier that is struck is replaced.
GOES_ON = {struck("a verifier", how, state) for how in STRIKES for state in STATES}
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
        return Launch(self.folder, *arguments, environment={"CHAOS": str(self.path)} | python_path(PLUG), **how)

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


def ends_soon_and_is_named(fault: Fault, one: Met, run: Path) -> None:
    """Assert that a fault in this run was noticed, told and followed by the end of all processes as its row says."""
    assert one.harmed, "the fault did not happen"
    told = one.said[one.said.index("moe_rl: ") :].split("torch/distributed/elastic")[0]
    assert f"{fault.error}: " in told
    assert all(part.format(run=run) in told for part in fault.says), told
    assert not re.search(r"^(\[rank\d\]: )?Traceback", one.said.split("torch/distributed/elastic")[0], re.MULTILINE)
    assert fault.status in one.statuses
    assert one.seconds < SECONDS and not one.left


def run_untouched(folder: Path) -> Path:
    """The run that the other must equal."""
    launch = Control(folder).launch(*CONFIG, f"run.runs_dir={folder}")
    assert launch.wait() == 0, launch.text()[-4000:]
    return launch.folder


def meet(control: Control, faults: list[str], config: list[str], then: str) -> tuple[Launch, list[Met]]:
    """Meet the faults in their order. Returns the launch that goes on with `then` armed, and what came of each."""
    met, order = [], [*faults, then]
    launch = control.launch(*config, f"run.runs_dir={control.folder}", fault=faults[0])
    for fault, following in pairwise(order):
        if fault in GOES_ON:
            launch.until(lambda fault=fault: witnesses(control.path, fault))
            met.append(Met(fault, [one.harmed for one in witnesses(control.path, fault)]))
            arm(control.path, following)
            continue
        met.append(control.end(launch, fault))
        saved = list((launch.folder / "checkpoints").glob("step-*"))
        going_on = ["--resume", launch.folder, *([] if saved else ["--step", 0])]
        launch = control.launch(*going_on, fault=following)
    return launch, met


def run_through(folder: Path, faults: list[str]) -> tuple[Path, list[Met]]:
    """Meet the faults in their order, then go on to the end. Returns the run's folder and what came of each."""
    control = Control(folder)
    launch, met = meet(control, faults, CONFIG, WAITS)
    launch.until(lambda: witnesses(control.path, WAITS))
    second = Launch(control.folder, "--resume", launch.folder)
    met.append(control.end(second, WAITS))
    arm(control.path, "")
    assert launch.wait() == 0, launch.text()[-4000:]
    return launch.folder, met


def run_asynchronously_through(folder: Path, faults: list[str]) -> tuple[Path, list[Met]]:
    """Meet the faults in their order in an asynchronous run, then go on to the end. Returns as `run_through` does."""
    launch, met = meet(Control(folder), faults, ASYNCHRONOUS, "")
    assert launch.wait() == 0, launch.text()[-4000:]
    return launch.folder, met
