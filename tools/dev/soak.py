"""Kill a training run at random, resume it, and prove that nothing was lost or doubled.

    python tools/dev/soak.py --kills 50 [--seed N] [--minutes M] [--work DIR] [--json FILE]

Real vLLM, real Megatron-core, two ranks. Each launch of the run has a planned end: SIGKILL to rank 0, rank 1, the
engine, torchrun or all of them, in a phase of the step that was drawn beforehand, after a delay drawn too. What the
phase really was is read from the run's own signs of life right before the kill, and of a killed rank from the last sign
that it left. Then everything must have ended by itself, and the run is resumed, until it is done. Exit status: 1 when a
run differs from the one that nobody touched, or left something behind.

One kill takes about five minutes on two shared cores, with the run that nobody touches; 50 take an hour. --minutes ends
it sooner. A line says what is under way, and what came of each kill.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository: siblings are `tools.dev`

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.errors import DataError, MoeRLError
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, load_prompts
from tools.dev.runs import ROOT, Launch, RunEnded, rows, running, still_running

VICTIMS = ("rank 0", "rank 1", "engine", "torchrun", "all")
# In the words of the ranks' signs of life: (phase, part). A checkpoint is written while its hidden folder is there.
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
# What a run that lost a process may take to have ended, all of it.
_END_SECONDS = 30.0
_RAW = argparse.RawDescriptionHelpFormatter
# At once, also into a file.
_SAY = partial(print, flush=True)
_LONGEST_DELAY = 0.25
# Phases of milliseconds in a run this small: a delay would always miss them.
_SHORT = ("reward", "checkpoint")
_TOLD = re.compile(
    r"moe_rl: (?:rank \d+: )?((?:rank \d+ \(pid|torchrun \(pid|EngineError|The vLLM engine|CheckpointError|DataError)"
    r"[^\n]{0,300})"
)
_RESUMED = re.compile(
    r"(?:resumed after step \d+|restarted from the beginning); \d+ steps are repeated\. Step \d+ is [^\n]*"
)


@dataclass
class Kill:
    """One planned kill, and what was seen of it.

    phase: where the run really was. fired: that every pid of the victim was gone within a second. left: pids that did
    not end by themselves. told: what the run said. resumed: what the next launch said. recovery: seconds from its start
    until it was at work again.
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
    """Kills runs in `work`, each resumed until it is done, until so many kills have fired or time is up."""

    def __init__(self, work: Path, *, seed: int = 0, overrides: list[str] | None = None, say=_SAY):
        self.work, self.random, self.say = work, random.Random(seed), say
        self.arguments = CONFIG + (overrides or [])
        self.kills: list[Kill] = []
        self.missed: Counter[str] = Counter()
        self.problems: list[str] = []
        self.temporary = work / "tmp"
        self.temporary.mkdir(parents=True)
        self.reference: Path | None = None

    def plan(self, kills: int) -> list[tuple[str, str]]:
        """(victim, phase) of every kill: each pair before any again, in an order of the seed."""
        pairs: list[tuple[str, str]] = []
        while len(pairs) < kills:
            block = [(victim, phase) for victim in VICTIMS for phase in PHASES]
            self.random.shuffle(block)
            pairs += block
        return pairs[:kills]

    def run(self, pairs: list[tuple[str, str]], *, until: float = float("inf")) -> None:
        """Work the plan off, in one run after the other. until: of time.monotonic(), after which nobody is killed."""
        self.reference = self._run_untouched()
        pairs, number = list(pairs), 0
        while pairs and time.monotonic() < until:
            number += 1
            runs = self.work / f"run-{number}"
            runs.mkdir()
            self._one_run(runs, pairs, until)

    def _one_run(self, runs: Path, pairs: list[tuple[str, str]], until: float) -> None:
        self.say(f"{runs.name}: kills to come: {len(pairs)}")
        launch = self._launch(runs, [*self.arguments, f"run.runs_dir={runs}"])
        last: Kill | None = None
        while True:
            began = time.monotonic()
            if not self._at_work(launch, last, began):
                return
            kill = Kill(*pairs[0]) if pairs and time.monotonic() < until else None
            if kill is None or not self._strike(launch, kill):
                if kill is not None:
                    self.missed[f"{kill.victim}, {kill.planned}: the run was over before"] += 1
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
        self.say(f"{runs.name} is done, and {'DIFFERS FROM' if differences else 'equals'} the untouched one")

    def _strike(self, launch: Launch, kill: Kill) -> bool:
        """Wait for the planned phase, some steps from here, and kill. False: the run was over before it came."""
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
        # The last sign of the dead is the truth about where it died. The store has it until torchrun ends.
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
        """Wait until the ranks have begun to work; what a resume said goes to the kill before it."""
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
                self.problems.append(f"a resume after {before.victim} in {before.phase} did not say from where")
        return True

    def _phases(self, launch: Launch, sign: dict) -> list[str]:
        """The names of PHASES that a sign of life stands for, the checkpoint last."""
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
            return [pid for pid in [launch.engine_pid()] if pid]
        return [pid for pid in [launch.sign(int(victim[-1])).get("pid")] if pid]

    def _launch(self, runs: Path, arguments: list) -> Launch:
        return Launch(runs, *arguments, environment={"TMPDIR": str(self.temporary)})

    def _run_untouched(self) -> Path:
        runs = self.work / "untouched"
        runs.mkdir()
        self.say("a run that nobody touches comes first: some minutes")
        launch = self._launch(runs, [*self.arguments, f"run.runs_dir={runs}"])
        if launch.wait() != 0:
            raise RunEnded(f"the run that nobody touches ended with an error:\n{launch.text()[-4000:]}")
        return launch.folder

    def _differences(self, folder: Path) -> list[str]:
        """What is not as in the untouched run, or was left behind."""
        found, ours, theirs = [], rows(folder), rows(self.reference)
        if ours != theirs:
            pairs = enumerate(zip_longest(ours, theirs), start=1)
            found.append(f"line {next(at for at, (a, b) in pairs if a != b)} of metrics.jsonl differs")
        if (folder / "prompts.jsonl").read_bytes() != (self.reference / "prompts.jsonl").read_bytes():
            found.append("the prompt ledgers differ")
        config = load_config(folder / "config.yaml")
        files, limit = (ROOT / config.task.train, ROOT / config.model.path / "tokenizer.json"), config.rollout
        source = PromptSource(load_prompts(*files, max_prompt_tokens=limit.max_prompt_tokens), config.run.seed)
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
        """Everything that was counted, for JSON."""
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
    """The counts as a table, victim by phase."""
    counts = result["counts"]
    phases = [*PHASES, *sorted({key.split("/")[1] for key in counts} - set(PHASES))]
    lines = [["killed (SIGKILL) in", *phases], ["---"] * (1 + len(phases))]
    lines += [[victim, *(str(counts.get(f"{victim}/{phase}", 0)) for phase in phases)] for victim in VICTIMS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _tensors(folder: Path) -> dict[str, str]:
    """Digests of the files of the last checkpoint that hold tensors: weights, main weights, Adam's moments, random
    states. Megatron's own metadata is pickled, and names times and places."""
    _, last = checkpoints.complete(folder / "checkpoints")[-1]
    files = json.loads((last / "state.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith((".distcp", ".safetensors"))}


def _quartiles(values: list[float]) -> list[float]:
    """First quartile, median, third quartile, largest."""
    if len(values) < 2:
        return values
    return [*statistics.quantiles(values, n=4), max(values)]


def _shared_memory(pids: set[int]) -> list[str]:
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [n for n in names if any(str(pid) in re.findall(r"\d+", n) for pid in pids if not running(pid))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW, allow_abbrev=False)
    parser.add_argument("--kills", type=int, required=True, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of victims, phases and delays")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which nobody is killed any more")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every kill and what came of it here")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        try:
            soak = Soak(options.work or Path(temporary) / "soak", seed=options.seed)
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
