import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import ConfigError
from moe_rl.planning import balance
from moe_rl.planning.balance import excess, load_of, pack_by_load, round_loads
from moe_rl.planning.packing import pack
from tests.support.refusals import refused


def sums(plan, loads, exchange):
    """Sum over rounds and layers the maximum and the mean over expert-parallel ranks, with plain loops."""
    layers, parts = loads.shape[1:]
    most, mean = 0, 0.0
    for first in range(0, len(plan), exchange):
        for number in range(len(plan[0])):
            together = [i for rank in plan[first : first + exchange] for i in rank[number]]
            for layer in range(layers):
                arrived = [sum(int(loads[i][layer][part]) for i in together) for part in range(parts)]
                most += max(arrived)
                mean += sum(arrived) / parts
    return most, mean


def size(lengths, indices, power):
    return sum(lengths[i] ** power for i in indices)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.one_of(st.integers(0, 64), st.sampled_from([20, 21, 32, 33])), max_size=24))
    groups, exchange = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layers, parts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    loads = rng.integers(0, draw(st.sampled_from([1, 3, 1000])), (len(lengths), layers, parts))
    return lengths, loads, groups * exchange, exchange, draw(st.sampled_from([0.0, 0.05, 0.5]))


@settings(max_examples=250, deadline=None)
@given(batches(), st.integers(64, 200))
def test_what_every_packing_by_load_keeps(batch, budget):
    lengths, loads, ranks, exchange, slack = batch
    arguments = {"ranks": ranks, "microbatch_tokens": budget, "exchange": exchange, "slack": slack, "work": 10_000_000}
    plan, report = pack_by_load(lengths, loads, **arguments)
    start = pack(lengths, ranks=ranks, microbatch_tokens=budget)
    assert [[len(m) for m in rank] for rank in plan] == [[len(m) for m in rank] for rank in start]
    assert sorted(i for rank in plan for m in rank for i in m) == list(range(len(lengths)))
    assert all(m == sorted(m) for rank in plan for m in rank)
    for number in range(len(plan[0])):
        assert all(size(lengths, rank[number], 1) <= budget for rank in plan)
        for power in (1, 2):
            fullest = max(size(lengths, rank[number], power) for rank in start)
            assert all(size(lengths, rank[number], power) <= (1 + slack) * fullest + 1e-6 for rank in plan)
    # Never worse, and the report tells the truth.
    (most, mean), (before, same) = sums(plan, loads, exchange), sums(start, loads, exchange)
    whole, _ = sums([[list(range(len(lengths)))]], loads, 1) if lengths else (0, 0)
    assert most <= before and mean == pytest.approx(same)
    seen = (report.planned, report.by_length, report.floor)
    assert seen == pytest.approx([x / mean - 1 if mean else 0.0 for x in (most, before, whole)])
    assert report.floor <= report.planned + 1e-9
    assert (report.packing == "length") == (plan == start) == (most == before) == (not report.swaps)
    assert (plan, report) == pack_by_load(list(lengths), loads.copy(), **arguments)


def optimum(lengths, loads, ranks, budget, exchange, slack):
    """Find by trial the smallest sum of maxima of all packings with the same number of sequences per bin and the same
    limits.
    """
    start = pack(lengths, ranks=ranks, microbatch_tokens=budget)
    shape = [[len(m) for m in rank] for rank in start]
    limits = [
        [(1 + slack) * max(size(lengths, rank[number], power) for rank in start) + 1e-6 for power in (1, 2)]
        for number in range(len(start[0]))
    ]
    best = None
    for order in itertools.permutations(range(len(lengths))):
        left = list(order)
        plan = [[[left.pop() for _ in range(count)] for count in rank] for rank in shape]
        if any(m != sorted(m) for rank in plan for m in rank):
            continue
        if all(
            size(lengths, m, power) <= limits[number][power - 1] and size(lengths, m, 1) <= budget
            for rank in plan
            for number, m in enumerate(rank)
            for power in (1, 2)
        ):
            most, _ = sums(plan, loads, exchange)
            best = most if best is None else min(best, most)
    return best


