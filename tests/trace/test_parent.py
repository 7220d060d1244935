"""Tests records that continue others: a group's prompt and earlier turns are stored once."""

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceStore, validate
from moe_rl.trace.frame import MAX_DEPTH
from moe_rl.trace.ranked import count_experts
from moe_rl.types import Provenance, RoutePart, RouteRef, Span
from tests.support.refusals import refused


def test_a_groups_prompt_is_stored_once(tmp_path, spec, random_routes, decoded):
    prompt = random_routes(spec, 400)
    refs, own = [], [random_routes(spec, 20, i) for i in range(8)]
    with ShardWriter(tmp_path, "s", spec) as writer:
        first = writer.add("p", prompt, range(400), [Span(400, 7, Provenance.PREFILL)])
        for i in range(8):
            refs.append(writer.add(f"c{i}", own[i], range(20), decoded(20), parent=replace(first, rows=399)))
    store = TraceStore(tmp_path)
    for i, ref in enumerate(refs):
        record = store.read(ref)
        np.testing.assert_array_equal(record.routes, np.concatenate([prompt[:399], own[i]]))
        assert record.spans == (Span(399, 7, Provenance.PREFILL), Span(20, 7, Provenance.DECODE))
        validate(record, token_ids=[*range(399), *range(20)], spec=spec, weight_version=7, ref=ref)
        assert store.info(ref).stored_bytes < 300 < store.info(first).stored_bytes


