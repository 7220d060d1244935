"""The ledger: each route once, the right one, or an error that names it."""

import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.replay.session import MicrobatchRoutes, ReplaySession

LAYERS, TOKENS, TOP_K, EXPERTS = (0, 1, 2), 6, 2, 8


def table(seed, tokens=TOKENS, real=None):
    generator = torch.Generator().manual_seed(seed)
    routes = {
        layer: torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
        for layer in LAYERS
    }
    return MicrobatchRoutes(routes, torch.arange(tokens) if real is None else torch.tensor([*real]))


def chosen(routes):
    return torch.zeros(routes.shape[0], EXPERTS, dtype=torch.bool).scatter_(1, routes, True)


def session(tables, **options):
    return ReplaySession(tables, LAYERS, **{"mode": "replay", "name": "step 7", "rank": 3, **options})


def run(open_session, *, skip=(), twice=(), order=None):
    """What a schedule does: every layer of every microbatch, in any order."""
    keys = order or [(m, layer) for m in range(len(open_session.microbatches)) for layer in LAYERS]
    for key in [k for k in keys if k not in skip] + list(twice):
        routes = open_session.take(*key, tokens=open_session.microbatches[key[0]].routes[key[1]].shape[0])
        open_session.check_dispatch(*key, chosen(routes))


def test_each_route_once_in_any_order():
    tables = [table(0), table(1, tokens=4)]
    with session(tables) as s:
        run(s, order=[(1, 2), (0, 1), (0, 0), (1, 0), (1, 1), (0, 2)])
    assert (s.tally.consumed, s.tally.expected, s.tally.applied_mismatch) == (6, 6, 0)
    assert s.tally.applied_checked == 3 * (TOKENS + 4)


def test_the_routes_are_those_of_the_key():
    tables = [table(0), table(1)]
    with session(tables) as s:
        assert all(torch.equal(s.take(m, layer, TOKENS), tables[m].routes[layer]) for m in (0, 1) for layer in LAYERS)
        for m in (0, 1):
            for layer in LAYERS:
                s.check_dispatch(m, layer, chosen(tables[m].routes[layer]))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"skip": [(1, 2)]}, "microbatch 1 layer 2 forward 0 times"),
        ({"twice": [(0, 1)]}, "microbatch 0 layer 1 forward 2 times"),
        (
            {"skip": [(0, 0)], "twice": [(1, 0)]},
            "microbatch 0 layer 0 forward 0 times; microbatch 1 layer 0 forward 2 times",
        ),
    ],
)
def test_a_missed_or_repeated_route_is_named(plan, words):
    with pytest.raises(ReplayError, match="not taken exactly once") as caught, session([table(0), table(1)]) as s:
        run(s, **plan)
    assert words in str(caught.value) and "rank 3" in str(caught.value) and "step 7" in str(caught.value)


def test_recomputation_takes_each_route_a_second_time():
    with session([table(0)], recomputes=True) as s:
        with torch.no_grad():
            run(s)
        run(s)
    assert s.tally.consumed == s.tally.expected == 6
    with pytest.raises(ReplayError, match="layer 2 recompute 0 times"), session([table(0)], recomputes=True) as s:
        with torch.no_grad():
            run(s)
        run(s, skip=[(0, 2)])


def test_a_layer_that_was_routed_but_not_dispatched_is_named():
    with pytest.raises(ReplayError, match="not dispatched exactly once"), session([table(0)]) as s:
        for layer in LAYERS:
            routes = s.take(0, layer, TOKENS)
            if layer != 1:
                s.check_dispatch(0, layer, chosen(routes))


@pytest.mark.parametrize("fault", ["one expert", "two tokens swapped", "dropped", "another layer"])
def test_other_experts_at_the_dispatcher_are_refused(fault):
    with pytest.raises(ReplayError, match="dispatched to other experts than recorded"), session([table(0)]) as s:
        for layer in LAYERS:
            sent = chosen(s.take(0, layer, TOKENS))
            if layer == 1:
                before = sent.clone()
                if fault == "one expert":
                    sent[2] = sent[2].roll(1)
                elif fault == "two tokens swapped":
                    sent[[0, 1]] = sent[[1, 0]]
                elif fault == "dropped":
                    sent[5] = False
                else:
                    sent = chosen(s.routes(0, 2))
                assert not torch.equal(before, sent), "the fault was not planted"
            s.check_dispatch(0, layer, sent)


def test_rows_and_tokens_must_agree():
    with (
        pytest.raises(ReplayError, match=r"microbatch 0, layer 1.*6 rows, expected 5 tokens"),
        session([table(0)]) as s,
    ):
        s.take(0, 1, 5)


def test_an_unknown_key_is_refused():
    with pytest.raises(ReplayError, match="microbatch 2, layer 0"), session([table(0)]) as s:
        s.take(2, 0, TOKENS)
    with pytest.raises(ReplayError, match="microbatch 0, layer 9"), session([table(0)]) as s:
        s.take(0, 9, TOKENS)


def test_sessions_do_not_nest_and_nothing_leaks():
    with pytest.raises(ReplayError, match="already open"), session([table(0)]), session([table(1)]):
        pass
    with pytest.raises(RuntimeError, match="mid-step"), session([table(0)]) as s:
        s.take(0, 0, TOKENS)
        raise RuntimeError("mid-step")  # the real error is told, not an incomplete ledger
    with session([table(0)]) as s:
        run(s)


def test_a_token_counts_once_when_its_layers_lie_on_several_stages():
    """Of 4 tokens this stage sees one routed otherwise, and another stage that one and a second."""
    recorded = [table(0, real=range(2)), table(1, real=range(2))]
    elsewhere = torch.tensor([False, True, True, False])
    with session(recorded, compare_native=True, any_stage=lambda flags: flags | elsewhere) as s:
        run(s)
        for microbatch, routes in enumerate(recorded):
            for layer in LAYERS:
                native = routes.routes[layer].clone()
                if (microbatch, layer) in ((0, 0), (0, 2)):
                    native[1] = (native[1] + 1) % EXPERTS
                s.observe_native(microbatch, layer, native)
    tally = s.tally
    assert (tally.native_mismatch, tally.native_positions) == (2, 12)
    assert (tally.native_token_mismatch, tally.native_tokens) == (2, 4)


def test_a_layer_that_was_not_compared_is_named():
    tables = [table(0), table(1)]
    with (
        pytest.raises(ReplayError, match="microbatch 1, layer 2.*1 such"),
        session(tables, mode="observe", compare_native=True) as s,
    ):
        for microbatch, layer in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
            s.observe_native(microbatch, layer, tables[microbatch].routes[layer])


def test_native_comparison_is_by_set_and_leaves_padding_out():
    recorded = table(0, real=(0, 1, 3, 5))  # padding at the end of either of two sequences
    with session([recorded], compare_native=True) as s:
        run(s)
        for layer in LAYERS:
            native = recorded.routes[layer].flip(-1).clone()  # another order, the same set
            if layer == 1:
                native[1] = (native[1] + 1) % EXPERTS
                native[2] = (native[2] + 1) % EXPERTS  # padding
            s.observe_native(0, layer, native)
    tally = s.tally
    assert (tally.native_mismatch, tally.native_positions) == (1, 12)
    assert (tally.native_token_mismatch, tally.native_tokens) == (1, 4)