def test_tiny_batches_come_near_to_the_optimum_of_an_exact_search():
    rng = random.Random(5)
    reached, closed, open_ = 0, 0, 0
    for _ in range(24):
        lengths = [rng.choice([10, 10, 11]) for _ in range(6)]
        loads = np.array([[[rng.randrange(12) for _ in range(2)] for _ in range(2)] for _ in lengths])
        ranks, exchange = rng.choice([(1, 1), (2, 1)])
        budget = {1: 25, 2: 22}[ranks]
        arguments = {"ranks": ranks, "microbatch_tokens": budget, "exchange": exchange, "slack": 0.1}
        plan, _ = pack_by_load(lengths, loads, **arguments)
        got, _ = sums(plan, loads, exchange)
        before, _ = sums(pack(lengths, ranks=ranks, microbatch_tokens=budget), loads, exchange)
        best = optimum(lengths, loads, ranks, budget, exchange, 0.1)
        assert best <= got
        reached += got == best
        closed, open_ = closed + before - got, open_ + before - best
    assert reached >= 18
    assert closed >= 0.9 * open_


def test_two_kinds_of_sequences_are_mixed():
    # By length, 0 and 2 go together, and so do 1 and 3: each microbatch loads one expert-parallel rank alone.
    loads = np.array([[[80, 0]], [[0, 80]]] * 2)
    plan, report = pack_by_load([10] * 4, loads, ranks=1, microbatch_tokens=20)
    assert pack([10] * 4, ranks=1, microbatch_tokens=20) == [[[0, 2], [1, 3]]]
    assert sorted(i % 2 for i in plan[0][0]) == sorted(i % 2 for i in plan[0][1]) == [0, 1]
    assert (report.by_length, report.planned, report.floor, report.packing) == (1.0, 0.0, 0.0, "load")
    assert report.why == "no exchange improves the plan any more" and report.swaps == 1


def test_which_rank_of_a_group_holds_a_sequence_changes_nothing():
    loads = np.array([[[8, 0]], [[0, 8]]])
    one_group, together = pack_by_load([10, 10], loads, ranks=2, microbatch_tokens=10)
    assert one_group == [[[0]], [[1]]] and together.by_length == together.planned == 0.0
    assert together.packing == "length" and together.why.startswith("one round holds everything")
    _, apart = pack_by_load([10, 10], loads, ranks=2, microbatch_tokens=10, exchange=1)
    assert apart.by_length == apart.planned == 1.0 and "no exchange" in apart.why


def test_what_is_popular_everywhere_cannot_be_packed_away():
    loads = np.tile([[[30, 10]]], (12, 1, 1))
    plan, report = pack_by_load([10] * 12, loads, ranks=2, microbatch_tokens=30, exchange=1)
    assert plan == pack([10] * 12, ranks=2, microbatch_tokens=30)
    assert report.by_length == report.planned == report.floor == 0.5


def test_tokens_are_given_for_even_experts_only_as_the_slack_allows():
    # By length {1, 2} has 49 tokens and {0, 3} 48, each for one expert-parallel rank alone. Even experts take 50.
    lengths, loads = [30, 29, 20, 18], np.array([[[40, 0]], [[0, 40]], [[0, 40]], [[40, 0]]])
    assert pack(lengths, ranks=1, microbatch_tokens=60) == [[[1, 2], [0, 3]]]
    for budget, slack, planned in ((60, 0.0, 1.0), (60, 0.02, 1.0), (60, 0.05, 0.0), (49, 9.0, 1.0)):
        _, report = pack_by_load(lengths, loads, ranks=1, microbatch_tokens=budget, slack=slack)
        assert (report.by_length, report.planned) == (1.0, planned)


