"""Compares dispatch plans with plain loops over rows: what each rank sends, to whom, in which order, and what it
gets.
"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.planning.dispatch import DispatchGroup, count, send_order, splits


@st.composite
def groups_of_ranks(draw):
    """(P, T, E, K, routes of each rank [L, R, K]); ranks with unequal numbers of rows, and none at all."""
    parallel, tensor = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)]))
    experts = parallel * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.int64]))
    layers = draw(st.integers(1, 3))
    routes = []
    for _ in range(parallel * tensor):
        scores = rng.random((layers, draw(st.integers(0, 7)), experts))
        if draw(st.booleans()):
            scores[..., : max(1, experts // 2)] += 1  # some experts get most rows, others none
        routes.append(np.argsort(-scores, -1)[..., :top_k].astype(dtype))
    return parallel, tensor, experts, routes


def sent_by_loop(routes, order):
    """(row, expert) of one layer's routes [R, K] in the order of sending. order: the expert in each slot."""
    return [(row, e) for e in order for row in range(len(routes)) if e in routes[row].tolist()]


@settings(max_examples=60, deadline=None)
@given(groups_of_ranks(), st.sampled_from([None, 0, 1]))
def test_a_plan_is_what_a_loop_over_rows_finds(drawn, placed):
    parallel, tensor, experts, routes = drawn
    local, layers = experts // parallel, len(routes[0])
    lies = np.tile(np.arange(experts), (layers, 1))
    lies = lies if placed is None else np.random.default_rng(placed).permuted(lies, axis=1)
    slots = np.argsort(lies, -1)
    counts = np.take_along_axis(np.stack([count(one, experts) for one in routes]), lies[None], -1)
    for rank in range(parallel * tensor):
        plan = splits(counts, DispatchGroup(experts, parallel, tensor, rank))
        order = send_order(routes[rank], slots)
        here, place = divmod(rank, tensor)
        for layer in range(layers):
            sent = sent_by_loop(routes[rank][layer], lies[layer])
            assert [divmod(int(entry), experts) for entry in order[layer]] == sent
            at = slots[layer] // local
            to = [sum(at[e] == p for _, e in sent) for p in range(parallel)]
            assert plan.sent[layer].tolist() == to
            # what arrives, as (rank of the tensor group, expert-parallel rank, expert), run by run
            arrived = [
                [e for _, e in sent_by_loop(routes[p * tensor + t][layer], lies[layer]) if at[e] == here]
                for t in range(tensor)
                for p in range(parallel)
            ]
            mine = lies[layer, here * local :][:local].tolist()
            assert plan.received[layer].tolist() == [[run.count(e) for e in mine] for run in arrived]
            assert plan.per_expert[layer].tolist() == [sum(run.count(e) for run in arrived) for e in mine]
            runs = [len(run) for run in arrived]
            assert plan.got[layer].tolist() == runs[place * parallel : (place + 1) * parallel]
            assert plan.gathered[layer].tolist() == [
                sum(runs[t * parallel : (t + 1) * parallel]) for t in range(tensor)
            ]


@settings(max_examples=40, deadline=None)
@given(groups_of_ranks())
def test_what_one_rank_sends_another_expects(drawn):
    parallel, tensor, experts, routes = drawn
    counts = np.stack([count(one, experts) for one in routes])
    plans = [splits(counts, DispatchGroup(experts, parallel, tensor, rank)) for rank in range(parallel * tensor)]
    for rank, plan in enumerate(plans):
        here, place = divmod(rank, tensor)
        for other in range(parallel):
            peer = plans[other * tensor + place]
            assert np.array_equal(plan.sent[..., other], peer.got[..., here])
        # those with the same experts compute with the same rows
        assert np.array_equal(plan.received, plans[here * tensor].received)
    sent = sum(plan.sent.sum() for plan in plans)
    assert sent == sum(one.size for one in routes) == sum(plan.per_expert.sum() for plan in plans[::tensor])


def test_microbatches_and_layers_at_once_are_each_as_alone():
    rng = np.random.default_rng(3)
    routes = np.argsort(rng.random((3, 2, 5, 8)), -1)[..., :2].astype(np.uint8)  # [microbatches, layers, R, K]
    counts = np.stack([count(routes, 8), count(routes[::-1], 8)])
    group = DispatchGroup(8, 2, 1, 1)
    whole = splits(counts, group)
    for m in range(3):
        assert np.array_equal(send_order(routes, np.arange(8))[m], send_order(routes[m], np.arange(8)))
        alone = splits(counts[:, m], group)
        for name in ("sent", "got", "gathered", "received", "per_expert"):
            assert np.array_equal(getattr(whole, name)[m], getattr(alone, name))


@pytest.mark.parametrize("experts, dtype", [(256, np.uint8), (300, np.int16)])
def test_the_highest_expert_and_many_rows_fit(experts, dtype):
    routes = np.full((1, 3000, 1), experts - 1, dtype)
    assert count(routes, experts).tolist() == [[0] * (experts - 1) + [3000]]
    assert send_order(routes, np.arange(experts))[0, -1] == 2999 * experts + experts - 1


def test_the_order_of_many_layers_takes_little_more_memory_than_it_has():
    routes = np.argsort(np.random.default_rng(1).random((60, 300, 8)), -1)[..., :4].astype(np.uint8)
    slots = np.argsort(np.random.default_rng(2).random((60, 8)), -1)
    tracemalloc.start()
    try:
        order = send_order(routes, slots)
        counts = count(routes, 8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counts.sum() == order.size and peak < 1.6 * order.nbytes


def test_rows_are_counted_from_the_first():
    routes = np.argsort(np.random.default_rng(4).random((3, 6, 8)), -1)[..., :2].astype(np.uint8)
    assert np.array_equal(send_order(routes, np.arange(8), 5), send_order(routes, np.arange(8)) + 5 * 8)
