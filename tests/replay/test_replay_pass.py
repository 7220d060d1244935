"""The pass takes each route exactly once and the right one, or raises an error that names it."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from moe_rl.errors import NonFiniteError, ReplayError
from moe_rl.replay.alignment import AlignmentTest
from moe_rl.replay.replay_pass import ReplayPass, Watch, refuse_lost_key, require_open
from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
from moe_rl.replay.tables import Compared, totals
from moe_rl.trace import TraceSpec, signed
from moe_rl.trace.source_sum import sum_of
from moe_rl.types import RouteRef
from tests.support.refusals import refused

LAYERS, TOKENS, TOP_K, EXPERTS = (0, 1, 2), 6, 2, 8
SPEC = TraceSpec("model", EXPERTS, TOP_K, "mmm")
FLAT = torch.zeros(TOKENS, EXPERTS)  # scores, where their values do not matter


def table(seed, tokens=TOKENS, real=None, **options):
    """Make a microbatch of two sequences, with padding after the first `real` rows."""
    parts = parts_of(seed, tokens if real is None else real)
    return laid(parts, tokens=tokens, **options)


def parts_of(seed, real=TOKENS):
    rng = np.random.default_rng(seed)
    lengths = [real // 2, real - real // 2]
    keys = [f"t{seed}a", f"t{seed}b"]
    parts = []
    for key, rows in zip(keys, lengths, strict=True):
        routes = np.argsort(rng.random((rows, len(LAYERS), EXPERTS)), -1)[..., :TOP_K].astype(np.uint8)
        tokens_of = rng.integers(0, 99, rows)
        parts.append(SequenceRoutes.complete(key, tokens_of, routes))
    return parts


def laid(parts, *, tokens=TOKENS, rows=None, layers=LAYERS, source=None, order=(0, 1)):
    """Lay out a microbatch. `order` says which of `parts` each sequence gets; `source` has the checksums in their
    references."""
    given = [replace(parts[i], key=own.key, token_ids=own.token_ids) for i, own in zip(order, parts, strict=True)]
    return microbatch_routes(
        [replace(one, routes=one.routes[:, list(layers)]) for one in given],
        SPEC,
        layers=layers,
        names=[part.key for part in parts],
        fed=[part.token_ids for part in parts],
        source=source,
        padded_tokens=tokens,
        rows=slice(0, tokens) if rows is None else rows,
        expert_parallel=1,
        device=torch.device("cpu"),
    )


def sources(parts, covered=slice(None)):
    """Return the checksums in the sampler's references of these sequences, which recorded the rows in `covered`."""
    refs = []
    for part in parts:
        start = covered.start or 0
        ref = RouteRef(part.key, len(part.routes[covered]), (), start)
        refs.append(signed(ref, part.routes[covered], LAYERS, part.token_ids[covered], versions=part.versions[covered]))
    return [sum_of(ref) for ref in refs]


def chosen(routes):
    return torch.zeros(routes.shape[0], EXPERTS, dtype=torch.bool).scatter_(1, routes.long(), True)


def pass_of(tables, layers=LAYERS, **options):
    return ReplayPass(tables, layers, **{"mode": "replay", "name": "step 7", "rank": 3, **options})


def begin(opened, microbatch):
    opened.begin_forward(microbatch, opened.microbatches[microbatch].fed.tokens)


def run(opened, *, skip=(), twice=(), order=None):
    """Act as a schedule: run every layer of every microbatch, in any order."""
    keys = order or [(m, layer) for m in range(len(opened.microbatches)) for layer in opened.layers]
    for key in [k for k in keys if k not in skip] + list(twice):
        begin(opened, key[0])
        routes = opened.take(*key, tokens=opened.microbatches[key[0]].routes[key[1]].shape[0])
        opened.check_dispatch(*key, chosen(routes))


