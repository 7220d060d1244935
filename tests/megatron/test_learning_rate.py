"""Tests the learning rate of each update: warm-up, constant, and the two ways to fall."""

import math

import pytest

from moe_rl.config.training import OptimizerConfig, TrainConfig
from moe_rl.megatron.model import learning_rate_schedule

UNIT = 2.0**-6  # a power of two, so that it changes no bit


class Groups:
    """The part of an optimizer that a schedule sets."""

    def __init__(self, min_lr: float):
        decays = {"max_lr": 2.0 * UNIT, "min_lr": min_lr, "wd_mult": 1.0}  # as Megatron makes them from the config
        self.param_groups = [decays, decays | {"wd_mult": 0.0}]


def rates(run_updates: int, **settings) -> list[float]:
    """Return the learning rate of each update of a run, and of two more, in units of half its peak."""
    settings["min_lr"] = settings.get("min_lr", 0.0) * UNIT
    optimizer = OptimizerConfig(lr=2.0 * UNIT, weight_decay=0.5, **settings)
    train, groups, found = TrainConfig(microbatch_tokens=8, optimizer=optimizer), Groups(optimizer.min_lr), []
    schedule = learning_rate_schedule(groups, train, run_updates)
    for _ in range(run_updates + 2):
        schedule.step(1)
        assert groups.param_groups[0]["lr"] == groups.param_groups[1]["lr"] == schedule.get_lr({})
        assert [group["weight_decay"] for group in groups.param_groups] == [0.5, 0.0]
        found.append(schedule.get_lr({}) / UNIT)
    return found


def test_it_warms_up_and_stays():
    assert rates(6) == [2.0] * 8
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5] + [2.0] * 5
    assert rates(4, warmup_steps=4) == [0.5, 1.0, 1.5] + [2.0] * 3


def test_the_demo_keeps_its_bits():
    """A warm-up of 4 updates, as in the shipped configs, gives the products that it always gave."""
    lr = 1e-4
    train = TrainConfig(microbatch_tokens=8, optimizer=OptimizerConfig(lr=lr, warmup_steps=4))
    schedule = learning_rate_schedule(Groups(0.0), train, 80)
    for update in range(6):
        schedule.step(1)
        assert schedule.get_lr({}) == lr * min(1.0, (update + 1) / 4)


def test_linear_falls_over_the_run_and_no_update_of_it_is_lost():
    assert rates(7, schedule="linear") == pytest.approx([1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    falling = rates(7, schedule="linear", warmup_steps=3, min_lr=1.0)
    assert falling == pytest.approx([2 / 3, 4 / 3, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 1.0])


def test_cosine_falls_slowly_at_both_ends_and_stops_where_it_is_told():
    expected = [1.0 + 0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(1, 5)]
    assert rates(6, schedule="cosine", decay_steps=3, min_lr=1.0) == pytest.approx([*expected, 1.0, 1.0, 1.0, 1.0])
    # the schedule of the run is the one that is asked for if nothing is said
    assert rates(3, schedule="cosine", min_lr=1.0) == pytest.approx([*expected, 1.0])
