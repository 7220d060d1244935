"""Tests what benchmarks/night.py is made of, and a minute of the night. The whole night runs in `make nightly`."""

from contextlib import ExitStack

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
        "turns_published_per_second": 200.0,
    }  # fmt: skip
    assert night.passed(good)
    for name, bad in {**dict.fromkeys(list(good)[:3], 1), **dict.fromkeys(list(good)[3:], 0)}.items():
        assert not night.passed(good | {name: bad}), name


@pytest.mark.timeout(1500)
def test_a_killed_server_and_a_stopped_rank_cost_no_prompt_and_no_route(benchmark, tmp_path):
    with ExitStack() as stack:
        night = benchmark("night").Night(tmp_path / "night", 0, stack, turns=(40, 20), hang_seconds=20)
        night.strike_at_once()
    figures = night.result()
    assert (figures["servers_killed"], figures["ranks_hung"], figures["runs_lost"]) == (1, 1, 0)
    assert (figures["prompts_lost"], figures["episodes_failed"], figures["all_routes_trained_on"]) == (0, 0, 1)
    assert figures["turns_recorded"] == 40
    lost = [row["rollout/lost_servers"] for row in night.trained()]
    assert lost[0] == 1 and lost[-1] == 0, "the run used one server, then both again"
