"""Whole runs: torchrun, two Megatron ranks, a real vLLM engine, the shipped policy and task; only fewer steps."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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
# What `make test` has the time for.
BRIEF = [
    "run.steps=2",
    "rollout.engines=2",
    "rollout.prompts_per_step=8",
    "eval.prompts=16",
    "eval.every_steps=1",
    "eval.best=eval/pass_rate",
    "task.heldout.0.samples=2",
    "task.heldout.0.pass_at=[2]",
    "checkpoint.every_steps=1",
    "report.trackers=[tensorboard]",
    "export.every_steps=1",
    "export.keep_last=1",
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


def finished(tmp_path_factory, name, *overrides) -> Finished:
    """One uninterrupted run, shared by the tests that compare with it, whichever worker they are on."""
    own = tmp_path_factory.getbasetemp()
    runs = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    runs.mkdir(exist_ok=True)
    with (runs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first makes it, the others wait
        if not (runs / "result.json").exists():
            run = Launch(runs, *config(f"run.runs_dir={runs}", *overrides), "--json", runs / "result.json")
            assert run.wait() == 0, run.text()[-4000:]
    (folder,) = (path.parent for path in runs.glob("*/config.yaml"))
    return Finished(folder, runs / "output-0")


@pytest.fixture(scope="session")
def brief_run(tmp_path_factory):
    return finished(tmp_path_factory, "brief_run", *BRIEF)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    return finished(tmp_path_factory, "short_run")


@pytest.fixture
def launches():
    """Launches, of which a test that fails leaves none behind."""
    started = []
    yield started
    for launch in started:
        launch.kill()


def tensors(folder, tmp_path):
    """Every tensor of a run's last checkpoint: weights, main weights, Adam's moments."""
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    dcp_to_torch_save(str(last), str(tmp_path / "whole.pt"))
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    return {k: v for k, v in loaded.items() if torch.is_tensor(v)}
