"""Profiles of steps: chosen ones are written, large ones removed, and `moe-rl show` lists them."""

import errno
import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_rl.__main__ import main
from moe_rl.config.check import config_problems
from moe_rl.config.load import load_config
from moe_rl.config.schema import ProfileConfig
from moe_rl.train import step_profiler
from moe_rl.train.step_profiler import StepProfiler
from moe_rl.whereabouts import HERE
from tests.support.refusals import tells
from tests.train.stand_in_run import begin


def work(profiler: StepProfiler) -> None:
    for step in (1, 2, 3):
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_chosen_steps_of_the_chosen_ranks_are_written(tmp_path):
    notes = []
    for rank in (0, 1, 2):
        work(StepProfiler(ProfileConfig(steps=(2, 3), ranks=(0, 2)), tmp_path, rank, notes.append))
    work(StepProfiler(None, tmp_path, 0, notes.append))
    assert notes == []
    names = [f"step{step:06d}-rank{rank:05d}.json.gz" for step in (2, 3) for rank in (0, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    events = json.loads(gzip.decompress((tmp_path / names[0]).read_bytes()))["traceEvents"]
    (product,) = [one for one in events if one.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"] == [[8, 8], [8, 8]]


def test_of_each_pass_the_first_microbatches_are_recorded_and_all_between_passes(tmp_path):
    profiler = StepProfiler(ProfileConfig(steps=(1,)), tmp_path, 0, print)
    with profiler.step(1):
        for _ in range(2):
            for number in range(50):
                HERE.begin_microbatch(number)
                torch.ones(8, 8) @ torch.ones(8, 8)
            HERE.leave()
            torch.ones(3).exp()
    assert HERE.listener is None
    (path,) = tmp_path.iterdir()
    names = [one.get("name") for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert (names.count("aten::mm"), names.count("aten::exp")) == (2 * step_profiler._PROFILED_MICROBATCHES, 2)


@pytest.mark.parametrize(("full", "why"), [(False, "it has 3.0 MiB"), (True, "No space left")])
def test_a_profile_that_is_too_large_or_finds_no_room_is_named_and_ends_no_run(tmp_path, monkeypatch, full, why):
    def export(_, path):
        Path(path).write_bytes(bytes(3 << 20))
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    notes = []
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    work(StepProfiler(ProfileConfig(steps=(1,), mib=2), tmp_path, 0, notes.append))
    assert not list(tmp_path.iterdir())
    (note,) = notes
    assert str(tmp_path / "step000001-rank00000.json.gz") in note and why in note


def test_on_a_gpu_a_snapshot_of_the_allocator_is_written_too(tmp_path, monkeypatch):
    """A stand-in is the allocator, whose history ends with the step, also where the step fails."""
    history, profiled = [], SimpleNamespace(export_chrome_trace=lambda path: Path(path).touch())
    monkeypatch.setattr(step_profiler, "profile", lambda **_: nullcontext(profiled))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: history.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    profiler = StepProfiler(ProfileConfig(steps=(1, 2)), tmp_path, 0, print)
    with profiler.step(1):
        pass
    with pytest.raises(ZeroDivisionError), profiler.step(2):
        raise ZeroDivisionError
    assert history == [{"max_entries": step_profiler._ALLOCATIONS}, {"enabled": None}] * 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "step000001-rank00000.json.gz": b"",
        "step000001-rank00000.pickle": b"snapshot",
    }


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
