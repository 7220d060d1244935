"""Tests the way from the store to the routers: only the right rows are read, and padding does no harm."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_rl
from moe_rl.errors import ReplayError, RouteValidationError, TraceError
from moe_rl.replay.routes import (
    RowPolicy,
    SequenceRoutes,
    microbatch_routes,
    missing_rows,
    padding_routes,
    read_routes,
    source_sum,
)
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.trace.source_sum import expert_salts, row_salts
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import Provenance, RoutePart, Sequence, Span, VersionSpan, sampled_by
from tests.support.operations import Operations
from tests.support.refusals import refused

SPEC = TraceSpec("model", 16, 4, "mmm")


def routes_of(rng, tokens):
    return np.argsort(rng.random((tokens, 3, 16)), -1)[..., :4].astype(np.uint8)


@pytest.fixture
def stored(tmp_path):
    """Write two sequences into a store, as the sampler would, and return them with their routes."""
    rng = np.random.default_rng(0)
    sequences, tables = [], []
    with ShardWriter(tmp_path, "step1", SPEC) as writer:
        for number, (prompt, completion) in enumerate([(5, 4), (5, 4)]):
            tokens = tuple(rng.integers(0, 99, prompt + completion).tolist())
            table = routes_of(rng, prompt + completion - 1)
            spans = [Span(len(tokens) - 1, 3, Provenance.DECODE)]
            ref = writer.add(f"s{number}", table, np.array(tokens[:-1], np.int32), spans)
            ref = signed(ref, table, SPEC.moe_layers, tokens[:-1], versions=3)
            sequences.append(
                Sequence(
                    f"s{number}",
                    tokens[:prompt],
                    tokens[prompt:],
                    np.zeros(completion, np.float32),
                    1.0,
                    sampled_by(3, completion),
                    ref,
                )
            )
            tables.append(np.sort(table, -1))
    return TraceStore(tmp_path), sequences, tables


def fed(sequence):
    return np.array((sequence.prompt_token_ids + sequence.token_ids)[:-1])


def whole(sequence):
    """Return a mask that gives all rows to this rank."""
    return {"fed": fed(sequence), "here": np.ones(sequence.forwarded, bool)}


def read_one(store, sequence, spec, *, fed, here, **options):
    """Return the routes of one sequence."""
    (one,) = read_routes(store, [sequence], spec, fed=[fed], here=[here], **options)
    return one


def test_the_right_routes_are_read(stored):
    store, sequences, tables = stored
    for sequence, table in zip(sequences, tables, strict=True):
        read = partial(read_one, store, sequence, SPEC, **whole(sequence), weight_version=3)
        there = read(layers=SPEC.moe_layers)
        assert np.array_equal(there.routes, table)
        assert there.recorded.all() and not there.native.any() and not there.lags.any()
        # A pipeline stage reads its own layers, and no bytes of others.
        assert np.array_equal(read(layers=(1,)).routes, table[:, 1:2])
        assert np.array_equal(read(layers=(0, 2)).routes, table[:, [0, 2]])


def test_from_a_reference_to_its_decoding_are_few_frames(stored):
    """At most 6 of our functions are on the stack anywhere in the decoding, from the function that gets the reference
    to the innermost helper of the codec."""
    store, (sequence, _), _ = stored
    home, stacks = Path(moe_rl.__file__).parent, []

    def on_call(frame, event, _):
        own = []
        while event == "call" and frame is not None:
            code, frame = frame.f_code, frame.f_back
            if Path(code.co_filename).is_relative_to(home):
                own.append(code.co_qualname)
        stacks.append(own[::-1])

    sys.setprofile(on_call)
    try:
        read_routes(store, [sequence], SPEC, layers=SPEC.moe_layers, weight_version=3,
                    **{name: [each] for name, each in whole(sequence).items()})  # fmt: skip
    finally:
        sys.setprofile(None)
    decoding = [stack for stack in stacks if "decode_chunk" in stack]
    assert decoding and all(stack[0] == "read_routes" for stack in decoding)
    assert any(stack[-1] != "decode_chunk" for stack in decoding), "no helper of the codec was seen"
    deepest = max(decoding, key=len)
    assert len(deepest) <= 6, deepest


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a, b: {"routes": b.routes}, RouteValidationError),  # another sequence's routes, equal shape
        (lambda a, b: {"prompt_token_ids": a.prompt_token_ids[1:] + (7,)}, RouteValidationError),  # tokens shifted
        (lambda a, b: {"token_ids": a.token_ids + (7,)}, TraceError),  # one token more than was forwarded
        (lambda a, b: {"token_ids": a.token_ids[:-1]}, RouteValidationError),  # one token less
        (lambda a, b: {"routes": None}, TraceError),
        (lambda a, b: {"routes": dataclasses.replace(a.routes, source_sum="")}, TraceError),
        (lambda a, b: {"routes": dataclasses.replace(a.routes, key="s1")}, TraceError),
        (lambda a, b: {"routes": dataclasses.replace(a.routes, start=1)}, TraceError),
        (
            lambda a, b: {"routes": dataclasses.replace(a.routes, parts=(RoutePart("x", a.routes.parts[0].digest),))},
            TraceError,
        ),
    ],
)
def test_routes_of_other_tokens_are_refused(stored, change, error):
    store, (first, second), _ = stored
    wrong = dataclasses.replace(first, **change(first, second))
    wrong = dataclasses.replace(wrong, versions=sampled_by(3, len(wrong.token_ids)))
    with pytest.raises(error) as caught:
        read_one(store, wrong, SPEC, layers=SPEC.moe_layers, **whole(wrong), weight_version=3)
    about = caught.value.about
    assert {about.get("request", about.get("record"))} <= {"s0", "s1"}


def test_a_record_and_a_completion_that_both_say_the_newest_version_are_refused(stored, tmp_path):
    """Rows of version 3 that both call version 4: only the checksum from the engine's buffer knows better."""
    _, (first, _), tables = stored
    with ShardWriter(tmp_path / "newest", "step1", SPEC) as writer:
        tokens = fed(first).astype(np.int32)
        ref = writer.add("s0", tables[0], tokens, [Span(8, 4, Provenance.DECODE)])
    read = partial(read_one, TraceStore(tmp_path / "newest"), spec=SPEC, layers=SPEC.moe_layers, **whole(first))
    for version, source in ((4, signed(ref, tables[0], SPEC.moe_layers, tokens, versions=4)), (3, first.routes)):
        relabelled = dataclasses.replace(
            first, routes=dataclasses.replace(ref, source_sum=source.source_sum), versions=sampled_by(4, 4)
        )
        part = read(relabelled, weight_version=4)
        if version == 4:
            lay([part], source=[source_sum(relabelled)])
            continue
        with refused(ReplayError, "s0", fault="read"):
            lay([part], source=[source_sum(relabelled)])


