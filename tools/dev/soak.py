"""Kills a training run at random, resumes it, and proves that nothing was lost or duplicated.

    python tools/dev/soak.py --kills 50 [--seed N] [--minutes M] [--work DIR] [--json FILE]

Uses real vLLM, real Megatron-core and two ranks. Each launch of the run has a planned kill: SIGKILL to rank 0, rank 1,
the engine, torchrun or all of them, in a phase of the step and after a delay that were both drawn in advance. The
actual phase is read from the run's signs of life right before the kill, and for a killed rank from the last sign that
it left. Then all other processes must end by themselves. The run is resumed until it is done. Exit status: 1 when a run
differs from the undisturbed one, or left something behind.

One kill takes about five minutes on two shared cores, including the undisturbed run; 50 take an hour. --minutes ends
the test sooner. Lines report what is going on, and the outcome of each kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repository root, to import `tools.dev`

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.errors import DataError, MoeRLError
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, load_task
from moe_rl.tasks.tokenizer import TextCodec
from tools.dev.runs import Launch, RunEnded, rows, running, still_running

VICTIMS = ("rank 0", "rank 1", "engine", "torchrun", "all")
# The planned phases, in the words of the ranks' signs of life: (phase, part). While a checkpoint is being written, its
# hidden folder exists.
PHASES = {
    "sampling": ("rollout", "sample"),
    "reward": ("rollout", "reward"),
    "logprobs": ("train", "logprobs"),
    "train": ("train", "train"),
    "sync": ("sync", "sync"),
    "checkpoint": None,
    "evaluate": ("evaluate", "eval"),
}
STEPS = 12
CONFIG = [
    "--config",
    "configs/tiny_moe_cpu.yaml",
    f"run.steps={STEPS}",
    "run.peer_timeout_seconds=20",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.kv_cache_mib=64",
    "eval.prompts=16",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
    "replay.native_every=4",
]
# Time limit for a run to end after it has lost a process.
_END_SECONDS = 30.0
_RAW = argparse.RawDescriptionHelpFormatter
# Print at once, even when stdout is a file.
_SAY = partial(print, flush=True)
_LONGEST_DELAY = 0.25
# These phases take milliseconds in a run this small, so a delay would always miss them.
_SHORT = ("reward", "checkpoint")
_TOLD = re.compile(
    r"moe_rl: (?:rank \d+: )?((?:rank \d+ \(pid|torchrun \(pid|EngineError|The vLLM engine|CheckpointError|DataError)"
    r"[^\n]{0,300})"
)
_RESUMED = re.compile(
    r"(?:resumed after step \d+|restarted from the beginning); steps repeated: \d+\. Step \d+ is [^\n]*"
)


@dataclass
class Kill:
    """Describes one planned kill and its outcome.

    Attributes:
        phase: where the run actually was.
        fired: whether every pid of the victim was gone within a second.
        left: pids that did not end by themselves.
        told: what the run printed.
        resumed: what the next launch printed.
        recovery: seconds from the start of the next launch until it worked again.
    """

    victim: str
    planned: str
    phase: str = ""
    step: int = 0
    pids: list[int] = field(default_factory=list)
    fired: bool = False
    end_seconds: float = 0.0
    left: list[int] = field(default_factory=list)
    unpublished: bool = False
    told: list[str] = field(default_factory=list)
    resumed: str = ""
    recovery: float = 0.0


class Soak:
    """Kills runs in `work`, and resumes each until it is done, until enough kills have fired or time is up."""

    def __init__(self, work: Path, *, seed: int = 0, overrides: list[str] | None = None, say=_SAY):
        self.work, self.random, self.say = work, random.Random(seed), say
        self.arguments = CONFIG + (overrides or [])
        self.kills: list[Kill] = []
        self.missed: Counter[str] = Counter()
        self.problems: list[str] = []
        self.temporary = work / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.reference: Path | None = None

    def plan(self, kills: int) -> list[tuple[str, str]]:
        """Return (victim, phase) of every kill: every pair once before any repeats, in an order drawn from the seed."""
        pairs: list[tuple[str, str]] = []
        while len(pairs) < kills:
            block = [(victim, phase) for victim in VICTIMS for phase in PHASES]
            self.random.shuffle(block)
            pairs += block
        return pairs[:kills]

    def run(self, pairs: list[tuple[str, str]], *, until: float = float("inf")) -> None:
        """Carry out the plan in one run after another. until: time.monotonic() after which nothing is killed."""
        self.reference = self._run_untouched()
        pairs, number = list(pairs), 0
        while pairs and time.monotonic() < until:
            number += 1
            runs = self.work / f"run-{number}"
            runs.mkdir()
            self._one_run(runs, pairs, until)

    def _one_run(self, runs: Path, pairs: list[tuple[str, str]], until: float) -> None:
        self.say(f"{runs.name}: {len(pairs)} kills to come")
        launch = self._launch(runs, [*self.arguments, f"run.runs_dir={runs}"])
        last: Kill | None = None
        while True:
            began = time.monotonic()
            if not self._at_work(launch, last, began):
                return
            kill = Kill(*pairs[0]) if pairs and time.monotonic() < until else None
            if kill is None or not self._strike(launch, kill):
                if kill is not None:
                    self.missed[f"{kill.victim}, {kill.planned}: the run ended first"] += 1
                break
            pairs.pop(0)
            self.kills.append(kill)
            last = kill
            self.say(
                f"{len(self.kills):3} {kill.victim:8} killed in {kill.phase:10} of step {kill.step:2} "
                f"(planned: {kill.planned}), ended in {kill.end_seconds:.1f} s"
            )
            saved = checkpoints.complete(launch.folder / "checkpoints")
            again = ["--resume", launch.folder, *([] if saved else ["--step", 0])]
            launch = self._launch(runs, again)
        if launch.wait() != 0:
            self.problems.append(f"{runs.name}: ended with an error:\n{launch.text()[-2000:]}")
            return
        differences = self._differences(launch.folder)
        self.problems += [f"{runs.name}: {difference}" for difference in differences]
        self.say(f"{runs.name} is done, and {'DIFFERS FROM' if differences else 'equals'} the undisturbed run")

    def _strike(self, launch: Launch, kill: Kill) -> bool:
        """Wait for the planned phase, some steps from here, and kill. Return False if the run ended first."""
        first = launch.sign().get("step", 0) + self.random.randint(1, 5)
        delay = 0.0 if kill.planned in _SHORT else self.random.uniform(0.0, _LONGEST_DELAY)

        def there() -> bool:
            sign = launch.sign()
            return bool(sign) and sign["step"] >= first and kill.planned in self._phases(launch, sign)

        try:
            launch.until(there, 300)
        except RunEnded:
            return False
        time.sleep(delay)
        everyone = launch.processes()
        kill.pids = self._pids(launch, kill.victim, everyone)
        sign = launch.sign()
        if not sign or not kill.pids:
            return False
        kill.step, found = sign["step"], self._phases(launch, sign)
        for pid in kill.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The last sign of the dead rank shows where it died. The store keeps it until torchrun ends.
        last = launch.last_sign(1 if kill.victim == "rank 1" else 0)
        began = time.monotonic()
        kill.fired = not still_running(kill.pids, 1.0)
        kill.left = still_running(everyone, _END_SECONDS)
        kill.end_seconds = time.monotonic() - began
        launch.process.wait()
        if kill.victim in ("rank 0", "rank 1", "all"):
            kill.step, found = last["step"], self._phases(launch, last) or found
        kill.unpublished = self._writing(launch)
        kill.phase = kill.planned if kill.planned in found else next(iter(found), f"{sign['phase']} {sign['part']}")
        kill.told = sorted({told.strip() for told in _TOLD.findall(launch.text())})
        if kill.left:
            self.problems.append(f"{kill.victim} killed in {kill.phase}: processes {kill.left} outlived the run")
            for pid in kill.left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not kill.fired:
            self.problems.append(f"{kill.victim} in {kill.phase}: the kill of {kill.pids} did not fire")
        return True

    def _at_work(self, launch: Launch, before: Kill | None, began: float) -> bool:
        """Wait until the ranks have begun to work. Store what the resume printed in the kill before it."""
        try:
            launch.until(lambda: launch.sign().get("phase", "start") != "start", 300)
        except RunEnded as error:
            self.problems.append(str(error))
            return False
        if before is not None:
            before.recovery = time.monotonic() - began
            said = _RESUMED.search(launch.text())
            before.resumed = said[0] if said else ""
            if not said:
                self.problems.append(f"a resume after {before.victim} in {before.phase} did not print its step")
        return True

    def _phases(self, launch: Launch, sign: dict) -> list[str]:
        """Return the names of PHASES that a sign of life belongs to, the checkpoint last."""
        found = [name for name, at in PHASES.items() if at == (sign["phase"], sign["part"])]
        return found + (["checkpoint"] if self._writing(launch) else [])

    def _writing(self, launch: Launch) -> bool:
        return any((launch.folder / "checkpoints").glob(".step-*.tmp"))

    def _pids(self, launch: Launch, victim: str, everyone: list[int]) -> list[int]:
        if victim == "all":
            return everyone
        if victim == "torchrun":
            return [launch.process.pid]
        if victim == "engine":
            return launch.engine_pids()
        return [pid for pid in [launch.sign(int(victim[-1])).get("pid")] if pid]

    def _launch(self, runs: Path, arguments: list) -> Launch:
        return Launch(runs, *arguments, environment={"TMPDIR": str(self.temporary)})

    def _run_untouched(self) -> Path:
        runs = self.work / "untouched"
        runs.mkdir()
        self.say("first an undisturbed run, which takes some minutes")
        launch = self._launch(runs, [*self.arguments, f"run.runs_dir={runs}"])
        if launch.wait() != 0:
            raise RunEnded(f"the undisturbed run ended with an error:\n{launch.text()[-4000:]}")
        return launch.folder

    def _differences(self, folder: Path) -> list[str]:
        """Return all differences from the undisturbed run, and everything left behind."""
        found, ours, theirs = [], rows(folder), rows(self.reference)
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs), start=1)
            found.append(f"line {next(at for at, (a, b) in pairs if a != b)} of metrics.jsonl differs")
        if (folder / "prompts.jsonl").read_bytes() != (self.reference / "prompts.jsonl").read_bytes():
            found.append("the prompt ledgers differ")
        config = load_config(folder / "config.yaml")
        source = PromptSource(load_task(config, TextCodec(config.model.path, ())).train, config.run.seed)
        try:
            PromptLedger(folder / "prompts.jsonl").verify(source, steps=sum(row["kind"] == "train" for row in ours))
        except DataError as error:
            found.append(str(error))
        if _tensors(folder) != _tensors(self.reference):
            found.append("the tensors of the last checkpoints differ")
        for pattern in ("checkpoints/.*", "checkpoints/*.abandoned", "sync/*", "trace/.*", "rollouts/*.tmp"):
            found += [f"left behind: {path.relative_to(folder)}" for path in folder.glob(pattern)]
        return found

    def result(self) -> dict[str, object]:
        """Return all counts, for JSON."""
        table = Counter((kill.victim, kill.phase) for kill in self.kills)
        unfinished = [p.name for p in self.temporary.iterdir()]
        return {
            "kills": len(self.kills),
            "fired": sum(kill.fired for kill in self.kills),
            "problems": self.problems,
            "missed": dict(self.missed),
            "counts": {f"{victim}/{phase}": n for (victim, phase), n in sorted(table.items())},
            "while a checkpoint was written": sum(kill.unpublished for kill in self.kills),
            "trained on what was sampled before": sum(" is trained on" in kill.resumed for kill in self.kills),
            "recovery_seconds": _quartiles([kill.recovery for kill in self.kills if kill.recovery]),
            "end_seconds": _quartiles([kill.end_seconds for kill in self.kills]),
            "temporary folders of ours left": [name for name in unfinished if name.startswith("moe_rl")],
            "temporary folders of others left": len([name for name in unfinished if not name.startswith("moe_rl")]),
            "shared memory left": _shared_memory({pid for kill in self.kills for pid in kill.pids}),
            "processes left": sum(len(kill.left) for kill in self.kills),
            "log": [asdict(kill) for kill in self.kills],
        }


def markdown(result: dict[str, object]) -> str:
    """Format the counts as a table, victim by phase."""
    counts = result["counts"]
    phases = [*PHASES, *sorted({key.split("/")[1] for key in counts} - set(PHASES))]
    lines = [["killed (SIGKILL) in", *phases], ["---"] * (1 + len(phases))]
    lines += [[victim, *(str(counts.get(f"{victim}/{phase}", 0)) for phase in phases)] for victim in VICTIMS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _tensors(folder: Path) -> dict[str, object]:
    """Return digests of the last checkpoint's tensor files: weights, main weights, Adam's moments, random states.

    Megatron's own metadata is left out, because it is pickled and contains times and paths.
    """
    _, last = checkpoints.complete(folder / "checkpoints")[-1]
    state = json.loads((last / "state.json").read_text())
    randoms = {name: digest for name, digest in state["files"].items() if name.endswith(".safetensors")}
    return randoms | state["pieces"]


def _quartiles(values: list[float]) -> list[float]:
    """Return first quartile, median, third quartile and maximum."""
    if len(values) < 2:
        return values
    return [*statistics.quantiles(values, n=4), max(values)]


def _shared_memory(pids: set[int]) -> list[str]:
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [n for n in names if any(str(pid) in re.findall(r"\d+", n) for pid in pids if not running(pid))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW, allow_abbrev=False)
    parser.add_argument("--kills", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="seed of victims, phases and delays")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time after which nothing is killed")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every kill and its outcome to this file")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        try:
            soak = Soak((options.work or Path(temporary) / "soak").absolute(), seed=options.seed)
            soak.run(soak.plan(options.kills), until=until)
        except MoeRLError as error:
            print(error, file=sys.stderr)
            return 2
        result = soak.result()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result), end="")
    for name, value in result.items():
        if name not in ("log", "counts", "problems"):
            print(f"{name}: {value}")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    left = result["temporary folders of ours left"] or result["shared memory left"] or result["processes left"]
    return 1 if result["problems"] or left else 0


if __name__ == "__main__":
    sys.exit(main())
