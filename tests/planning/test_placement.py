import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.planning.expert_placement import (
    check_order,
    natural_order,
    place,
    rank_loads,
)
from tests.support.refusals import refused


def cost(counts, order, ranks):
    """Sum over batches the maximum over ranks, for one layer [N, E] in the order [E], with plain loops."""
    share, total = len(order) // ranks, 0
    for batch in counts:
        total += max(sum(int(batch[e]) for e in order[first : first + share]) for first in range(0, len(order), share))
    return total


def moved(order, before, ranks):
    share = len(order) // ranks
    rank = {int(e): slot // share for slot, e in enumerate(before)}
    return sum(rank[int(e)] != slot // share for slot, e in enumerate(order))


@st.composite
def problems(draw):
    ranks, share = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    batches, layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 2)), ranks * share
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, draw(st.sampled_from([1, 4, 10_000])), (batches, layers, experts))
    current = np.stack([rng.permutation(experts) for _ in range(layers)]) if draw(st.booleans()) else None
    return counts, ranks, current


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 2e-4, 0.5]))
def test_what_every_placement_keeps(problem, max_moved, min_gain, price):
    counts, ranks, current = problem
    arguments = {"current": current, "max_moved": max_moved, "min_gain": min_gain, "price": price}
    order, report = place(counts, ranks, **arguments)
    _, layers, experts = counts.shape
    check_order(order, layers, experts)
    natural = np.tile(np.arange(experts), (layers, 1))
    before = natural if current is None else current
    sums = [[cost(counts[:, layer], one[layer], ranks) for layer in range(layers)] for one in (natural, before, order)]
    mean = counts.sum() / ranks
    excesses = [sum(each) / mean - 1 if mean else 0.0 for each in sums]
    assert (report.natural, report.before, report.after) == pytest.approx(excesses)
    assert all(after <= was for was, after in zip(sums[1], sums[2], strict=True))
    assert report.floor <= report.after + 1e-9
    moves = [moved(order[layer], before[layer], ranks) for layer in range(layers)]
    assert report.moved == sum(moves)
    assert (report.placement == "kept") == (not report.moved) == np.array_equal(order, before)
    if report.moved:
        assert all(after <= was for was, after in zip(sums[0], sums[2], strict=True))
        assert sum(sums[2]) <= (1 - min_gain) * sum(sums[1])
        for layer, count in enumerate(moves):
            assert count <= max_moved * experts or np.array_equal(order[layer], natural[layer])
    # What stays on its rank stays in its slot: it need not be copied.
    share = experts // ranks
    at, was = np.argsort(order), np.argsort(before)
    stay = at // share == was // share
    assert (at == was)[stay].all() or not report.moved or (order == natural).all(axis=1).any()
    again = place(counts.copy(), ranks, **arguments)
    assert np.array_equal(order, again[0]) and report == again[1]


def optimum(counts, ranks):
    """Find by trial the smallest sum of maxima [N, E] of all placements."""
    share = counts.shape[1] // ranks

    def groups(left):
        if not left:
            yield []
        else:
            for others in itertools.combinations(left[1:], share - 1):
                group = (left[0], *others)
                for rest in groups([e for e in left if e not in group]):
                    yield [*group, *rest]

    return min(cost(counts, order, ranks) for order in groups(list(range(counts.shape[1]))))


def test_tiny_layers_come_near_to_the_optimum_of_an_exact_search():
    rng = np.random.default_rng(7)
    reached = closed = open_ = 0
    for number in range(40):
        ranks, experts = [(2, 6), (2, 8), (3, 6), (4, 8)][number % 4]
        counts = rng.integers(0, 30, (1 + number % 3, 1, experts))
        order, _ = place(counts, ranks, price=0.0)
        got, best = cost(counts[:, 0], order[0], ranks), optimum(counts[:, 0], ranks)
        natural = cost(counts[:, 0], range(experts), ranks)
        assert best <= got <= natural
        reached += got == best
        closed, open_ = closed + natural - got, open_ + natural - best
    assert reached >= 24
    assert closed >= 0.95 * open_


def test_only_as_many_experts_move_as_are_allowed_and_worth_it():
    # Four popular experts lie on one rank of two. Moving one for another halves what is above the mean at first.
    counts = np.array([[[90, 80, 70, 60, 10, 10, 10, 10]]])
    free, report = place(counts, 2)
    assert report.natural == pytest.approx(300 / 170 - 1) and report.after == pytest.approx(0.0)
    assert report.moved == 4 and report.placement == "moved"
    _, quarter = place(counts, 2, max_moved=0.25)
    assert quarter.moved == 2 and quarter.after == pytest.approx(220 / 170 - 1)
    # The second pair takes 50 of the maximum off: less than 2 x 0.2 x 170.
    _, dear = place(counts, 2, price=0.2)
    assert dear.moved == 2 and dear.after == quarter.after
    kept, refused = place(counts, 2, min_gain=0.6)
    assert np.array_equal(kept, natural_order(1, 8)) and refused.placement == "kept" and "less than" in refused.why
    same, none = place(counts, 2, current=free)
    assert np.array_equal(same, free) and (none.placement, none.moved) == ("kept", 0)


def test_an_order_that_got_worse_than_natural_gives_way_to_it():
    counts = np.array([[[50, 10, 50, 10]]])
    current = np.array([[0, 2, 1, 3]])
    order, report = place(counts, 2, current=current, max_moved=0.0)
    assert np.array_equal(order, natural_order(1, 4)) and report.moved == 2 and report.after == 0.0
    kept, _ = place(counts, 2, current=current, max_moved=0.0, min_gain=0.5)
    assert np.array_equal(kept, current)


def test_popularity_that_stays_is_evened_in_batches_that_were_not_seen():
    rng = np.random.default_rng(3)
    share = rng.permuted(np.tile(np.arange(1, 65) ** -0.5, (6, 1)), axis=1)
    counts = rng.poisson(2000 * share, (6, *share.shape))
    order, report = place(counts[:4], 8)
    later = counts[4:]
    loads = [rank_loads(later, one, 8) for one in (natural_order(6, 64), order)]
    natural, placed = (load.max(axis=2).sum() / load.sum() * 8 - 1 for load in loads)
    assert placed < 0.15 * natural and report.after <= placed


def test_where_each_expert_lies():
    order = np.array([[2, 0, 1, 3], [3, 2, 1, 0]])
    assert np.argsort(order).tolist() == [[1, 2, 0, 3], [3, 2, 1, 0]]
    counts = np.array([[[1, 2, 4, 8], [16, 32, 64, 128]]])
    assert rank_loads(counts, order, 2).tolist() == [[[5, 10], [192, 48]]]


@pytest.mark.parametrize(
    "change",
    [
        {"counts_NLE": np.ones((1, 2, 6))},
        {"counts_NLE": -np.ones((1, 2, 6), int)},
        {"counts_NLE": np.ones((2, 6), int)},
        {"counts_NLE": np.ones((0, 2, 6), int)},
        {"expert_parallel": 4},
        {"expert_parallel": 0},
        {"max_moved": 1.5},
        {"min_gain": -0.1},
        {"price": -1.0},
        {"current": np.zeros((2, 6), int)},
        {"current": np.tile(np.arange(6), (1, 1))},
    ],
)
def test_bad_input_is_refused(change):
    good = {"counts_NLE": np.ones((1, 2, 6), int), "expert_parallel": 3}
    place(**good)
    with refused(ValueError, fault={"arguments", "placement"}):
        place(**(good | change))
