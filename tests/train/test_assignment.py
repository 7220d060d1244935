"""Tests what a placement of experts is planned from, and what a checkpoint keeps of it."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from moe_rl.config.load import load_config
from moe_rl.errors import ConfigError, ReplayError, TraceError
from moe_rl.megatron import world
from moe_rl.planning.expert_placement import natural_order
from moe_rl.train import shares
from moe_rl.train.shares import ExpertPlacement, assign
from moe_rl.types import RewardedTurn, Sequence, sampled_by
from tests.support.refusals import refused

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
    monkeypatch.setattr(world, "agreed", nullcontext)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda counts: None)
    placement = new("placement.window_steps=2", "placement.every_steps=9")
    for step in (2, 3, 4):
        monkeypatch.setattr(placement, "_count", lambda sequences, step=step: np.full((2, 4), step))
        assert placement.start_step(step, []) == {}
    assert [int(counts[0, 0]) for counts in placement.counts] == [3, 4]


def test_every_rank_is_told_why_one_of_them_refuses(monkeypatch):
    # torchrun ends a rank that still closes its sampler as soon as another one has ended
    sent = []
    monkeypatch.setattr(world, "all_reduce", lambda values, how: [max(2, *values)])
    monkeypatch.setattr(world, "broadcast", lambda text, *_: sent.append(text))

    def read(error=None):
        with world.agreed():
            if error:
                raise error

    monkeypatch.setattr(world.dist, "get_rank", lambda: 1)
    with pytest.raises(TraceError, match="shard s7"):
        read(TraceError("shard s7 is damaged"))
    monkeypatch.setattr(world.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(world, "broadcast", lambda text, kind, source: sent[0] if source == 1 else text)
    with pytest.raises(ReplayError, match="rank 1: shard s7 is damaged"):
        read()


@pytest.fixture
def ranks(monkeypatch):
    """Make two data-parallel ranks of one group that this process stands in for alone."""
    monkeypatch.setattr(world, "data_parallel", lambda: (0, 2))
    monkeypatch.setattr(world, "microbatches_in_a_round", lambda: 1)
    monkeypatch.setattr(world, "device", lambda: None)
    monkeypatch.setattr(world, "dispatching_shares", lambda: 2)
    monkeypatch.setattr(world, "broadcast", lambda plan, kind, source: plan)
    monkeypatch.setattr(world, "agreed", nullcontext)
    for name, value in {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda loads: None}.items():
        monkeypatch.setattr(shares.dist, name, value)


def sequence(key, prompt, tokens, of=""):
    made = np.zeros(tokens, np.float32)
    return Sequence(key, (1,) * prompt, (2,) * tokens, made, 0.0, sampled_by(0, tokens), key, of)


def test_each_update_is_planned_by_another_rank(ranks, monkeypatch):
    monkeypatch.setattr(shares, "expert_counts", lambda store, ref, spec: np.full((2, 4), len(ref)))
    monkeypatch.setattr(shares.dist, "get_world_size", lambda: 2)
    config = load_config(CONFIG, ["train.packing=load", "train.microbatch_tokens=36"])
    updates = [[sequence(f"{number}{at}", 4, 9 + number) for at in range(4)] for number in range(3)]
    planned, sent = [], []

    def pack_by_load(lengths, *arguments, **options):
        planned.append(lengths[0] - 12)
        return shares.packing.pack(lengths, ranks=2, microbatch_tokens=36), None

    def broadcast(plan, kind, source):
        sent.append((source, plan is not None))
        return plan

    monkeypatch.setattr(shares, "pack_by_load", pack_by_load)
    monkeypatch.setattr(shares.world, "broadcast", broadcast)
    for rank, mine in ((0, [0, 2]), (1, [1])):
        monkeypatch.setattr(world.dist, "get_rank", lambda rank=rank: rank)
        planned.clear()
        sent.clear()
        assign(updates, config, None, SimpleNamespace(moe_layers=(0, 1)), natural_order(2, 4))
        assert planned == mine and sent == [(number % 2, number in mine) for number in range(3)]


@pytest.mark.parametrize("packing", ["length", "load"])
def test_all_segments_of_a_completion_are_in_one_microbatch(ranks, monkeypatch, packing):
    counted = []

    def counts(store, ref, spec):
        counted.append(ref)
        return np.ones((2, 4), int)

    monkeypatch.setattr(shares, "expert_counts", counts)
    cut = [sequence("b", 4, 4, "b"), sequence("b/1", 8, 4, "b"), sequence("b/2", 12, 2, "b")]
    short = [sequence("e", 4, 1, "e"), sequence("e/1", 5, 1, "e")]
    sequences = [sequence("a", 4, 9), *cut, sequence("c", 4, 8), sequence("d", 4, 20), *short]
    config = load_config(CONFIG, [f"train.packing={packing}", "train.microbatch_tokens=36"])
    ((plan, _),) = assign([sequences], config, None, SimpleNamespace(moe_layers=(0, 1)), natural_order(2, 4))
    microbatches = [one for rank in plan for one in rank]
    assert sorted(i for one in microbatches for i in one) == list(range(8)) and len(microbatches) > 2
    for together in ({1, 2, 3}, {6, 7}):
        assert any(together <= set(one) for one in microbatches)
    assert all(sum(sequences[i].forwarded for i in one) <= 36 for one in microbatches)
    assert sorted(counted) == ([] if packing == "length" else sorted(one.key for one in sequences))


@pytest.mark.parametrize("packing", ["length", "load"])
def test_branches_and_turns_that_count_by_themselves_need_no_common_microbatch(ranks, monkeypatch, packing):
    monkeypatch.setattr(shares, "expert_counts", lambda *_: np.ones((2, 4), int))
    episode = [sequence(f"e{at}", 4 + at, 24, "e") for at in range(5)]
    branches = [replace(one, alone=True) for one in episode]
    turns = [replace(one, turns=(RewardedTurn(at, None, 24, 0.0),)) for at, one in enumerate(episode)]
    config = load_config(CONFIG, [f"train.packing={packing}", "train.microbatch_tokens=36"])
    given = config, None, SimpleNamespace(moe_layers=(0, 1)), natural_order(2, 4)
    for sequences in (branches, turns):
        ((plan, _),) = assign([sequences], *given)
        assert sorted(one for rank in plan for one in rank if one) == [[at] for at in range(5)]
    with refused(ConfigError, got="145 tokens, 1 too long in all"):
        assign([episode], *given)
    with refused(ConfigError, got="37 tokens, 1 too long in all"):
        assign([[*branches, replace(sequence("e5", 14, 24, "e"), alone=True)]], *given)