def topical(sequences=240, layers=6, parts=4, seed=3):
    """Make sequences of eight topics. Each topic has its own experts, and together they use all experts alike."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(60, 100, sequences)
    shares = rng.dirichlet(np.ones(parts), (8, layers))
    loads = np.rint(lengths[:, None, None] * 8 * shares[rng.integers(0, 8, sequences)]).astype(int)
    return lengths.tolist(), loads


def test_more_work_is_never_worse_and_close_most_of_the_gap():
    lengths, loads = topical(layers=12)
    seen = [
        pack_by_load(lengths, loads, ranks=4, microbatch_tokens=600, exchange=1, work=work)[1]
        for work in (0, 2_000_000, 1_000_000_000)
    ]
    assert [report.packing for report in seen] == ["length", "load", "load"]
    assert seen[1].why == "the search reached its work limit"
    assert seen[0].planned > seen[1].planned > seen[2].planned > seen[2].floor
    assert seen[2].planned - seen[2].floor < 0.5 * (seen[2].by_length - seen[2].floor)


def test_every_sequence_of_a_large_round_is_looked_at(monkeypatch):
    monkeypatch.setattr(balance, "_AT_ONCE", 1)  # of 40 sequences 32 at a time, 16 candidates
    loads = np.array([[[5, 5]]] * 64 + [[[10, 0]], [[0, 10]]] * 8)
    plan, report = pack_by_load([10] * 80, loads, ranks=1, microbatch_tokens=400)
    assert [len(m) for rank in plan for m in rank] == [40, 40]
    assert (report.by_length, report.planned, report.floor) == pytest.approx((0.2, 0.0, 0.0))


def test_loads_of_ranks_are_those_of_their_experts():
    counts = np.random.default_rng(0).integers(0, 9, (3, 2, 12))
    loads = load_of(counts, 4)
    for s, layer, rank in np.ndindex(3, 2, 4):
        assert loads[s, layer, rank] == sum(counts[s, layer, e] for e in range(12) if e // 3 == rank)
    with refused(ValueError, fault="division", got=("(3, 2, 12)", "5")):
        load_of(counts, 5)
    with refused(ValueError, fault="division", got=("(2, 12)",)):
        load_of(counts[0], 4)


def test_excess_weighs_rounds_by_their_pairs():
    loads = np.array([[[30, 10], [5, 5]], [[10, 10], [0, 0]]])
    whole, layers = excess(loads)
    assert layers.tolist() == pytest.approx([(30 + 10) / (20 + 10) - 1, 0.0])
    assert whole == pytest.approx((30 + 10 + 5) / (20 + 10 + 5) - 1)
    assert excess(np.zeros((2, 1, 2), int)) == (0.0, np.zeros(1))


def test_rounds_are_of_one_group():
    loads = np.arange(12).reshape(6, 1, 2)
    plan = [[[0], [1]], [[2], []], [[3], [4]], [[5], []]]
    expected = [loads[[0, 2]], loads[[1]], loads[[3, 5]], loads[[4]]]
    assert round_loads(plan, loads, exchange=2).tolist() == [part.sum(axis=0).tolist() for part in expected]


@pytest.mark.parametrize(
    "change",
    [
        {"loads_SLR": np.ones((2, 1, 2), int)},
        {"loads_SLR": np.ones((3, 2), int)},
        {"loads_SLR": np.ones((3, 1, 2))},
        {"loads_SLR": -np.ones((3, 1, 2), int)},
        {"exchange": 3},
        {"exchange": 0},
        {"slack": -0.1},
        {"ranks": 0},
    ],
)
def test_bad_input_is_refused(change):
    good = {"loads_SLR": np.ones((3, 1, 2), int), "ranks": 2, "microbatch_tokens": 10}
    pack_by_load([5, 5, 5], **good)
    with refused(ValueError, fault="arguments"):
        pack_by_load([5, 5, 5], **(good | change))


def test_a_sequence_above_the_budget_is_a_config_error():
    with refused(ConfigError, sequence=1, got=("12",), expected=("= 10",)):
        pack_by_load([5, 12], np.ones((2, 1, 2), int), ranks=1, microbatch_tokens=10)


def test_a_packing_by_length_that_is_near_the_floor_is_kept_without_a_search(monkeypatch):
    loads = 10_000 + np.random.default_rng(7).integers(0, 20, (12, 2, 2))
    arguments = {"ranks": 1, "microbatch_tokens": 30}
    before, found = pack_by_load([10] * 12, loads, **arguments)
    assert found.packing == "length" and found.floor < found.by_length < found.floor + balance._WORTH
    monkeypatch.setattr(balance, "_WORTH", 0.0)
    searched, more = pack_by_load([10] * 12, loads, **arguments)
    assert searched != before and more.floor <= more.planned < more.by_length == found.by_length


def test_the_search_goes_on_only_while_it_gains_enough(monkeypatch):
    rng = np.random.default_rng(3)
    loads, lengths = rng.integers(100, 400, (240, 6, 4)), rng.integers(8, 12, 240).tolist()
    arguments = {"ranks": 2, "microbatch_tokens": 100, "exchange": 2}
    _, to_the_end = pack_by_load(lengths, loads, **arguments)
    assert to_the_end.why == "no exchange improves the plan any more"  # well before the first stage has ended
    monkeypatch.setattr(balance, "_STAGE", 5_000_000)
    _, short = pack_by_load(lengths, loads, **arguments)
    assert short.why == "more exchanges would gain too little" and 0 < short.swaps < to_the_end.swaps
    assert to_the_end.planned <= short.planned < to_the_end.planned + 4 * balance._WORTH < short.by_length
    monkeypatch.setattr(balance, "_WORTH", 0.0)
    assert pack_by_load(lengths, loads, **arguments)[1] == to_the_end