def test_each_route_once_in_any_order():
    tables = [table(0), table(1, tokens=4)]
    with pass_of(tables) as s:
        run(s, order=[(1, 2), (0, 1), (0, 0), (1, 0), (1, 1), (0, 2)])
    assert (s.seen.tally.consumed, s.seen.tally.expected, s.seen.tally.applied_mismatch) == (6, 6, 0)
    assert s.seen.tally.applied_checked == 3 * (2 + 2)  # 2 sequences each, in every layer


def test_the_routes_are_those_of_the_key():
    tables = [table(0), table(1)]
    with pass_of(tables) as s:
        for m in (0, 1):
            begin(s, m)
            assert all(torch.equal(s.take(m, layer, TOKENS), tables[m].routes[layer]) for layer in LAYERS)
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
    with (
        refused(ReplayError, fault="not taken once", run="step 7", rank=3, got=words),
        pass_of([table(0), table(1)]) as s,
    ):
        run(s, **plan)


def test_recomputed_layers_take_each_route_a_second_time():
    every, first = frozenset(LAYERS), frozenset({0})
    with pass_of([table(0)], recomputed_layers=every) as s:
        with torch.no_grad():
            run(s)
        run(s)
    assert s.seen.tally.consumed == s.seen.tally.expected == 6
    with (
        refused(ReplayError, fault="not taken once", got=("layer 2 recompute 0",)),
        pass_of([table(0)], recomputed_layers=every) as s,
    ):
        with torch.no_grad():
            run(s)
        run(s, skip=[(0, 2)])
    with pass_of([table(0)], recomputed_layers=first) as s:
        with torch.no_grad():
            run(s, order=[(0, 0)])
        run(s, order=[(0, 1), (0, 2), (0, 0)])
    assert s.seen.tally.consumed == s.seen.tally.expected == 4
    with (
        refused(ReplayError, fault="not taken once", got=("layer 1 forward 2",)),
        pass_of([table(0)], recomputed_layers=first) as s,
    ):
        with torch.no_grad():
            run(s)
        run(s)


def test_microbatches_that_swap_their_routes_are_refused():
    """Both have equal lengths, and each is taken and dispatched once: no count could detect the swap."""
    with (
        refused(ReplayError, fault="another microbatch", layer=0, got=("1",), expected=("0",)),
        pass_of([table(0), table(1)]) as s,
    ):
        for through, asked in [(0, 1), (1, 0)]:
            begin(s, through)
            for layer in LAYERS:
                s.check_dispatch(asked, layer, chosen(s.take(asked, layer, TOKENS)))
    with (
        refused(ReplayError, fault="another microbatch"),
        pass_of([table(0), table(1)], mode="observe", watch=Watch(native=True)) as s,
    ):
        begin(s, 0)
        s.observe_native(1, 0, s.microbatches[0].routes[0], FLAT)


def test_microbatches_and_routes_in_another_order_are_refused():
    """Each key is the microbatch's own, taken once and dispatched as recorded; only the tokens differ."""
    right = [table(0), table(1)]
    with refused(ReplayError, fault="other tokens", rank=3, got=("0, 1",)), pass_of([right[1], right[0]]) as s:
        for m in (0, 1):
            s.begin_forward(m, right[m].fed.tokens)
            for layer in LAYERS:
                s.check_dispatch(m, layer, chosen(s.take(m, layer, TOKENS)))
    with refused(ReplayError, fault="rows", microbatch=0, got=("6",), expected=("4",)), pass_of(right) as s:
        s.begin_forward(0, torch.zeros(4, dtype=torch.int64))


def test_a_pass_of_more_microbatches_than_have_routes_is_refused():
    with (
        refused(ReplayError, fault="too many", run="step 7", rank=3, microbatch=1, expected=("1",)),
        pass_of([table(0)]) as s,
    ):
        begin(s, 0)
        s.begin_forward(1, s.microbatches[0].fed.tokens)


