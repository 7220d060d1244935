"""Compares copies of experts with plain loops over rows: who computes which row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.planning.copy_choice import choose_copies, send_to_copies, with_copies
from moe_rl.planning.dispatch import count, send_order


@st.composite
def popular_experts(draw):
    """(P, T, E, c, least, routes of each rank [L, R, K], order [L, E], node of each rank)"""
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
    nodes = np.arange(len(routes)) // draw(st.integers(1, len(routes)))
    return parallel, tensor, experts, draw(st.integers(1, 3)), draw(st.integers(1, 4)), routes, order, nodes


def by_slot(routes, order):
    counts = np.stack([count(one, order.shape[-1]) for one in routes])
    return np.take_along_axis(counts, np.broadcast_to(order, counts.shape), -1)


@settings(max_examples=150, deadline=None)
@given(popular_experts())
def test_every_row_goes_once_to_its_expert_or_to_a_copy_of_it(drawn):
    parallel, tensor, experts, copies, least, routes, order, nodes = drawn
    counts, local = by_slot(routes, order), experts // parallel
    chosen = choose_copies(counts, parallel, copies, least, nodes)
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
def test_a_copy_is_not_of_an_expert_of_its_rank_and_the_parts_of_copies_do_not_overlap(drawn):
    parallel, tensor, experts, copies, least, routes, order, nodes = drawn
    counts, local = by_slot(routes, order), experts // parallel
    chosen = choose_copies(counts, parallel, copies, least, nodes)
    apart = (nodes.reshape(parallel, tensor) != nodes.reshape(parallel, tensor)[:, :1]).any()
    assert chosen.node.tolist() == [0 if apart else node for node in nodes]  # T ranks apart: all count as one node
    for layer, slots in enumerate(chosen.slot):
        for rank, held in enumerate(slots):
            used = held[held >= 0]
            assert len(set(used)) == len(used) and (used // local != rank).all()
        first, end = chosen.first[layer], chosen.end[layer]
        assert (end[:, slots < 0] == first[:, slots < 0]).all()
        for slot in set(slots[slots >= 0]):
            for node in range(len(first)):
                rows = counts[chosen.node == node, layer, slot].sum()
                spans = sorted(zip(first[node][slots == slot], end[node][slots == slot], strict=True))
                assert spans[0][0] >= 0 and spans[-1][1] == rows
                assert all(one[1] == other[0] for one, other in zip(spans, spans[1:], strict=False))
            assert ((end - first)[:, slots == slot].sum(0) >= least).all()
    assert (chosen.used == (chosen.slot >= 0).any((1, 2))).all()
