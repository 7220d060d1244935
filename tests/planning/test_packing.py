import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import ConfigError
from moe_rl.planning.packing import alike, fill_rounds, pack, split_groups
from tests.support.refusals import refused

LENGTHS = st.lists(st.one_of(st.integers(0, 64), st.sampled_from([0, 1, 21, 22, 32, 33, 43, 63, 64])), max_size=40)


def tokens(lengths, indices):
    return sum(lengths[i] for i in indices)


@settings(max_examples=400, deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(64, 200))
def test_what_every_packing_keeps(lengths, ranks, budget):
    plan = pack(lengths, ranks=ranks, microbatch_tokens=budget)
    microbatches = [m for rank in plan for m in rank]
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    assert all(tokens(lengths, m) <= budget for m in microbatches)
    assert all(m == sorted(m) for m in microbatches)
    assert microbatches.count([]) == max(0, len(microbatches) - len(lengths))  # empty only when unavoidable
    assert plan == pack(list(lengths), ranks=ranks, microbatch_tokens=budget)


def fewest_bins(lengths, budget):
    """Find the exact optimum by search, for small cases only."""
    order = sorted(lengths, reverse=True)
    best = len(order)

    def place(at, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(order):
            best = len(rooms)
            return
        for b, room in enumerate(rooms):
            if room >= order[at]:
                place(at + 1, rooms[:b] + [room - order[at]] + rooms[b + 1 :])
        place(at + 1, [*rooms, budget - order[at]])

    place(0, [])
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 3))
def test_the_schedule_is_as_short_as_an_exact_search_finds_or_one_longer(lengths, ranks):
    got = len(pack(lengths, ranks=ranks, microbatch_tokens=60)[0])
    optimum = -(-fewest_bins(lengths, 60) // ranks)
    assert optimum <= got <= optimum + 1


def test_a_budget_that_only_best_fit_meets():
    # Two bins of 10 hold these only as 5+5 and 4+3+3. Longest-first alone makes 5+4 and 5+3+3 = 11.
    lengths = [5, 5, 4, 3, 3]
    plan = pack(lengths, ranks=1, microbatch_tokens=10)
    assert plan == [[[2, 3, 4], [0, 1]]]


def test_a_balanced_packing_may_need_fewer_microbatches_than_best_fit():
    # Best fit makes 12+6, 9+5+5 and 3; balanced, two bins of 20 hold them all.
    plan = pack([9, 3, 12, 6, 5, 5], ranks=2, microbatch_tokens=20)
    assert [len(rank) for rank in plan] == [1, 1]


def test_best_fit_bins_are_split_up_until_no_rank_idles():
    # Best fit needs 9 bins of 50; balanced, even 10 overflow. The tenth must come from a bin that can be split: the
    # fullest, first one holds a single sequence.
    lengths = [7, 43, 31, 19, 16, 19, 14, 1, 22, 28, 50, 21, 29, 25, 25, 28, 22, 14, 12, 11, 13]
    plan = pack(lengths, ranks=5, microbatch_tokens=50)
    loads = [tokens(lengths, m) for rank in plan for m in rank]
    assert [len(rank) for rank in plan] == [2] * 5
    assert min(loads) > 0 and max(loads) == 50


def test_realistic_lengths_are_packed_tightly_and_evenly():
    """Draw long-tailed lengths, truncated at the maximum. The floor is the number of bins needed if sequences were
    divisible.
    """
    rng = random.Random(11)
    slack, imbalance, attention = [], [], []
    for _ in range(20):
        ranks, budget = rng.choice([2, 8]), 8192
        lengths = [200 + min(3896, int(rng.lognormvariate(6.5, 0.8))) for _ in range(512)]
        plan = pack(lengths, ranks=ranks, microbatch_tokens=budget)
        floor = -(-sum(lengths) // (budget * ranks))
        slack.append(len(plan[0]) - floor)
        for together in zip(*plan, strict=True):
            loads = [tokens(lengths, m) for m in together]
            imbalance.append(max(loads) / (sum(loads) / ranks) - 1)
            squares = [sum(lengths[index] ** 2 for index in m) for m in together]
            attention.append(max(squares) / (sum(squares) / ranks) - 1)
    assert sum(slack) <= 1
    assert sum(imbalance) / len(imbalance) < 0.01
    assert sum(attention) / len(attention) < 0.1  # 0.25 where bins are ordered by tokens alone


def test_long_sequences_are_spread_over_ranks_and_time():
    # Eight long ones and many short ones, two ranks: each microbatch gets the same work.
    lengths = [100] * 8 + [10] * 80
    plan = pack(lengths, ranks=2, microbatch_tokens=205)
    assert [[tokens(lengths, m) for m in rank] for rank in plan] == [[200] * 4] * 2


def test_the_fuller_microbatch_goes_to_the_rank_that_has_less():
    assert pack([10, 9, 8, 7], ranks=2, microbatch_tokens=10) == [[[0], [3]], [[1], [2]]]


def test_fewer_sequences_than_ranks_leaves_some_ranks_an_empty_microbatch():
    assert pack([5, 7], ranks=4, microbatch_tokens=10) == [[[1]], [[0]], [[]], [[]]]
    # three full ones on two ranks: two rounds, one place stays empty
    plan = pack([10, 10, 10], ranks=2, microbatch_tokens=10)
    assert sorted(len(m) for rank in plan for m in rank) == [0, 1, 1, 1] and [len(rank) for rank in plan] == [2, 2]


def test_a_plan_is_filled_up_to_whole_rounds_behind_what_it_has():
    plan = [[[2], [0, 1], [3]], [[4], [5], []]]
    assert fill_rounds(plan, 2) == fill_rounds(plan, 4) == [[[2], [0, 1], [3], []], [[4], [5], [], []]]
    assert fill_rounds(plan, 1) == fill_rounds(plan, 3) == plan == [[[2], [0, 1], [3]], [[4], [5], []]]
    assert fill_rounds([[], []], 4) == [[], []]


def test_nothing_to_pack():
    assert pack([], ranks=3, microbatch_tokens=10) == [[], [], []]


def test_a_sequence_above_the_budget_is_a_config_error():
    with refused(ConfigError, "at least 130", sequence=2, got=("130", "2"), expected=("= 100",)):
        pack([10, 101, 130], ranks=2, microbatch_tokens=100)
    assert pack([10, 100], ranks=2, microbatch_tokens=100) == [[[1]], [[0]]]


@pytest.mark.parametrize("arguments", [([1], 0, 10), ([1], 1, 0), ([3, -1], 1, 10)])
def test_bad_input_is_refused(arguments):
    lengths, ranks, budget = arguments
    facts = {"sequence": 1} if min(lengths) < 0 else {"fault": "arguments"}
    with refused(ValueError, **facts):
        pack(lengths, ranks=ranks, microbatch_tokens=budget)


@given(st.lists(st.integers(-3, 9), max_size=40), st.integers(1, 6))
def test_groups_stay_whole_in_order_and_even(group_ids, updates):
    shares = split_groups(group_ids, updates)
    assert len(shares) == updates
    assert sorted(i for share in shares for i in share) == list(range(len(group_ids)))
    groups = [list(dict.fromkeys(group_ids[i] for i in share)) for share in shares]
    assert [g for share in groups for g in share] == list(dict.fromkeys(group_ids))  # order kept, none split
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(share == sorted(share) for share in shares)


def test_split_known_case():
    assert split_groups([4, 4, 1, 4, 1, 9], 2) == [[0, 1, 2, 3, 4], [5]]
    assert split_groups([0, 0], 3) == [[0, 1], [], []]
    with refused(ValueError, fault="arguments", got=("updates=0",)):
        split_groups([0], 0)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_sequences_that_are_padded_to_the_longest_of_their_group_have_at_most_twice_their_rows(lengths):
    groups = alike(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert sum(len(group) * max(lengths[i] for i in group) for group in groups) <= 2 * sum(lengths)


def test_sequences_are_grouped_only_where_one_group_would_pad_too_much():
    assert alike([16, 5, 12, 3]) == [[0, 1, 2, 3]]
    assert alike([5120, *[300] * 10]) == [[0], list(range(1, 11))]


def test_planning_imports_no_torch():
    code = "import sys, moe_rl.planning.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
