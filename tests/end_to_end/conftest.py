"""Whole runs: torchrun, two Megatron ranks, a real vLLM engine, the shipped policy and task; only fewer steps."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = [
    "run.steps=4",
    "rollout.prompts_per_step=16",
    "rollout.group_size=4",
    "rollout.dynamic_sampling_rounds=2",
    "task.overlong.cache_tokens=4",
    "eval.prompts=32",
    "eval.every_steps=4",
    "checkpoint.every_steps=2",
    "replay.native_every=1",
    "rollout.kv_cache_mib=64",
    "rollout.sleep_level=2",
]


class Launch:
    """A training run in a session of its own, so that what it leaves behind can be found."""

    def __init__(self, runs_dir, *arguments, ranks=2):
        self.runs_dir = Path(runs_dir)
        self.output = self.runs_dir / f"output-{len(list(self.runs_dir.glob('output-*')))}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(ranks),
                    "tools/train_moe_rl.py",
                    *map(str, arguments),
                ],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def wait(self, timeout=600):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run took longer than {timeout} s:\n{self.text()[-4000:]}")

    def text(self):
        return self.output.read_text()

    @property
    def folder(self):
        folders = sorted(p for p in self.runs_dir.iterdir() if p.is_dir())
        return folders[-1] if folders else None

    def until(self, condition, timeout=300):
        """Wait until condition() is true while the run is alive; its value."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"the run ended early:\n{self.text()[-4000:]}"
            time.sleep(0.02)
        self.kill()
        pytest.fail(f"waited {timeout} s in vain:\n{self.text()[-4000:]}")

    def rank_pid(self, rank):
        state = self.folder / "ranks" / f"rank{rank}.json"
        return self.until(lambda: state.exists() and json.loads(state.read_text())["pid"])

    def processes(self):
        """Pids of the run and of everything it started, engine and verifiers included, that still run."""
        mine, found = str(self.process.pid), []
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[stat.parent.name] = fields[1]
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != mine:
                ancestor = parents[ancestor]
            if ancestor == mine:
                found.append(int(pid))
        return found

    def kill(self):
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def config(*overrides):
    return ["--config", "configs/tiny_moe_cpu.yaml", *SHORT, *overrides]


def lines(folder, *, times=False):
    """metrics.jsonl, without what may differ between equal runs unless it is asked for: times and throughput."""
    kept = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept.append({k: v for k, v in row.items() if times or not k.startswith(("time/", "throughput/"))})
    return kept


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """One uninterrupted short run, shared by the tests that compare with it."""
    runs = tmp_path_factory.mktemp("runs")
    run = Launch(runs, *config(f"run.runs_dir={runs}"), "--json", runs / "result.json")
    assert run.wait() == 0, run.text()[-4000:]
    return run