@pytest.mark.parametrize("mode", ["replay", "observe", "record"])
def test_a_layer_without_a_key_is_refused_while_a_pass_is_open(mode):
    tables, again = [table(0), table(1)], frozenset({2})
    lost = {"fault": "lost key", "run": "step 7", "rank": 3}
    refuse_lost_key(1)  # allowed: the pass routes natively
    with (
        refused(ReplayError, **lost, layer=2, microbatch="no microbatch"),
        pass_of(tables, mode=mode, recomputed_layers=again) as s,
    ):
        begin(s, 1)
        with refused(ReplayError, **lost, microbatch=1, layer=1):
            refuse_lost_key(1)
        with torch.no_grad(), refused(ReplayError, **lost, microbatch=1, layer=2):
            refuse_lost_key(2)
        refuse_lost_key(2)  # the microbatch is unknown: forwards of later ones may have begun
    refuse_lost_key(1)


def test_recomputation_comes_between_the_forwards_of_other_microbatches():
    with pass_of([table(0), table(1)], recomputed_layers=frozenset(LAYERS)) as s:
        for m in (0, 1):
            begin(s, m)
            with torch.no_grad():
                for layer in LAYERS:
                    s.check_dispatch(m, layer, chosen(s.take(m, layer, TOKENS)))
        for m in (0, 1):
            for layer in LAYERS:
                s.check_dispatch(m, layer, chosen(s.take(m, layer, TOKENS)))
    assert s.seen.tally.consumed == s.seen.tally.expected == 12


def test_a_closed_pass_gives_no_routes():
    with pass_of([table(0)], name="step 6") as closed:
        run(closed)
    for name, open_one in [("no open pass", None), ("step 7", pass_of([table(0)]))]:
        with refused(ReplayError, fault="not open", run="step 6", got=name, expected="step 6"):
            if open_one is None:
                closed.take(0, 0, TOKENS)
            else:
                with open_one:
                    closed.take(0, 0, TOKENS)


def test_a_pass_that_was_never_opened_is_refused():
    require_open(None)
    ours = pass_of([table(0)])
    with refused(ReplayError, fault="outside", run="step 7", rank=3):
        require_open(ours)
    with ours:
        require_open(ours)
        with refused(ReplayError, fault="outside", rank="no rank", got=("step 7",)):
            require_open(None)
        with refused(ReplayError, fault="outside", run="step 8", rank=3, got=("step 7",)):
            require_open(pass_of([table(0)], name="step 8"))
        run(ours)


def test_a_layer_that_was_routed_but_not_dispatched_is_named():
    with refused(ReplayError, fault="not dispatched once", rank=3), pass_of([table(0)]) as s:
        begin(s, 0)
        for layer in LAYERS:
            routes = s.take(0, layer, TOKENS)
            if layer != 1:
                s.check_dispatch(0, layer, chosen(routes))


@pytest.mark.parametrize("fault", ["one expert", "two tokens swapped", "dropped", "another layer"])
def test_other_experts_at_the_dispatcher_are_refused(fault):
    with refused(ReplayError, fault="misapplied"), pass_of([table(0)]) as s:
        begin(s, 0)
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
        refused(ReplayError, fault="rows", microbatch=0, layer=1, got=("6",), expected=("5",)),
        pass_of([table(0)]) as s,
    ):
        begin(s, 0)
        s.take(0, 1, 5)


def test_an_unknown_key_is_refused():
    with refused(ReplayError, fault="no routes", microbatch=2, layer=0), pass_of([table(0)]) as s:
        s.take(2, 0, TOKENS)
    with refused(ReplayError, fault="no routes", microbatch=0, layer=9), pass_of([table(0)]) as s:
        s.take(0, 9, TOKENS)


def test_passes_do_not_nest_and_nothing_leaks():
    with refused(ReplayError, fault="nested"), pass_of([table(0)]), pass_of([table(1)]):
        pass
    with pytest.raises(RuntimeError, match="mid-step"), pass_of([table(0)]) as s:
        begin(s, 0)
        s.take(0, 0, TOKENS)
        raise RuntimeError("mid-step")  # this error must be raised, not an incomplete ledger
    with pass_of([table(0)]) as s:
        run(s)


