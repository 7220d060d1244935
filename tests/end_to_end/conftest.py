"""Whole runs: torchrun, two Megatron ranks, a real vLLM engine, the shipped policy and task; only fewer steps."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.dev.runs import ROOT, Launch, rows

__all__ = ["ROOT", "Launch", "config", "rows"]

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


def config(*overrides):
    return ["--config", "configs/tiny_moe_cpu.yaml", *SHORT, *overrides]


@dataclass
class Finished:
    """A run that has come to its end: its folder, and the file that has its output."""

    folder: Path
    output: Path

    def text(self) -> str:
        return self.output.read_text()


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """One uninterrupted short run, shared by the tests that compare with it, whichever worker they are on."""
    own = tmp_path_factory.getbasetemp()
    runs = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "short_run"
    runs.mkdir(exist_ok=True)
    with (runs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first makes it, the others wait
        if not (runs / "result.json").exists():
            run = Launch(runs, *config(f"run.runs_dir={runs}"), "--json", runs / "result.json")
            assert run.wait() == 0, run.text()[-4000:]
    (folder,) = (path.parent for path in runs.glob("*/config.yaml"))
    return Finished(folder, runs / "output-0")
