"""Tests the soak's plan and its verdict. tests/end_to_end and the command itself test that runs survive."""

import json
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from moe_rl.config.load import load_config
from moe_rl.tasks.prompt_ledger import PromptLedger
from tests.support.task import source_of
from tools.dev.runs import ROOT
from tools.dev.soak import PHASES, VICTIMS, Kill, Soak, markdown


@pytest.fixture
def soak(tmp_path):
    soak = Soak(tmp_path / "work", seed=5)
    soak.reference = finished(tmp_path / "untouched")
    return soak


def finished(folder):
    """Make a finished run of two steps."""
    last = folder / "checkpoints/step-000002"
    last.mkdir(parents=True)
    shutil.copy(ROOT / "configs/tiny_moe_cpu.yaml", folder / "config.yaml")
    (last / "state.json").write_text(json.dumps({"files": {".metadata": folder.name}, "pieces": {"0.distcp": "aa"}}))
    train = [{"step": step, "kind": "train", "reward/mean": 0.5, "time/step": step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    source = source_of(load_config(ROOT / "configs/tiny_moe_cpu.yaml"))
    ledger = PromptLedger(folder / "prompts.jsonl")
    for step in (0, 1):
        ledger.record(step, range(3 * step, 3 * step + 3), [p.id for p in source.at(3 * step, 3)], "digest")
    return folder


def test_it_says_what_it_waits_for(tmp_path):
    said = []
    soak = Soak(tmp_path / "work", say=said.append)
    launch = mock.Mock(folder=tmp_path / "run", **{"wait.return_value": 0})
    with mock.patch.multiple(soak, _launch=mock.Mock(return_value=launch), _at_work=mock.Mock(return_value=False)):
        soak._run_untouched()
        soak._one_run(tmp_path, soak.plan(3), float("inf"))
    assert said == ["first an undisturbed run, which takes some minutes", f"{tmp_path.name}: 3 kills to come"]


@pytest.mark.parametrize("tool", ["soak", "two_hosts"])
def test_help_says_how_long_it_takes(tool):
    command = [sys.executable, f"tools/dev/{tool}.py", "--help"]
    assert "minutes on two shared cores" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_pair_comes_before_any_comes_again(soak, tmp_path):
    plan = soak.plan(40)
    assert len(plan) == 40 and len(set(plan[:35])) == 35 == len(VICTIMS) * len(PHASES)
    assert Soak(tmp_path / "again", seed=5).plan(40) == plan != Soak(tmp_path / "other", seed=6).plan(40)


def test_a_run_that_equals_the_untouched_one_has_no_differences(soak, tmp_path):
    assert soak._differences(finished(tmp_path / "killed")) == []


def test_each_difference_is_found(soak, tmp_path):
    def changed(name, old, new, file):
        folder = finished(tmp_path / name)
        path = folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return " ".join(soak._differences(folder))

    assert "line 2 of metrics.jsonl" in changed("row", '"step": 2, "kind"', '"step": 3, "kind"', "metrics.jsonl")
    assert "tensors" in changed("tensor", '"aa"', '"ab"', "checkpoints/step-000002/state.json")
    assert "ledgers differ" in changed("ledger", '"step": 1', '"step": 2', "prompts.jsonl")
    lost = finished(tmp_path / "lost")
    ledger = lost / "prompts.jsonl"
    ledger.write_text(ledger.read_text().splitlines(keepends=True)[0])
    assert any("wrong number of steps" in problem for problem in soak._differences(lost))
    left = finished(tmp_path / "left")
    shutil.copytree(left / "checkpoints/step-000002", left / "checkpoints/.step-000002.tmp")
    assert soak._differences(left) == ["left behind: checkpoints/.step-000002.tmp"]


def test_the_table_counts_where_the_victims_really_were(soak):
    soak.kills = [
        Kill("rank 0", "reward", phase="reward", fired=True, end_seconds=1.0, recovery=2.0),
        Kill("rank 0", "reward", phase="train routes", fired=True, end_seconds=3.0, recovery=4.0),
    ]
    result = soak.result()
    assert result["kills"] == result["fired"] == 2
    first, rank_0 = markdown(result).splitlines()[0], markdown(result).splitlines()[2]
    assert first.endswith("| train routes |") and rank_0 == "| rank 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 1 |"
