"""Tests the dispatch plans of a rank's microbatches, and the pass that hands them out and checks them."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.planning.dispatch import DispatchGroup, count, send_order
from moe_rl.replay import plans as replay_plans
from moe_rl.replay.plans import DispatchRules, plan_dispatch
from tests.replay.test_replay_pass import EXPERTS, LAYERS, TOKENS, TOP_K, begin, chosen, pass_of, run, table
from tests.support.refusals import refused

ALONE = DispatchGroup(EXPERTS, 1, 1, 0)
NATURAL = np.tile(np.arange(EXPERTS), (len(LAYERS), 1))


def plans_of(tables, group=ALONE, exchange=lambda counts: counts[None], order=NATURAL):
    return plan_dispatch(tables, DispatchRules(LAYERS, group, exchange, order)).by_microbatch


def native(one):
    return replace(one, native=torch.ones(TOKENS, dtype=torch.bool))


def test_every_layer_of_every_microbatch_is_planned_by_one_exchange():
    tables, other, asked = [table(0), table(1, tokens=4)], [table(2), table(3)], []

    def counted(tables):
        return np.stack([[[count(t.routes[layer].numpy(), EXPERTS) for layer in LAYERS]] for t in tables])

    def exchange(counts):
        asked.append(counts)
        return np.stack([counted(other), counts])  # this rank is the second of two

    plans = plans_of(tables, DispatchGroup(EXPERTS, 2, 1, 1), exchange)
    assert len(asked) == 1 and np.array_equal(asked[0], counted(tables))
    for m, one in enumerate(tables):
        assert list(plans[m]) == list(LAYERS)
        for layer, whole in plans[m].items():
            (plan,), ids = whole.chunks, one.routes[layer].tolist()
            sent = [(row, e) for e in range(EXPERTS) for row in range(len(ids)) if e in ids[row]]
            assert [divmod(entry, EXPERTS) for entry in whole.entries.tolist()] == sent
            assert plan.sent == [sum(e < 4 for _, e in sent), sum(e >= 4 for _, e in sent)]
            theirs = other[m].routes[layer].flatten().tolist()
            mine = one.routes[layer].flatten().tolist()
            received = [[ids.count(e) for e in range(4, 8)] for ids in (theirs, mine)]
            assert plan.received.tolist() == received and plan.got == [sum(received[0]), sum(received[1])]
            assert plan.per_expert.tolist() == [a + b for a, b in zip(*received, strict=True)]
            assert plan.gathered.tolist() == [sum(plan.got)]


def test_a_microbatch_can_start_while_the_rows_of_later_ones_are_sorted(monkeypatch):
    first, tables, may_go_on = table(0), [table(0), table(1)], threading.Event()

    def sort(routes, *others):
        if not np.array_equal(routes[0], first.routes[LAYERS[0]].numpy()):
            assert may_go_on.wait(60)
        return send_order(routes, *others)

    monkeypatch.setattr(replay_plans, "send_order", sort)
    begun = plans_of(tables)
    (alone,) = plans_of([first])
    assert all(torch.equal(begun[0][layer].entries, alone[layer].entries) for layer in LAYERS)
    assert not any(plan.made.done() for plan in begun[1].values())
    may_go_on.set()
    with pass_of(tables, plans=begun) as s:
        run(s)
    assert s.seen.tally.planned == 2 * len(LAYERS)


def test_no_microbatches_ask_nobody():
    plans = plan_dispatch([], DispatchRules(LAYERS, ALONE, None, NATURAL))
    assert (plans.by_microbatch, plans.peak, plans.fullest, plans.rows) == ([], 0, 0, 0)


@pytest.mark.parametrize("here", [True, False])
def test_a_microbatch_with_rows_without_a_route_on_any_rank_has_no_plan_on_all(here):
    """With a plan on one rank only, that rank would skip an exchange that the others wait for."""
    tables = [native(table(0)) if here else table(0), table(1)]

    def exchange(counts):
        theirs = counts.copy()
        theirs[0] = -1 if not here else abs(counts[0])
        return np.stack([counts, theirs])

    first, second = plans_of(tables, DispatchGroup(EXPERTS, 2, 1, 0), exchange)
    assert first is None and set(second) == set(LAYERS)


def test_what_followed_a_plan_is_counted():
    tables = [table(0), native(table(1))]
    sums = {layer: torch.zeros_like(one) for layer, one in tables[1].checksums.items()}  # none of its rows is replayed
    tables[1] = replace(tables[1], checksums=sums)
    with pass_of(tables, plans=plans_of(tables), recomputed_layers=frozenset({0})) as s:
        with torch.no_grad():
            run(s, order=[(0, 0), (1, 0)])
        run(s)
    assert (s.seen.tally.planned, s.seen.tally.dispatched) == (len(LAYERS) + 1, 2 * (len(LAYERS) + 1))
    with pass_of(tables) as s:
        run(s)
    assert (s.seen.tally.planned, s.seen.tally.dispatched) == (0, 2 * len(LAYERS))


@pytest.mark.parametrize("mode", ["observe", "record"])
def test_a_pass_that_routes_natively_has_no_plan(mode):
    tables = [table(0)]
    with pass_of(tables, mode=mode, plans=plans_of(tables)) as s:
        begin(s, 0)
        assert all(s.plan(0, layer, TOKENS) is None for layer in LAYERS)
        for layer in LAYERS:
            s.record(0, layer, tables[0].routes[layer], tables[0].routes[layer])


def test_a_plan_of_other_routes_is_refused():
    tables = [table(0), table(1)]
    wrong = plans_of(tables)[::-1]
    got = ("microbatch 0 layer 0; microbatch 0 layer 1",)
    with refused(ReplayError, fault="plan", rank=3, got=got), pass_of(tables, plans=wrong) as s:
        run(s)


def test_a_plan_that_sends_one_row_elsewhere_is_refused():
    tables = [table(0)]
    plans = plans_of(tables)
    at = plans[0][2].entries[3]
    row, expert = divmod(int(at), EXPERTS)
    foreign = next(e for e in range(EXPERTS) if e not in tables[0].routes[2][row].tolist())
    at += foreign - expert
    with refused(ReplayError, fault="plan", got="microbatch 0 layer 2"), pass_of(tables, plans=plans) as s:
        run(s)


def test_a_plan_of_fewer_rows_is_refused_before_it_is_followed():
    tables = [table(0)]
    facts = {"fault": "plan", "got": (4 * TOP_K,), "expected": TOKENS * TOP_K}
    with refused(ReplayError, **facts), pass_of(tables, plans=plans_of([table(0, tokens=4)])) as s:
        begin(s, 0)
        s.plan(0, 0, TOKENS)


def test_the_map_is_held_against_the_record_as_without_a_plan():
    tables = [table(0)]
    with refused(ReplayError, fault="misapplied"), pass_of(tables, plans=plans_of(tables)) as s:
        begin(s, 0)
        for layer in LAYERS:
            routes = s.take(0, layer, TOKENS)
            s.check_dispatch(0, layer, chosen(routes if layer else (routes + 1) % EXPERTS))


def test_the_trainers_own_routes_are_planned_as_they_were_recorded():
    tables, own = [table(0)], table(7)
    with pass_of(tables, mode="record") as s:
        begin(s, 0)
        for layer in LAYERS:
            s.record(0, layer, own.routes[layer], own.routes[layer])
    recorded = s.seen.recorded
    (got,), (wanted,) = plans_of(recorded), plans_of([own])
    assert all(torch.equal(got[layer].entries, wanted[layer].entries) for layer in LAYERS)
    with pass_of(recorded, plans=[got]) as s:
        run(s)
    assert s.seen.tally.planned == len(LAYERS)


def test_rows_go_to_the_slots_where_their_experts_lie():
    one, order = table(0), np.roll(NATURAL, 3, axis=1)
    (plan,) = plans_of([one], order=order)
    for at, layer in enumerate(LAYERS):
        slot_of = {int(expert): slot for slot, expert in enumerate(order[at])}
        ids = one.routes[layer].tolist()
        sent = sorted((slot_of[expert], row, expert) for row, experts in enumerate(ids) for expert in experts)
        entries = [divmod(entry, EXPERTS) for entry in plan[layer].entries.tolist()]
        assert entries == [(row, expert) for _, row, expert in sent]
        per_slot = [sum(expert in experts for experts in ids) for expert in order[at].tolist()]
        assert plan[layer].chunks[0].per_expert.tolist() == per_slot
