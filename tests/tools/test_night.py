"""Tests what benchmarks/night.py is made of, and a minute of the night. The whole night runs in `make nightly`."""

import json
import tempfile
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from moe_rl.config.load import load_config


def test_an_fsync_delays_a_shard_and_not_a_turn(benchmark):
    sinks = benchmark("night_parts.sinks")
    assert sinks.turns_published_per_second(4) > 1 / sinks.FSYNC_SECONDS


def test_the_run_has_dialogues_of_500_turns_and_may_lose_a_server(benchmark, tmp_path):
    night = benchmark("night")
    (tmp_path / "runs").mkdir()
    config = load_config(night._config(tmp_path, tmp_path / "runs"))
    assert config.task.environment.turns == 500 and config.rollout.max_lost_servers == 1


def test_a_figure_beyond_its_bound_is_a_failure(benchmark):
    night = benchmark("night")
    good = {
        "runs_lost": 0, "prompts_lost": 0, "episodes_failed": 0, "all_routes_trained_on": 1.0, "turns_recorded": 500,
        "turns_published_per_second": 200.0, "files_per_step": 4.0,
    }  # fmt: skip
    assert night.passed(good)
    bad = dict.fromkeys(list(good)[:3], 1) | dict.fromkeys(list(good)[3:], 0) | {"files_per_step": 4.1}
    for name, value in bad.items():
        assert not night.passed(good | {name: value}), name


@pytest.mark.parametrize("begun", [True, False])
def test_a_lost_run_leaves_its_figures_and_its_folder(benchmark, tmp_path, monkeypatch, begun):
    """It may end before it has a folder, whose figures are then lacking."""
    night = benchmark("night")

    class Lost(night.Night):
        def __init__(self, work, seed, stack):
            self.counts, self.run = {"servers_killed": 1, "runs_lost": 0}, SimpleNamespace(folder=None)
            (work / "log").write_text("planted")

        def strike(self, until):
            raise night.RunEnded("planted")

        def result(self):
            return {**super().result(), "prompts_lost": 3} if begun else super().result()

    monkeypatch.setattr(night, "Night", Lost)
    monkeypatch.setattr(night, "turns_published_per_second", lambda: 300.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert night.main(["--json", str(tmp_path / "figures")]) == 1
    figures = json.loads((tmp_path / "figures").read_text())
    assert (figures["servers_killed"], figures["runs_lost"], "prompts_lost" in figures) == (1, 1, begun)
    assert [path.read_text() for path in tmp_path.glob("night-*/log")] == ["planted"]


@pytest.mark.timeout(1500)
def test_a_killed_server_and_a_stopped_rank_cost_no_prompt_and_no_route(benchmark, tmp_path):
    with ExitStack() as stack:
        night = benchmark("night").Night(tmp_path / "night", 0, stack, turns=(40, 20), hang_seconds=20)
        night.strike_at_once()
    figures = night.result()
    assert (figures["servers_killed"], figures["ranks_hung"], figures["runs_lost"]) == (1, 1, 0)
    assert (figures["prompts_lost"], figures["episodes_failed"], figures["all_routes_trained_on"]) == (0, 0, 1)
    assert figures["turns_recorded"] == 40 and figures["files_per_step"] <= 4
    lost = [row["rollout/lost_servers"] for row in night.trained()]
    assert lost[0] == 1 and lost[-1] == 0, "the run used one server, then both again"
