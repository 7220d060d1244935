"""Compares copies of experts with plain loops over rows: who computes which row, and how even the ranks become."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.planning.dispatch import count, send_order
from moe_rl.planning.expert_copies import choose_copies, send_to_copies, with_copies


@st.composite
def popular_experts(draw):
    """(P, T, E, c, least, routes of each rank [L, R, K], order [L, E])"""
    parallel, tensor = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (5, 1)]))
    experts = parallel * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, experts))
    weight = rng.dirichlet(np.full(experts, draw(st.sampled_from([0.1, 1.0, 10.0]))), layers) + 1e-6
    routes = []
    for _ in range(parallel * tensor):
        scores = rng.gumbel(size=(layers, draw(st.integers(0, 30)), experts)) + np.log(weight)[:, None]
        routes.append(np.argsort(-scores, -1)[..., :top_k].astype(np.int16))
    order = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
    return parallel, tensor, experts, draw(st.integers(1, 3)), draw(st.integers(1, 4)), routes, order


def by_slot(routes, order):
    counts = np.stack([count(one, order.shape[-1]) for one in routes])
    return np.take_along_axis(counts, np.broadcast_to(order, counts.shape), -1)


@settings(max_examples=150, deadline=None)
@given(popular_experts())
def test_every_row_goes_once_to_its_expert_or_to_a_copy_of_it(drawn):
    parallel, tensor, experts, copies, least, routes, order = drawn
    counts, local = by_slot(routes, order), experts // parallel
    chosen = choose_copies(counts.sum(0), parallel, copies, least)
    sent = with_copies(counts, chosen)
    assert (sent >= 0).all() and (sent.sum(-1) == counts.sum(-1)).all()
    for rank, mine in enumerate(routes):
        plain = send_order(mine, np.argsort(order, -1))
        entries = send_to_copies(plain, counts, rank, chosen)
        for layer, row in enumerate(entries):
            assert sorted(row) == sorted(plain[layer])  # each row once
            places = np.split(row, np.cumsum(sent[rank, layer])[:-1])
            for place, there in enumerate(places):
                owner, at = divmod(place, local + copies)
                slot = owner * local + at if at < local else chosen.slot[layer, owner, at - local]
                assert not len(there) or set(there % experts) == {order[layer, slot]}
                assert (np.diff(there) > 0).all()  # in the order of its rows, as without copies


@settings(max_examples=100, deadline=None)
@given(popular_experts())
def test_a_copy_has_enough_rows_and_is_not_of_an_expert_that_its_rank_owns(drawn):
    parallel, tensor, experts, copies, least, routes, order = drawn
    rows, local = by_slot(routes, order).sum(0), experts // parallel
    chosen = choose_copies(rows, parallel, copies, least)
    for layer, slots in enumerate(chosen.slot):
        for rank, held in enumerate(slots):
            used = held[held >= 0]
            assert len(set(used)) == len(used) and (used // local != rank).all()
        for slot in set(slots[slots >= 0]):
            spans = sorted(zip(chosen.first[layer][slots == slot], chosen.end[layer][slots == slot], strict=True))
            assert all(end - first >= least for first, end in spans) and spans[-1][1] == rows[layer, slot]
            assert all(one[1] == other[0] for one, other in zip(spans, spans[1:], strict=False))  # no gap, no overlap
    assert (chosen.used == (chosen.slot >= 0).any((1, 2))).all()


def test_one_expert_with_all_rows_is_shared_by_all_ranks():
    """Four ranks, two experts each; without copies the first rank computes all 400 rows."""
    rows = np.array([[400, 0, 0, 0, 0, 0, 0, 0]])
    chosen = choose_copies(rows, 4, 1, 1)
    assert with_copies(rows[None], chosen)[0, 0].reshape(4, 3).sum(1).tolist() == [100, 100, 100, 100]
    assert chosen.slot[0, :, 0].tolist() == [-1, 0, 0, 0]


def test_few_rows_are_not_worth_a_copy():
    rows = np.array([[6, 6, 4, 4]])
    assert choose_copies(rows, 2, 1, 2).slot.tolist() == [[[-1], [0]]]
    assert not choose_copies(rows, 2, 1, 3).used.any()


@pytest.mark.parametrize("ranks", [8, 32, 64])
def test_two_copies_a_rank_bring_popular_experts_within_a_few_points_of_even(ranks):
    """128 experts whose popularity falls as a power of their rank: without copies the fullest of 64 ranks has several
    times its share."""
    rows = (1e6 / np.arange(1, 129) ** 0.8).astype(np.int64)[np.random.default_rng(0).permutation(128)][None]
    chosen = choose_copies(rows, ranks, 2, 1)
    before, after = (counts.reshape(ranks, -1).sum(1) for counts in (rows[0], with_copies(rows[None], chosen)[0, 0]))
    assert before.max() > 1.3 * before.mean() and after.max() < 1.05 * after.mean()