def test_a_token_counts_once_when_its_layers_lie_on_several_stages():
    """This stage sees one of 4 tokens with another route; another stage sees the same one and a second."""
    recorded = [replace(table(n, real=2), lags=torch.tensor([0, lag])) for n, lag in enumerate((3, 9))]
    elsewhere = torch.tensor([False, True, True, False])
    with pass_of(recorded, watch=Watch(native=True), any_stage=lambda flags: flags | elsewhere) as s:
        run(s)
        for microbatch, routes in enumerate(recorded):
            begin(s, microbatch)
            for layer in LAYERS:
                native = routes.routes[layer].long()
                if (microbatch, layer) in ((0, 0), (0, 2)):
                    native[1] = (native[1] + 1) % EXPERTS
                s.observe_native(microbatch, layer, native, FLAT)
    tally = s.seen.tally
    assert (tally.native_mismatch, tally.native_positions) == (2, 12)
    assert (tally.native_token_mismatch, tally.native_tokens) == (2, 4)
    # The wrong row is of lag 3, the other ones of 0, 0 and 9; every row counts in 3 layers.
    assert tally.native_by_lag == ((0, 6), (0, 0), (2, 3), (0, 0), (0, 3))


def test_a_layer_that_was_not_compared_is_named():
    tables = [table(0), table(1)]
    with (
        refused(ReplayError, fault="uncompared", microbatch=1, layer=2, got=("1",)),
        pass_of(tables, mode="observe", watch=Watch(native=True)) as s,
    ):
        for microbatch, layer in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
            begin(s, microbatch)
            s.observe_native(microbatch, layer, tables[microbatch].routes[layer].long(), FLAT)


