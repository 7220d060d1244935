"""Measures what the proof of routes and weights costs a step: `python benchmarks/proof_cost.py [--steps 6] [--json
FILE]`.

It runs the demo (real vLLM, two Megatron ranks) with a stopwatch around every function that only proves: the alignment
test, the sums from the sampler's buffer to the dispatcher, the second witness, the rules of the validator, the
conservation of weights. It prints the seconds of each, the seconds of the steps in the same run, and

    ratio_alignment_to_step    all of these functions, on a rank and in the engine, / the seconds of the steps
    ratio_canary_to_step       the canary, which both engines score after every update, / the seconds of the steps

Functions that call each other are counted once. Where all ranks take part together, the last rank to arrive counts,
because the others only wait for it. Asynchronous work of a device is not seen; a CPU has none.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path

from moe_rl.parent import torchrun

ROOT = Path(__file__).parents[1]
FOLDER = "MOE_RL_PROOF_COST"
PROVES = {
    "moe_rl.replay.alignment": ["AlignmentTest.__init__", "AlignmentTest.observe", "AlignmentTest.verdict"],
    "moe_rl.replay.replay_pass": ["ReplayPass._sums_of_share"],
    "moe_rl.replay.evidence": ["refuse_other_sums"],
    "moe_rl.replay.checksum": ["check_source"],
    "moe_rl.trace.variety": ["check_variety"],
    "moe_rl.trace.source_sum": ["placed_rows", "total"],
    "moe_rl.vllm.capture": ["RowSums.of"],
    "moe_rl.vllm.router_witness": [f"RouterWitness.{name}" for name in ("begin_step", "whose", "take", "check")],
    "moe_rl.weights.conservation": ["PartSums.add", "Conservation.settle"],
    "moe_rl.megatron.live_weights": ["LiveWeights.content"],
    "moe_rl.train.canary": ["Canary.compare"],
}
CANARY = "Canary.compare"


class Stopwatch:
    """Collects seconds by function and writes them to a file of this process regularly, because an engine may be
    killed.
    """

    def __init__(self, folder: Path):
        self.file, self.seconds, self.depth, self.written = folder / f"{os.getpid()}.json", {}, 0, 0.0

    def around(self, name, function):
        @wraps(function)
        def timed(*args, **kwargs):
            self.depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                now = time.perf_counter()
                self.depth -= 1
                if not self.depth:
                    self.seconds[name] = self.seconds.get(name, 0.0) + now - start
                    if now - self.written > 0.2:
                        self.write(now)

        return timed

    def write(self, now):
        self.written = now
        text = json.dumps({"rank": os.environ.get("RANK", ""), "seconds": self.seconds})
        self.file.with_suffix(".tmp").write_text(text)
        self.file.with_suffix(".tmp").replace(self.file)


class Loader(importlib.abc.Loader):
    """Loads a module as usual and puts stopwatches around some of its functions."""

    def __init__(self, loader, watch):
        self.loader, self.watch = loader, watch

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        for name in PROVES[module.__name__]:
            *outer, last = name.split(".")
            holder = getattr(module, outer[0]) if outer else module
            setattr(holder, last, self.watch.around(name, getattr(holder, last)))


class Finder(importlib.abc.MetaPathFinder):
    """Finds each module of PROVES once."""

    def __init__(self, watch):
        self.watch = watch

    def find_spec(self, name, path, target=None):
        if name not in PROVES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader, self.watch)
        return spec


def install() -> None:
    """Install the stopwatches. Every Python process of the run calls this before anything else."""
    sys.meta_path.insert(0, Finder(Stopwatch(Path(os.environ[FOLDER]))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="overrides of configs/tiny_moe_cpu.yaml")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    from output import tell

    tell(result, options.json)
    return 0


def measure(options, folder: Path) -> dict[str, object]:
    plugs = folder / "plugs"
    plugs.mkdir()
    (plugs / "sitecustomize.py").write_text("import proof_cost\nproof_cost.install()\n")
    paths = [str(plugs), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *torchrun(2),
        "tools/train_moe_rl.py",
        "--config",
        "configs/tiny_moe_cpu.yaml",
        f"run.runs_dir={folder}/runs",
    ]
    command += [f"run.steps={options.steps}", "eval.every_steps=1000", "eval.prompts=8", *options.overrides]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"the run failed:\n{run.stdout[-2000:]}{run.stderr[-6000:]}")
    (lines,) = (folder / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    step_seconds = sum(line["time/step"] for line in steps if "time/step" in line)
    by_rank: dict[str, dict[str, float]] = {"0": {}, "1": {}}  # rank 0 with its children, one of which is the engine
    for file in folder.glob("*.json"):
        one = json.loads(file.read_text())
        for name, value in one["seconds"].items():
            mine = by_rank[one["rank"] or "0"]
            mine[name] = mine.get(name, 0.0) + value
    first, second = by_rank.values()
    seconds = {name: min(value, second.get(name, value)) for name, value in first.items()}
    canary = seconds.pop(CANARY)
    return {
        "ratio_alignment_to_step": round(sum(seconds.values()) / step_seconds, 5),
        "ratio_canary_to_step": round(canary / step_seconds, 5),
        "step_seconds": round(step_seconds, 3),
        "steps": options.steps,
        "seconds": {name: round(value, 4) for name, value in sorted(seconds.items())},
    }


if __name__ == "__main__":
    raise SystemExit(main())
