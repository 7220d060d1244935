"""Profiles of steps: chosen ones are written, large ones removed, and `moe-rl show` lists them."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from moe_rl.__main__ import main
from moe_rl.config.check import config_problems
from moe_rl.config.load import load_config
from moe_rl.config.schema import ProfileConfig
from moe_rl.train.trainer import StepProfiler
from tests.support.refusals import tells
from tests.train.stand_in_run import begin


def work(profiler: StepProfiler) -> None:
    for step in (1, 2, 3):
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_chosen_steps_of_the_chosen_ranks_are_written(tmp_path):
    for rank in (0, 1, 2):
        work(StepProfiler(ProfileConfig(steps=(2, 3), ranks=(0, 2)), tmp_path, rank))
    work(StepProfiler(None, tmp_path, 0))
    names = [f"step{step:06d}-rank{rank:05d}.json.gz" for step in (2, 3) for rank in (0, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    events = json.loads(gzip.decompress((tmp_path / names[0]).read_bytes()))["traceEvents"]
    (product,) = [one for one in events if one.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"] == [[8, 8], [8, 8]]


def test_a_profile_above_the_limit_is_removed_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda _, path: Path(path).write_bytes(bytes(3 << 20))
    )
    work(StepProfiler(ProfileConfig(steps=(1,), mib=2), tmp_path, 0))
    assert not list(tmp_path.iterdir())
    assert f"{tmp_path / 'step000001-rank00000.json.gz'} is removed: it has 3.0 MiB" in capsys.readouterr().out


def test_what_is_never_recorded_is_refused():
    config = load_config("tiny_moe_cpu", ["report.profile.steps=[1,31]", "report.profile.ranks=[0,2]", "run.steps=30"])
    steps, ranks = [one for one in config_problems(config, None, 2) if "report.profile" in one]
    tells(steps, key="report.profile.steps", got=31, expected="at most 30")
    tells(ranks, key="report.profile.ranks", got=2, expected="at most 1")


@pytest.mark.long
def test_a_run_is_profiled_and_show_lists_the_files(tmp_path, capsys):
    process, folder = begin(tmp_path, "run.steps=2", "report.profile.steps=[2]")
    assert process.returncode == 0, process.stdout + process.stderr
    (path,) = (folder / "profiles").iterdir()
    assert "step000002-rank00000" in path.name
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {"aten::mm", "aten::topk"} <= {one.get("name") for one in events}
    assert main(["show", str(folder), "--profile"]) == 0
    assert str(path) in capsys.readouterr().out
    assert main(["show", str(tmp_path), "--profile"]) == 2
    assert "report.profile" in capsys.readouterr().err
