"""Tests what a placement of experts is planned from, and what a checkpoint keeps of it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.torch import load_file, save_file

from moe_rl.config.load import load_config
from moe_rl.planning.expert_placement import natural_order
from moe_rl.train import assignment
from moe_rl.train.assignment import ExpertPlacement

CONFIG = Path(__file__).parents[2] / "configs/tiny_moe_cpu.yaml"


class Placed:
    """Stands in for a policy: remembers the placement that it was given."""

    def __init__(self):
        self.placement = natural_order(2, 4)

    def place(self, placement):
        self.placement = placement


def new(*overrides):
    config = load_config(CONFIG, ["placement.experts=traced", *overrides])
    return ExpertPlacement(config, Placed(), store=None, spec=SimpleNamespace())


def test_a_resumed_run_has_the_experts_where_they_were_and_the_same_window(tmp_path):
    before, after = new(), new()
    before.policy.placement = np.array([[3, 1, 2, 0], [0, 2, 1, 3]])
    before.counts = [np.arange(8).reshape(2, 4), 10 * np.arange(8).reshape(2, 4)]
    save_file(before.tensors(), tmp_path / "kept")
    after.restore(load_file(tmp_path / "kept"))
    assert np.array_equal(after.policy.placement, before.policy.placement)
    assert len(after.counts) == 2 and all(map(np.array_equal, after.counts, before.counts))


def test_before_the_first_plan_there_is_nothing_to_keep():
    before, after = new(), new()
    assert before.tensors() == {}
    after.restore({})
    assert after.counts == [] and np.array_equal(after.policy.placement, natural_order(2, 4))


def test_it_is_planned_from_the_routes_of_the_last_steps(monkeypatch):
    monkeypatch.setattr(assignment, "agreed", lambda read: read())
    monkeypatch.setattr("torch.distributed.all_reduce", lambda counts: None)
    placement = new("placement.window_steps=2", "placement.every_steps=9")
    for step in (2, 3, 4):
        monkeypatch.setattr(placement, "_count", lambda sequences, step=step: np.full((2, 4), step))
        assert placement.start_step(step, []) == {}
    assert [int(counts[0, 0]) for counts in placement.counts] == [3, 4]