def test_a_token_and_its_row_are_of_the_same_weights(tmp_path):
    """Weights 4 came after the second of 5 sampled tokens, whose rows are 3 to 7."""
    tokens = np.arange(9)
    table = routes_of(np.random.default_rng(0), 8)
    with ShardWriter(tmp_path, "step1", SPEC) as writer:
        ref = writer.add("s", table, tokens[:-1].astype(np.int32), [Span(5, 3, Provenance.DECODE),
                                                                    Span(3, 4, Provenance.DECODE)])  # fmt: skip
    ref = signed(ref, table, SPEC.moe_layers, tokens[:-1], versions=np.repeat([3, 4], [5, 3]))

    def read(*versions, here=slice(None)):
        mine = np.zeros(8, bool)
        mine[here] = True
        spans = tuple(VersionSpan(*one) for one in versions)
        one = Sequence("s", (0, 1, 2, 3), (4, 5, 6, 7, 8), np.zeros(5, np.float32), 1.0, spans, ref)
        stale = RowPolicy(stale="replay", max_staleness=1)
        read_one(TraceStore(tmp_path), one, SPEC, layers=SPEC.moe_layers, fed=tokens[:-1], here=mine,
                    weight_version=4, policy=stale)  # fmt: skip

    read((2, 3), (3, 4))
    with refused(RouteValidationError, request="s", token=3, got=("version 3", "4 rows"), expected=("version 4",)):
        read((3, 4), (2, 3))  # the spans of another sequence, or in another order
    with refused(RouteValidationError, request="s", token=5, expected=("version 3",), fault="versions of rows"):
        read((5, 3))
    read((5, 3), here=slice(0, 5))  # a rank sees the rows that it reads
    with refused(RouteValidationError, token=5, got=("version 4", "1 rows")):
        read((3, 3), (2, 4), here=slice(5, 8))
    for wrong in [(), ((2, 3),), ((2, 3), (4, 4)), ((2, 3), (0, 5), (3, 4))]:
        with refused(RouteValidationError, request="s", fault="versions of tokens"):
            read(*wrong)