def test_every_prefix_of_turns_over_shards(tmp_path, spec, random_routes, decoded):
    """Three turns in three shards with different chunk sizes; each turn starts in the middle of the previous one."""
    expected, tokens, ref = np.empty((0, 3, 4), np.uint16), [], None
    for turn, (keep, rows) in enumerate([(0, 7), (5, 6), (9, 4)]):
        own = random_routes(spec, rows, turn)
        layout = {"layer_group": 1 + turn, "token_block": 2 + turn}
        with ShardWriter(tmp_path, f"turn{turn}", spec, **layout) as writer:
            parent = replace(ref, rows=keep) if ref else None
            ids = range(10 * turn, 10 * turn + rows)
            ref = writer.add("k", own, ids, decoded(rows, turn), parent=parent)
        expected = np.concatenate([expected[:keep], own])
        tokens = [*tokens[:keep], *ids]
    store = TraceStore(tmp_path)
    assert ref.rows == 13
    for rows in range(14):
        record = store.read(replace(ref, rows=rows))
        np.testing.assert_array_equal(record.routes, expected[:rows])
        assert record.token_ids.tolist() == tokens[:rows]
        versions = [span.weight_version for span in record.spans for _ in range(span.rows)]
        assert versions == ([0] * 5 + [1] * 4 + [2] * 4)[:rows]
        part = store.read(ref, rows=(rows // 2, rows), layers=[0, 3])
        np.testing.assert_array_equal(part.routes, expected[rows // 2 : rows, [0, 2]])
    for rows in range(14):
        np.testing.assert_array_equal(store.expert_counts(replace(ref, rows=rows)), count_experts(expected[:rows], 32))
    info = store.info(ref)
    assert (info.rows, info.own_rows, info.parent.rows) == (13, 4, 9)
    assert info.parent.parts[0].shard == "turn1" and store.read(info.parent).token_ids.tolist() == tokens[:9]
    with refused(TraceError, fault="rows", expected=14):
        store.read(replace(ref, rows=14))


def test_any_rows_of_a_record_that_continues_a_shorter_block(tmp_path, spec, random_routes, decoded):
    """A block of the parent has more rows than the record uses; the later rows are not part of the sequence."""
    prompt, own = random_routes(spec, 6), random_routes(spec, 3, 1)
    with ShardWriter(tmp_path, "s", spec, token_block=4) as writer:
        first = writer.add("p", prompt, range(6), decoded(6))
        ref = writer.add("c", own, range(10, 13), decoded(3, 1), parent=replace(first, rows=5))
    store = TraceStore(tmp_path)
    expected, tokens = np.concatenate([prompt[:5], own]), [*range(5), *range(10, 13)]
    for begin in range(9):
        for end in range(begin, 9):
            part = store.read(ref, rows=(begin, end))
            np.testing.assert_array_equal(part.routes, expected[begin:end])
            assert part.token_ids.tolist() == tokens[begin:end]
            out = np.empty((end - begin, 3, 4), np.uint16)
            store.read_batch([(ref, (begin, end))], out)
            np.testing.assert_array_equal(out, expected[begin:end])


def test_the_shard_of_a_parent_is_gone_or_another(tmp_path, spec, write_shard, random_routes, decoded):
    old = write_shard(tmp_path, "old", spec)
    with ShardWriter(tmp_path, "new", spec) as writer:
        ref = writer.add("k", random_routes(spec, 2), [1, 2], decoded(2), parent=old.refs[0])
    store = TraceStore(tmp_path)
    assert store.read(ref).routes.shape == (5, 3, 4)
    store.remove("old")
    for use in (store.read, store.info, lambda r: store.read(r, rows=(4, 5))):
        with refused(TraceError, fault="absent shard", shard="new", record="k"):
            use(ref)
    write_shard(tmp_path, "old", spec, seed=3)
    with refused(TraceError, fault="absent record", shard="new", record="k"):
        store.read(ref)


@pytest.mark.parametrize("in_a_shard", [1, 40, 1000])
def test_a_chain_of_any_length_is_read_from_few_records(tmp_path, spec, random_routes, decoded, in_a_shard):
    """500 turns, each with a row of its own and other weights; `in_a_shard` of them in a row share a shard."""
    length = 500 if in_a_shard > 1 else 2 * MAX_DEPTH + 3
    writer, ref, store = None, None, TraceStore(tmp_path)
    for turn in range(length):
        if turn % in_a_shard == 0:
            if writer is not None:
                writer.publish()
            writer = ShardWriter(tmp_path, f"s{turn}", spec)
        ref = writer.add(f"k{turn}", random_routes(spec, 1, turn), [turn], decoded(1, turn), parent=ref)
        if turn % 99 == 98:  # it is not published yet
            assert writer.store.read(ref).token_ids.tolist() == list(range(turn + 1))
    writer.publish()
    record = store.read(ref)
    assert record.token_ids.tolist() == list(range(length))
    assert [span.weight_version for span in record.spans] == list(range(length))
    for row in (0, MAX_DEPTH, MAX_DEPTH + 1, length - 1):
        np.testing.assert_array_equal(record.routes[row], random_routes(spec, 1, row)[0])
    chain = 0
    while (ref := store.info(ref).parent) is not None:
        chain += 1
    assert chain == (length - 1) % (MAX_DEPTH + 1)


def test_parents_that_no_reader_would_find_are_refused(tmp_path, spec, random_routes, decoded):
    others = {
        "model": {"spec": replace(spec, model_fingerprint="other")},
        "layers": {"layers": (0, 1)},
        "order": {"keep_order": True},
    }
    parents = {}
    for name, change in others.items():
        some = {"spec": spec} | change
        layers = len(some.get("layers", spec.moe_layers))
        with ShardWriter(tmp_path, name, some.pop("spec"), **some) as writer:
            parents[name] = writer.add("p", random_routes(spec, 2, layers=layers), [1, 2], decoded(2))
    with ShardWriter(tmp_path, "s", spec) as writer:
        own = writer.add("own", random_routes(spec, 2), [1, 2], decoded(2))
        parents |= {
            "rows": replace(own, rows=3),
            "negative": replace(own, rows=-1),
            "key": replace(own, key="other"),
            "digest": replace(own, parts=(RoutePart("s", "0" * 16),)),
            "no parts": replace(own, parts=()),
            "absent": RouteRef("k", 1, (RoutePart("absent", "0" * 16),)),
        }
        known = {
            "absent": {"shard": "absent", "fault": "absent shard"},
            "digest": {"shard": "s", "fault": "absent record"},
        }
        for name, parent in parents.items():
            with refused(TraceError, **known.get(name, {"fault": "parent"})):
                writer.add("k", random_routes(spec, 1), [1], decoded(1), parent=parent)
            assert name
        good = writer.add("k", random_routes(spec, 1), [1], decoded(1), parent=own)
    assert TraceStore(tmp_path).read(good).token_ids.tolist() == [1, 2, 1]
    assert TraceStore(tmp_path).records("s") == [own, good]