FAULTS = {
    "shifted by one token": lambda routes: {layer: rows.roll(1, 0) for layer, rows in routes.items()},
    "layers permuted": lambda routes: dict(zip(routes, [routes[1], routes[2], routes[0]], strict=True)),
    "sequences swapped": lambda routes: {layer: rows.roll(3, 0) for layer, rows in routes.items()},
    # Rows are in the order [batch, position], but the model wants [position, batch].
    "batch first": lambda routes: {
        layer: rows.view(2, 3, TOP_K).transpose(0, 1).reshape(TOKENS, TOP_K) for layer, rows in routes.items()
    },
    "all zero": lambda routes: {layer: torch.zeros_like(rows) for layer, rows in routes.items()},
    "an expert twice": lambda routes: {layer: rows[:, :1].repeat(1, TOP_K) for layer, rows in routes.items()},
    "one token of one layer": lambda routes: routes | {1: torch.cat([routes[1][:-1], (routes[1][-1:] + 1) % EXPERTS])},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_routes_that_lost_their_place_after_they_were_read_are_refused(fault):
    """Shapes match and each row is a valid set: only the checksum from the record itself can detect it."""
    right = table(0)
    wrong = replace(right, routes=FAULTS[fault](right.routes))
    assert any(not torch.equal(wrong.routes[layer], right.routes[layer]) for layer in LAYERS)
    with (
        refused(ReplayError, fault="misapplied", got=("t0b layer 1",)),
        pass_of([wrong]) as s,
    ):
        run(s)


def test_tokens_that_were_packed_in_another_order_than_their_routes_are_refused():
    """The routes are in packing order, but the fed rows belong to the other sequence, which has the same length."""
    right = table(0)
    swapped = replace(right.fed, salts=right.fed.salts.roll(3), owner=right.fed.owner.roll(3))
    with (
        refused(ReplayError, fault="misapplied", got=("t0a layer 0", "t0b layer 0")),
        pass_of([replace(right, fed=swapped)]) as s,
    ):
        run(s)


def test_a_recording_pass_gives_the_routes_that_the_next_one_must_take():
    observed, own = [table(0), table(1)], [table(5), table(6)]
    with pass_of(observed, mode="record", watch=Watch(native=True)) as first:
        for m in (0, 1):
            begin(first, m)
            for layer in LAYERS:
                choice = own[m].routes[layer].long()
                first.observe_native(m, layer, choice, FLAT)
                first.record(m, layer, choice, choice)
    assert first.seen.tally.consumed == first.seen.tally.expected == 6 and first.seen.tally.native_mismatch > 0
    recorded = first.seen.recorded
    with pass_of(recorded) as second:
        run(second)
        assert torch.equal(second.routes(1, 2).long(), own[1].routes[2].long())
    wrong = [recorded[0], replace(recorded[1], routes=observed[1].routes)]
    with refused(ReplayError, fault="misapplied"), pass_of(wrong) as third:
        run(third)


def test_a_recording_pass_that_missed_a_layer_is_refused():
    with (
        refused(ReplayError, fault="not taken once", got=("microbatch 0 layer 2 forward 0",)),
        pass_of([table(0)], mode="record") as s,
    ):
        begin(s, 0)
        for layer in LAYERS[:2]:
            s.record(0, layer, s.routes(0, layer), s.routes(0, layer))


def test_rows_without_a_route_are_left_to_the_router():
    right = table(0)
    native = torch.tensor([False, True, False, False, False, False])
    salts = right.fed.salts.masked_fill(native, 0)
    sums = {layer: replace(right.fed, salts=salts).chosen(layer, right.routes[layer]) for layer in LAYERS}
    mixed = replace(right, native=native, checksums=sums)
    with pass_of([mixed]) as s:
        begin(s, 0)
        assert s.native_rows(0) is native
        for layer in LAYERS:
            routes = s.take(0, layer, TOKENS)
            routes[1] = (routes[1] + 1) % EXPERTS  # the router's own choice
            s.check_dispatch(0, layer, chosen(routes))
    with refused(ReplayError, fault="misapplied"), pass_of([mixed]) as s:
        begin(s, 0)
        for layer in LAYERS:
            routes = s.take(0, layer, TOKENS)
            routes[2] = (routes[2] + 1) % EXPERTS  # changes a row that has a route
            s.check_dispatch(0, layer, chosen(routes))


def test_native_comparison_is_by_set_and_leaves_padding_out():
    recorded = table(0, real=4)
    with pass_of([recorded], watch=Watch(native=True)) as s:
        run(s)
        for layer in LAYERS:
            native = recorded.routes[layer].long().flip(-1)  # another order, the same set
            if layer == 1:
                native[1] = (native[1] + 1) % EXPERTS
                native[5] = (native[5] + 1) % EXPERTS  # changes padding
            s.observe_native(0, layer, native, FLAT)
    tally = s.seen.tally
    assert (tally.native_mismatch, tally.native_positions) == (1, 12)
    assert (tally.native_token_mismatch, tally.native_tokens) == (1, 4)


class Reads(TorchFunctionMode):
    """Counts how often the host reads a result, for which it waits."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in _READS
        return function(*args, **kwargs or {})


_READS = {getattr(torch.Tensor, name) for name in ("tolist", "item", "cpu", "__int__", "__float__", "__bool__")}


@pytest.mark.parametrize("microbatches", [1, 5])
def test_the_counts_of_a_pass_are_read_at_once(microbatches):
    draw = partial(torch.randint, 0, 2, (len(LAYERS), 7))
    compared = [Compared(draw().bool(), draw(), draw().float()) for _ in range(microbatches)]
    lags = [torch.zeros(7, dtype=torch.int64)] * microbatches
    with Reads() as reads:
        found = totals(compared, lags, LAYERS)
    assert reads.count == 1
    assert found["native_shared"] == sum(int(one.shared.sum()) for one in compared)
    assert found["native_margin"] == sum(float(one.margin.sum()) for one in compared)
    assert found["native_by_layer"] == {
        layer: sum(int(one.differs[at].sum()) for one in compared) for at, layer in enumerate(LAYERS)
    }
    assert found["native_by_lag"][0] == (found["native_mismatch"], found["native_positions"])
    assert all(isinstance(found[name], int) for name in ("native_mismatch", "native_shared"))


def test_the_comparison_counts_shared_experts_and_how_far_the_record_is_from_the_choice():
    tables, generator = [table(0, real=4), table(1)], torch.Generator().manual_seed(0)
    scores = {key: torch.randn(TOKENS, EXPERTS, generator=generator) for key in product(range(2), LAYERS)}
    # changes a row that agrees
    scores[0, 1][2].scatter_(0, tables[0].routes[1][2].long(), torch.arange(9.0, 9.0 + TOP_K))
    with pass_of(tables, mode="observe", watch=Watch(native=True)) as s:
        for (microbatch, layer), of_rows in scores.items():
            begin(s, microbatch)
            s.observe_native(microbatch, layer, of_rows.topk(TOP_K).indices, of_rows)
    shared_sum, margin_sum = 0, 0.0
    for microbatch, rows in ((0, 4), (1, TOKENS)):
        compared = s.seen.compared[microbatch]
        assert compared.differs.shape == compared.shared.shape == compared.margin.shape == (len(LAYERS), rows)
        for index, layer in enumerate(LAYERS):
            for row in range(rows):
                ranked = sorted(scores[microbatch, layer][row].tolist(), reverse=True)
                best = {scores[microbatch, layer][row].tolist().index(score) for score in ranked[:TOP_K]}
                recorded = set(tables[microbatch].routes[layer][row].tolist())
                margin = ranked[TOP_K - 1] - min(scores[microbatch, layer][row, e].item() for e in recorded)
                assert compared.shared[index, row] == len(best & recorded)
                assert compared.differs[index, row] == (best != recorded) == (margin > 0)
                assert compared.margin[index, row].item() == pytest.approx(margin)
                shared_sum, margin_sum = shared_sum + len(best & recorded), margin_sum + margin
    assert s.seen.tally.native_shared == shared_sum and s.seen.tally.native_margin == pytest.approx(margin_sum)
    assert not s.seen.compared[0].differs[1, 2] and 0 < s.seen.tally.native_mismatch < s.seen.tally.native_positions


def test_routes_can_be_replayed_and_the_choice_compared_with_others():
    """As with planted or recorded routes: the choice is compared with the honest record."""
    honest, planted = [table(0)], [table(1)]
    planted = [replace(planted[0], fed=honest[0].fed, names=honest[0].names)]
    planted[0].checksums.update({layer: honest[0].fed.chosen(layer, planted[0].routes[layer]) for layer in LAYERS})
    with pass_of(planted, watch=Watch(native=True, against=honest)) as s:
        for layer in LAYERS:
            begin(s, 0)
            routes = s.take(0, layer, TOKENS)
            assert torch.equal(routes, planted[0].routes[layer].long())
            s.observe_native(0, layer, honest[0].routes[layer].long(), FLAT)
            s.check_dispatch(0, layer, chosen(routes))
    assert s.seen.tally.native_mismatch == s.seen.tally.applied_mismatch == 0
    assert (s.seen.compared[0].shared == TOP_K).all()


@pytest.mark.parametrize("keep", [True, False])
def test_router_logits_are_kept_when_they_are_asked_for(keep):
    logits = torch.randn(TOKENS, 1, EXPERTS, requires_grad=True)
    with pass_of([table(0)], mode="observe", watch=Watch(logits=keep)) as s:
        begin(s, 0)
        s.observe_logits(0, 1, logits)
    assert list(s.seen.router_logits) == ([(0, 1)] if keep else [])
    if keep:
        kept = s.seen.router_logits[0, 1]
        assert torch.equal(kept, logits[:, 0]) and not kept.requires_grad


def test_logits_of_another_microbatch_are_refused():
    with (
        refused(ReplayError, fault="another microbatch"),
        pass_of([table(0), table(1)], mode="observe", watch=Watch(logits=True)) as s,
    ):
        begin(s, 0)
        s.observe_logits(1, 1, FLAT)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("align", [True, False])
def test_routers_that_score_with_nan_are_named_and_not_the_routes(bad, align):
    """Their choice agrees with no record, but the record is not the reason."""
    tables = [table(0), table(1)]
    test = AlignmentTest(LAYERS, [one.places for one in tables], torch.device("cpu")) if align else None

    def observe():
        with pass_of(tables, watch=Watch(native=True, align=test)) as s:
            for m, layer in product((0, 1), LAYERS):
                scores = chosen(tables[m].routes[layer]).float()
                if (m, layer) == (1, 2):
                    scores[3, int(scores[3].argmin())] = bad
                begin(s, m)
                s.take(m, layer, TOKENS)
                s.check_dispatch(m, layer, chosen(tables[m].routes[layer]))
                s.observe_native(m, layer, scores.topk(TOP_K).indices, scores)
        return s

    if align:
        with refused(NonFiniteError, run="step 7", rank=3, layers="2", request="t1b", token=0):
            observe()
    else:  # nothing depends on the witness, and the metric shows that
        assert not np.isfinite(observe().seen.tally.native_margin)


def test_a_rank_that_reads_everything_refuses_other_routes_than_left_the_engine_at_once():
    parts = parts_of(0)
    assert laid(parts, source=sources(parts)).source is not None
    with refused(ReplayError, fault="read", got=("2 of 2", "t0a; t0b")):
        laid(parts, source=sources(parts), order=(1, 0))
    with refused(ReplayError, fault="read", got=("1 of 2", "t0b")):
        laid(parts, source=[sources(parts)[0], sources(parts)[0]])


class Share:
    """Ranks that work on the same sequences, run one after the other: each adds to the sums of those before it."""

    def __init__(self):
        self.sums = 0

    def add(self, mine):
        self.sums = self.sums + mine
        return self.sums


# The layers and the rows (of 6) that each rank has.
RANKS = {
    "stages": [((0, 1), slice(0, 6)), ((2,), slice(0, 6))],
    "rows": [(LAYERS, slice(0, 3)), (LAYERS, slice(3, 6))],
    "context": [(LAYERS, np.array([0, 5])), (LAYERS, np.array([1, 2, 3, 4]))],
    "both": [(layers, rows) for layers in ((0,), (1, 2)) for rows in (slice(0, 2), slice(2, 6))],
}


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("at", ["none", "first", "last"])
def test_what_all_ranks_dispatched_is_what_left_the_engine(ranks, at):
    """The last rank sees the whole sum: on one of the ranks, two sequences of equal length had each other's routes."""
    parts, share = parts_of(0), Share()
    for number, (layers, rows) in enumerate(ranks):
        swapped = number == {"none": None, "first": 0, "last": len(ranks) - 1}[at]
        one = laid(parts, layers=layers, rows=rows, source=sources(parts), order=(1, 0) if swapped else (0, 1))
        s = pass_of([one], layers, sum_over_share=share.add, recomputed_layers=frozenset(layers[:1]))

        def passes(s=s, layers=layers):
            with s:
                with torch.no_grad():
                    run(s)
                run(s, order=[(0, layers[0])])

        if number < len(ranks) - 1:
            with refused(ReplayError, fault="read"):  # a single rank has only a part of the sum
                passes()
        elif at == "none":
            passes()
        else:
            with refused(ReplayError, fault="read", run="step 7", rank=3, got=("t0",)):
                passes()


def test_what_another_rank_dispatched_wrongly_is_told_apart_from_what_was_read_wrongly():
    parts, share = parts_of(0), Share()
    for layers in ((0, 1), (2,)):
        s = pass_of([laid(parts, layers=layers, source=sources(parts))], layers, sum_over_share=share.add)
        facts = {"fault": "misapplied"} if layers == (0, 1) else {"fault": "dispatched", "got": ("t0a",)}
        with refused(ReplayError, **facts), s:
            for layer in layers:
                begin(s, 0)
                sent = chosen(s.take(0, layer, TOKENS))
                s.check_dispatch(0, layer, sent[[1, 0, 2, 3, 4, 5]] if layer == 1 else sent)


def test_rows_without_a_record_or_without_a_replay_are_accounted_for():
    """Each has 3 rows: the first has no record, and the second recorded row routes natively."""
    parts = [
        replace(part, native=np.array([True, True, False]), recorded=np.array([False, True, True]))
        for part in parts_of(0)
    ]
    source = sources(parts, slice(1, None))
    one = laid(parts, source=source)
    with pass_of([one]) as s:
        begin(s, 0)
        for layer in LAYERS:
            sent = chosen(s.take(0, layer, TOKENS))
            sent[one.native] = sent[one.native].roll(1, 1)  # the router's own choice
            s.check_dispatch(0, layer, sent)
    with refused(ReplayError, fault="read"):
        laid(parts, source=sources(parts))


def test_routes_of_the_trainers_own_are_no_samplers():
    parts = parts_of(0)
    one = laid(parts, source=sources(parts))
    with pass_of([one], mode="record") as first:
        begin(first, 0)
        for layer in LAYERS:
            first.record(0, layer, one.routes[layer].flip(0), one.routes[layer])
    with pass_of(first.seen.recorded) as s:
        run(s)
    assert s.seen.tally.applied_mismatch == 0


@settings(deadline=None)
@given(st.data())
def test_any_change_between_reading_and_dispatch_is_seen(data):
    """The fault is planted before the trainer computes its checksums, so these agree. This rank has one of two
    stages."""
    seed, layers = data.draw(st.integers(0, 2**32)), (0, 1)
    parts = parts_of(seed)
    source, wrong = sources(parts), [replace(part, routes=part.routes.copy()) for part in parts]
    which, row, other, layer = (data.draw(st.integers(0, most)) for most in (1, 2, 2, 1))
    change = data.draw(st.sampled_from(["rows", "rows of both", "shift", "layers", "expert", "all of both"]))
    mine, theirs = wrong[which].routes, wrong[1 - which].routes
    if change == "rows":
        mine[[row, other]] = mine[[other, row]]
    elif change == "rows of both":
        mine[row], theirs[other] = theirs[other].copy(), mine[row].copy()
    elif change == "shift":
        mine[:] = np.roll(mine, 1 + row % 2, 0)
    elif change == "layers":
        mine[:, [0, 1]] = mine[:, [1, 0]]
    elif change == "expert":
        mine[row, layer, 0] = next(e for e in range(EXPERTS) if e not in mine[row, layer])
    else:
        mine[:], theirs[:] = theirs.copy(), mine.copy()
    share = Share()
    share.add(torch.stack([laid(parts, layers=(2,), source=source).read] * 2))
    s = pass_of([laid(wrong, layers=layers, source=source)], layers, sum_over_share=share.add)
    changed = [
        part.key for part, one in zip(parts, wrong, strict=True)
        if not np.array_equal(np.sort(part.routes[:, :2], -1), np.sort(one.routes[:, :2], -1))
    ]  # fmt: skip
    if not changed:
        with s:
            run(s)
    else:
        with refused(ReplayError, got=(f"{len(changed)} of 2", "; ".join(changed))), s:
            run(s)


def test_the_same_tokens_in_another_order_are_refused():
    one = table(0)
    moved = one.fed.tokens.flip(0)
    assert not torch.equal(moved, one.fed.tokens)
    with pytest.raises(ReplayError), pass_of([one]) as s:
        s.begin_forward(0, moved)
        for layer in LAYERS:
            s.check_dispatch(0, layer, chosen(s.take(0, layer, TOKENS)))