def test_routes_of_other_weights_or_models_are_refused(stored):
    store, (first, _), _ = stored
    with refused(RouteValidationError, request="s0"):
        read_one(store, first, SPEC, layers=SPEC.moe_layers, **whole(first), weight_version=4)
    with refused(RouteValidationError, request="s0"):
        other = dataclasses.replace(SPEC, model_fingerprint="other")
        read_one(store, first, other, layers=SPEC.moe_layers, **whole(first), weight_version=3)
    with refused(RouteValidationError, request="s0"):
        other = dataclasses.replace(SPEC, layer_map="dmmm")
        read_one(store, first, other, layers=(1, 2), **whole(first), weight_version=3)


def test_only_the_rows_of_this_rank_are_read(tmp_path):
    """A context-parallel rank reads the first and the last quarter, and no routes of other ranks."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 99, 801).tolist()
    with ShardWriter(tmp_path, "step1", SPEC) as writer:
        table = routes_of(rng, 800)
        ref = writer.add("s", table, np.array(tokens[:-1], np.int32), [Span(800, 3, Provenance.DECODE)])
        ref = signed(ref, table, SPEC.moe_layers, tokens[:-1], versions=3)
    sequence = Sequence(
        "s", tuple(tokens[:5]), tuple(tokens[5:]), np.zeros(796, np.float32), 1.0, sampled_by(3, 796), ref
    )
    store, asked = TraceStore(tmp_path), []
    whole = store.read(ref).routes

    class Asking:
        def read_each(self, items, *, layers):
            asked.extend(rows for _, rows in items)
            return store.read_each(items, layers=layers)

    read = partial(read_one, Asking(), sequence, SPEC, layers=SPEC.moe_layers, fed=fed(sequence), weight_version=3)
    here = np.zeros(800, bool)
    here[:200] = here[600:] = True
    there = read(here=here)
    assert asked == [(0, 200), (600, 800)]
    assert np.array_equal(there.routes[here], whole[here]) and np.array_equal(there.recorded, here)
    assert not there.native.any()
    here[210:590] = True  # short gaps are read too
    assert read(here=here).recorded.all() and asked[2:] == [(0, 800)]
    assert read(here=np.zeros(800, bool)).recorded.sum() == 0 and len(asked) == 3


def part(rng, key, tokens, layers=3):
    ids = rng.integers(0, 99, tokens)
    routes = np.argsort(rng.random((tokens, layers, 16)), -1)[..., :4].astype(np.uint8)
    return SequenceRoutes.complete(key, ids, routes)


def lay(parts, *, padding=0, rows=None, spec=SPEC, fed=None, source=None, layers=None):
    fed = [p.token_ids for p in parts] if fed is None else fed
    total = sum(map(len, fed)) + padding
    return microbatch_routes(
        parts,
        spec,
        layers=spec.moe_layers if layers is None else layers,
        names=[p.key for p in parts],
        fed=fed,
        source=source,
        padded_tokens=total,
        rows=slice(0, total) if rows is None else rows,
        expert_parallel=2,
        device=torch.device("cpu"),
    )


def test_layers_are_laid_out_by_their_global_number():
    rng = np.random.default_rng(1)
    spec = TraceSpec.from_layers("model", 16, 4, (1, 4, 7), 8)
    parts = [part(rng, "a", 3), part(rng, "b", 5)]
    laid = lay(parts, padding=8, spec=spec)
    assert laid.names == ("a", "b", "padding") and sorted(laid.routes) == [1, 4, 7]
    assert laid.recorded.tolist() == list(range(8)) and (laid.replayed_tokens, laid.native_tokens) == (8, 0)
    for column, layer in enumerate((1, 4, 7)):
        assert laid.routes[layer].shape == (16, 4)
        assert np.array_equal(laid.routes[layer][:8], np.concatenate([p.routes for p in parts])[:, column])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_of_a_sequence_parallel_group_cut_the_same_table(ranks):
    rng = np.random.default_rng(2)
    parts = [part(rng, "a", 3), part(rng, "b", 6)]
    whole, share = lay(parts, padding=7), 16 // ranks
    pieces = [lay(parts, padding=7, rows=slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    for layer in SPEC.moe_layers:
        assert torch.equal(torch.cat([piece.routes[layer] for piece in pieces]), whole.routes[layer])
        # The checksums of the ranks' rows add up to the checksum of the sequence.
        assert torch.equal(sum(piece.checksums[layer] for piece in pieces), whole.checksums[layer])
    # The 9 real rows come first, then padding, which may fill whole ranks.
    assert [piece.replayed_tokens for piece in pieces] == [
        max(0, min(share, 9 - rank * share)) for rank in range(ranks)
    ]
    assert [len(piece.recorded) for piece in pieces] == [piece.replayed_tokens for piece in pieces]


def test_rows_in_any_order_take_their_routes_along():
    rng = np.random.default_rng(3)
    parts = [part(rng, "a", 3), part(rng, "b", 6)]
    rows = np.array([4, 12, 0, 8, 15, 2])  # as a context-parallel rank has them: padding also between tokens
    laid = lay(parts, padding=7, rows=rows)
    assert laid.recorded.tolist() == [0, 2, 3, 5] and laid.fed.owner.tolist() == [1, 2, 0, 1, 2, 0]
    whole = np.concatenate([*(p.routes for p in parts), padding_routes(7, 3, SPEC, expert_parallel=2)])
    for layer in SPEC.moe_layers:
        assert np.array_equal(laid.routes[layer], whole[rows, layer])
        here = torch.zeros(6, 16, dtype=torch.bool).scatter_(1, laid.routes[layer].long(), True)
        assert torch.equal(laid.fed.applied(layer, here), laid.checksums[layer])


@settings(deadline=None)
@given(st.data())
def test_a_checksum_is_that_of_the_map_and_of_no_other(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parts = [part(rng, key, data.draw(st.integers(1, 5))) for key in "ab"]
    laid = lay(parts, padding=data.draw(st.integers(0, 3)))
    layer = data.draw(st.sampled_from(SPEC.moe_layers))
    right = torch.zeros(len(laid.fed.salts), 16, dtype=torch.bool).scatter_(1, laid.routes[layer].long(), True)
    assert torch.equal(laid.fed.applied(layer, right), laid.checksums[layer])
    row, expert = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, 15))
    wrong = right.clone()
    wrong[row, expert] = ~wrong[row, expert]
    owner = int(laid.fed.owner[row])
    different = laid.fed.applied(layer, wrong) != laid.checksums[layer]
    assert different.tolist() == [i == owner for i in range(len(laid.names))]
    # The sum of both rows changes when the rows exchange their experts.
    other = data.draw(st.integers(0, len(right) - 1))
    if not torch.equal(right[row], right[other]):
        swapped = right.clone()
        swapped[[row, other]] = right[[other, row]]
        different = laid.fed.applied(layer, swapped) != laid.checksums[layer]
        assert set(different.nonzero()[:, 0].tolist()) == {owner, int(laid.fed.owner[other])}


def test_more_sequences_and_layers_take_no_more_operations():
    """On a GPU every operation is a launch."""
    rng, counts = np.random.default_rng(4), []
    for sequences, layers in ((2, 3), (12, 24)):
        spec = TraceSpec.from_layers("model", 16, 4, tuple(range(layers)), layers)
        parts = [part(rng, f"s{number}", 4, layers) for number in range(sequences)]
        lay(parts, padding=4, spec=spec)  # the tables of salts are made once
        with Operations() as operations:
            laid = lay(parts, padding=4, spec=spec)
        counts.append(operations.count)
        sums = [
            np.add.reduce(
                row_salts(p.key, p.token_ids, p.versions) * expert_salts(layer, 16)[p.routes[:, layer]].sum(-1)
            )
            for p in parts
            for layer in range(layers)
        ]
        read = torch.stack(list(laid.checksums.values()), 1)[:sequences]
        assert read.flatten().tolist() == np.array(sums).view(np.int64).tolist()
    assert counts[0] == counts[1]


def test_more_or_fewer_routes_than_packed_tokens_are_refused():
    rng = np.random.default_rng(3)
    parts = [part(rng, "a", 3), part(rng, "b", 5)]
    with refused(ReplayError, fault="rows", request="a, b", got="[3, 5]", expected="[3, 4]"):
        lay(parts, fed=[parts[0].token_ids, parts[1].token_ids[:-1]])


def test_missing_rows_are_refused_or_left_to_the_router(stored, tmp_path):
    store, (first, _), tables = stored
    rng = np.random.default_rng(7)
    with ShardWriter(tmp_path / "later", "step2", SPEC) as writer:
        # Routes of rows 2 to 6 of 8: the engine was asked for no earlier rows, and was cut off.
        tokens = fed(first)[2:7].astype(np.int32)
        table = routes_of(rng, 5)
        ref = dataclasses.replace(writer.add("s0", table, tokens, [Span(5, 3, Provenance.DECODE)]), start=2)
    some = dataclasses.replace(first, routes=signed(ref, table, SPEC.moe_layers, tokens, versions=3))
    none = dataclasses.replace(first, routes=None)
    assert [missing_rows(s) for s in (first, some, none)] == [0, 3, 8]
    read = partial(read_one, spec=SPEC, layers=SPEC.moe_layers, **whole(first), weight_version=3)
    for where, sequence, got in (
        (TraceStore(tmp_path / "later"), some, "2 to 6"),
        (store, none, "no"),
    ):
        with refused(TraceError, fault="no routes", request="s0", got=(got,), expected=("8",)):
            read(where, sequence)
    policy = RowPolicy(missing="native")
    there = read(TraceStore(tmp_path / "later"), some, policy=policy)
    assert there.native.tolist() == [True] * 2 + [False] * 5 + [True]
    assert np.array_equal(there.recorded, ~there.native)
    laid = lay([there])
    assert laid.native.tolist() == there.native.tolist() and (laid.replayed_tokens, laid.native_tokens) == (5, 3)
    assert laid.recorded.tolist() == [2, 3, 4, 5, 6]
    nothing = read(store, none, policy=policy)
    assert nothing.native.all() and lay([nothing]).checksums[1].tolist() == [0]


@pytest.mark.parametrize(
    ("policy", "native"),
    [
        (RowPolicy(stale="replay", max_staleness=2), [False] * 8),
        (RowPolicy(stale="native", max_staleness=2), [True] * 3 + [False] * 5),
    ],
)
def test_rows_of_older_weights_are_marked_and_treated_as_asked(tmp_path, stored, policy, native):
    _, (first, _), _ = stored
    rng = np.random.default_rng(8)
    spans = [Span(3, 4, Provenance.PREFILL), Span(5, 6, Provenance.DECODE)]
    with ShardWriter(tmp_path / "mixed", "step2", SPEC) as writer:
        table = routes_of(rng, 8)
        ref = writer.add("s0", table, fed(first).astype(np.int32), spans)
        ref = signed(ref, table, SPEC.moe_layers, fed(first), versions=versions_of_rows(spans))
    read = partial(
        read_one, TraceStore(tmp_path / "mixed"),
        dataclasses.replace(first, routes=ref, versions=sampled_by(6, 4)), SPEC,
        layers=SPEC.moe_layers, **whole(first),
    )  # fmt: skip
    there = read(weight_version=6, policy=policy)
    assert (there.lags > 0).sum() == 3 and there.recorded.all() and there.native.tolist() == native
    with refused(RouteValidationError, tokens="0 to 2", got=("4",), expected=("5 to 7",)):
        read(weight_version=7, policy=policy)
    with refused(RouteValidationError, tokens="0 to 2", got=("4",), expected=("6 to 6",)):
        read(weight_version=6)


@pytest.mark.parametrize(("keep_keys", "of_keys"), [(False, [2] * 6 + [1, 0]), (True, [2] * 8)])
def test_rows_behind_an_update_have_the_lag_of_the_oldest_keys_that_the_sampler_kept(
    tmp_path, stored, keep_keys, of_keys
):
    """A rank that reads no older row knows it too. The lags that replay.stale and the metrics use stay."""
    _, (first, _), _ = stored
    spans = [Span(6, 4, Provenance.DECODE), Span(1, 5, Provenance.DECODE), Span(1, 6, Provenance.DECODE)]
    table = routes_of(np.random.default_rng(8), 8)
    with ShardWriter(tmp_path / "mixed", "step2", SPEC) as writer:
        ref = writer.add("s0", table, fed(first).astype(np.int32), spans)
        ref = signed(ref, table, SPEC.moe_layers, fed(first), versions=versions_of_rows(spans))
    sampled = (VersionSpan(2, 4), VersionSpan(1, 5), VersionSpan(1, 6))
    read = partial(
        read_one, TraceStore(tmp_path / "mixed"), dataclasses.replace(first, routes=ref, versions=sampled), SPEC,
        layers=SPEC.moe_layers, fed=fed(first), weight_version=6,
        policy=RowPolicy(max_staleness=2, keep_keys=keep_keys),
    )  # fmt: skip
    there = read(here=np.ones(8, bool))
    laid = lay([there], padding=1)
    assert there.lags.tolist() == [2] * 6 + [1, 0] and laid.stale_tokens == 7
    assert laid.places.lag.tolist() == [*of_keys, 0]
    last = read(here=np.arange(8) == 7)
    assert last.recorded.tolist() == [False] * 7 + [True] and last.key_lags[7] == of_keys[7]


@pytest.mark.parametrize("expert_parallel", [1, 2, 4])
def test_padding_is_valid_and_spread(expert_parallel):
    rows = padding_routes(8, 3, SPEC, expert_parallel=expert_parallel)
    assert rows.shape == (8, 3, 4)
    assert all(len(set(row)) == 4 for token in rows for row in token)
    experts, counts = np.unique(rows[:, 0], return_counts=True)
    assert len(experts) == 16 and counts.max() - counts.min() <= 1
    # The first row alone already reaches as many ranks as possible.
    assert len({e // (16 // expert_parallel) for e in rows[0, 0]}) == min(4, expert_parallel)
