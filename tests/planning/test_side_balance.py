"""Which ratio of samplers to trainers keeps both busy, by hand."""

import pytest

from moe_rl.config.load import load_config
from moe_rl.planning.plan_table import render
from moe_rl.planning.side_balance import Speeds, side_balance


def test_both_sides_are_busy_at_the_ratio(config_file):
    """100 tokens/s of a GPU that samples, 30 of one that trains: 10 that train need 3 that sample."""
    config = load_config(config_file, ["cluster.gpu_memory_gib=80", "cluster.gpus=10", "cluster.engines=3"])
    even = side_balance(config, 10, Speeds(100.0, 30.0, "by hand"))
    assert (even.samplers, even.trainers, even.engines) == (3, 10, 3)
    assert even.ratio == pytest.approx(0.3)
    assert even.idle_overlapped == pytest.approx((0, 0)) and even.idle_in_turns == pytest.approx((0.5, 0.5))
    # Half the trainers are needed: they take 1 s for 300 tokens, the samplers 2 s.
    slow = side_balance(config, 10, Speeds(50.0, 30.0, "by hand"))
    assert slow.engines == 6 and slow.idle_overlapped == pytest.approx((0, 0.5))
    assert slow.idle_in_turns == pytest.approx((1 / 3, 2 / 3))


def test_engines_are_whole_and_of_several_gpus(config_file):
    config = load_config(config_file, ["cluster.gpu_memory_gib=80", "cluster.gpus=10", "cluster.gpus_per_engine=4"])
    found = side_balance(config, 10, Speeds(100.0, 90.0, "by hand"))  # 9 GPUs sample
    assert (found.samplers, found.gpus_per_engine, found.engines) == (4, 4, 3)
    assert side_balance(config, 10, Speeds(100.0, 80.0, "by hand")).engines == 2


def test_the_table_tells_it_only_where_speeds_are_known(plan_of, config_file):
    plan = plan_of()
    told = render(plan, side_balance(load_config(config_file), 2, Speeds(1000.0, 500.0, "by hand")))
    assert "1,000  completion tokens/s of a GPU that samples, by hand" in told and "1 : 2" in told
    assert "samplers idle" in told and "samplers idle" not in render(plan)
