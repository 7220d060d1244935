"""Tests round trips, names, retention, and which bytes a read touches."""

import contextlib
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from moe_rl.errors import RouteValidationError, TraceError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, library
from moe_rl.trace import store as store_module
from moe_rl.trace.manifest import locked_manifest
from moe_rl.trace.ranked import count_experts
from moe_rl.types import Provenance, RoutePart, RouteRef, Span
from tests.support.refusals import refused


@st.composite
def _cases(draw):
    experts = draw(st.one_of(st.integers(2, 512), st.sampled_from([255, 256, 257, 512])))
    top_k = draw(st.integers(1, min(16, experts)))
    layer_map = draw(st.text("dmhtr", min_size=1, max_size=8).filter(lambda s: "m" in s or "r" in s))
    layout = {
        "layer_group": draw(st.integers(1, 4)),
        "token_block": draw(st.integers(1, 5)),
        "keep_order": draw(st.booleans()),
    }
    lengths = draw(st.lists(st.integers(0, 12), max_size=4))
    return TraceSpec('model "quoted\\" 1', experts, top_k, layer_map), lengths, layout, draw(st.integers(0, 2**32 - 1))


def _random_spans(rng, rows):
    spans = []
    while rows:
        some = int(rng.integers(1, rows + 1))
        spans.append(Span(some, int(rng.integers(0, 2**63 - 1)), Provenance(int(rng.integers(3)))))
        rows -= some
    return spans


@settings(max_examples=80, deadline=None)
@given(_cases())
def test_round_trip_and_every_slice(random_routes, case):
    spec, lengths, layout, seed = case
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        written = []
        with ShardWriter(Path(folder) / "new" / "store", "a.b-C_1", spec, **layout) as writer:
            for i, rows in enumerate(lengths):
                given_routes = rng.permuted(random_routes(spec, rows, seed + i), axis=-1)
                routes = given_routes if layout["keep_order"] else np.sort(given_routes, axis=-1)
                if spec.num_experts <= 256 and i % 2:
                    given_routes = given_routes.astype(np.uint8)
                if i % 3 == 2:
                    given_routes = np.asfortranarray(given_routes)
                tokens, spans = rng.integers(0, 2**31, rows), _random_spans(rng, rows)
                written.append((writer.add(f"r/{i}:0", given_routes, tokens, spans), routes, tokens, spans))
        store = TraceStore(Path(folder) / "new" / "store")
        assert store.shards() == ["a.b-C_1"] and store.records("a.b-C_1") == [one[0] for one in written]
        for ref, routes, tokens, spans in reversed(written):
            record = store.read(ref)
            assert record.routes.dtype == (np.uint8 if spec.num_experts <= 256 else np.uint16)
            assert not record.routes.flags.writeable and not record.token_ids.flags.writeable
            np.testing.assert_array_equal(record.routes, routes)
            np.testing.assert_array_equal(record.token_ids, tokens)
            assert (record.key, record.spans, record.spec, record.first_row) == (ref.key, tuple(spans), spec, 0)
            assert ref.rows == len(tokens) and record.layers == spec.moe_layers
            first, last = sorted(rng.integers(0, ref.rows + 1, 2).tolist())
            layers = [layer for layer in spec.moe_layers if rng.random() < 0.5]
            part = store.read(ref, layers=layers, rows=(first, last))
            columns = [spec.moe_layers.index(layer) for layer in layers]
            np.testing.assert_array_equal(part.routes, routes[first:last, columns])
            np.testing.assert_array_equal(part.token_ids, tokens[first:last])
            assert (part.first_row, part.layers) == (first, tuple(layers))
            by_row = [span for span in spans for _ in range(span.rows)][first:last]
            assert [(s.weight_version, s.provenance) for s in part.spans for _ in range(s.rows)] == [
                (s.weight_version, s.provenance) for s in by_row
            ]
        load_file(Path(folder) / "new" / "store" / "a.b-C_1.safetensors")


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(["?", "<i1", "<i2", "<i4", ">i8", "u1", "<u2", "<u4", "<u8", "<f2", ">f4"]),
    shape=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_aux_arrays_come_back_as_they_were(random_routes, decoded, dtype, shape, seed):
    spec = TraceSpec("m", 32, 4, "mmm")
    array = np.random.default_rng(seed).integers(0, 2, (*shape, 8), np.uint8)
    array = np.resize(array, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder), "s", spec) as writer:
            zeros = np.zeros(4000, np.int64)
            ref = writer.add("k", random_routes(spec, 2), [1, 2], decoded(2), aux={"some_name": array, "zeros": zeros})
        store = TraceStore(folder)
        back = store.aux(ref, "some_name")
        assert back.dtype == array.dtype.newbyteorder("<") and not back.flags.writeable
        assert back.shape == array.shape
        np.testing.assert_array_equal(back, array)
        np.testing.assert_array_equal(store.aux(ref, "zeros"), zeros)
        assert store.info(ref).aux == ("some_name", "zeros") and store.info(ref).stored_bytes < 1200
        with refused(TraceError, fault="no array", record="k"):
            store.aux(ref, "other")


@pytest.mark.parametrize(
    "aux",
    [
        {"Upper": np.zeros(1)},
        {"": np.zeros(1, np.int8)},
        {"a" * 65: np.zeros(1, np.int8)},
        {"a": np.zeros(1, np.float64)},
        {"a": np.zeros((1, 1, 1, 1), np.int8)},
        {"a": np.array(["x"])},
        {"a": np.array([object()])},
        {"a": [1, 2]},
        {"a": np.zeros((1 << 26) + 1, np.uint8)},
        {f"a{'_' * i}": np.zeros(1, np.int8) for i in range(60)}
        | {f"b{'_' * i}": np.zeros(1, np.int8) for i in range(9)},
    ],
)
def test_aux_arrays_refused(tmp_path, spec, random_routes, decoded, aux):
    with ShardWriter(tmp_path, "s", spec) as writer:
        with refused(TraceError, record="k"):
            writer.add("k", random_routes(spec, 1), [1], decoded(1), aux=aux)
        good = writer.add("k", random_routes(spec, 1), [1], decoded(1))
    assert TraceStore(tmp_path).read(good).key == "k"


def test_expert_counts_of_short_and_long_records(tmp_path, spec, random_routes, decoded):
    expected = []
    with ShardWriter(tmp_path, "s", spec, token_block=64, layer_group=2) as writer:
        for rows in (5, 127, 128, 200):
            routes = random_routes(spec, rows, seed=rows)
            ref = writer.add(f"k{rows}", routes, np.arange(rows), decoded(rows))
            expected.append((ref, routes))
            expected.append((replace(ref, rows=rows - 1), routes[:-1]))
        parent = expected[-1][0]
        more = random_routes(spec, 130, seed=9)
        child = writer.add("child", more, np.arange(130), decoded(130), parent=parent)
        expected.append((child, np.concatenate([expected[-1][1], more])))
    store = TraceStore(tmp_path)
    stored = 0
    for ref, routes in expected:
        by_hand = [[int((routes[:, layer] == e).sum()) for e in range(32)] for layer in range(3)]
        counts = store.expert_counts(ref)
        assert counts.dtype == np.int64
        np.testing.assert_array_equal(counts, by_hand)
        with library.Reading(store._library) as reading:
            reading.find([(part, "") for part in ref.parts])
            stored += reading.tip(ref.parts[0]).frame.counts is not None
    assert stored == 5  # the records of 128, 200 and 130 rows, two of them referred to twice


def test_the_shorter_side_of_a_record_is_counted(tmp_path, spec, random_routes, decoded, monkeypatch):
    """Siblings refer to the prompt of a record with a long completion: neither is decoded whole."""
    prompt, rows = 64, 1024
    routes = random_routes(spec, rows)
    with ShardWriter(tmp_path, "s", spec, token_block=64) as writer:
        ref = writer.add("k", routes, np.arange(rows), decoded(rows))
    store, decoded_rows = TraceStore(tmp_path), []

    def counted(readout, segments, columns, span, out, real=store_module.Readout.routes):
        decoded_rows.append(span[1] - span[0])
        real(readout, segments, columns, span, out)

    monkeypatch.setattr(store_module.Readout, "routes", counted)
    for held in (prompt, rows // 2, rows - prompt, rows):
        counts = store.expert_counts(replace(ref, rows=held))
        np.testing.assert_array_equal(counts, count_experts(routes[:held], spec.num_experts))
    assert decoded_rows == [prompt, rows // 2, prompt, 0]


@pytest.mark.parametrize("experts", [32, 512])
def test_stock_safetensors_opens_it(tmp_path, spec, write_shard, experts):
    shard = write_shard(tmp_path, "s", replace(spec, num_experts=experts))
    with safe_open(shard.path, framework="np") as file:
        assert set(file.keys()) == {"frames", "index"}
        meta = file.metadata()
        assert bytes(file.get_tensor("frames"))[:4] == b"MRF2"
        assert bytes(file.get_tensor("frames")).count(b"step1/prompt") == 4
    assert (meta["format"], meta["layer_map"], meta["layers"]) == ("moe_rl.routes/2", "mmdm", "0,1,3")
    assert (meta["state"], meta["records"]) == ("sealed", "4")


def test_same_content_gives_the_same_bytes(tmp_path, spec, write_shard):
    first = write_shard(tmp_path / "a", "s", spec)
    second = write_shard(tmp_path / "b", "s", spec)
    assert first.path.read_bytes() == second.path.read_bytes() and first.refs == second.refs


def test_a_short_record_costs_little_more_than_its_information(tmp_path, random_routes, decoded):
    spec, rng = TraceSpec("m", 32, 4, "m" * 8), np.random.default_rng(0)
    with ShardWriter(tmp_path, "s", spec) as writer:
        before = (next(tmp_path.glob(".s.*"))).stat().st_size
        for i in range(500):
            writer.add(f"step12/p{i:03}/c7", random_routes(spec, 5, i), rng.integers(0, 150_000, 5), decoded(5, 12))
    # 40 sets of log2 C(32, 4) bits are 75.7 bytes, 5 token ids of 17 bits are 11.
    assert ((tmp_path / "s.safetensors").stat().st_size - before) / 500 < 75.7 + 11 + 90


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "\u00e4", "a" * 201, None, "a:b"]
)
def test_shard_names_refused(tmp_path, spec, name):
    with refused(TraceError, field="shard name"):
        ShardWriter(tmp_path, name, spec)
    with refused(TraceError, field="shard name"):
        TraceStore(tmp_path).read(RouteRef("k", 1, (RoutePart(name, "0" * 16),)))
    with refused(TraceError, field="shard name"):
        TraceStore(tmp_path).remove(name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\u00e4", "k" * 513, None, 7, "a\\b"])
def test_record_keys_refused(tmp_path, spec, random_routes, decoded, key):
    with ShardWriter(tmp_path, "s", spec) as writer:
        with refused(TraceError, field="record key"):
            writer.add(key, random_routes(spec, 1), [1], decoded(1))
        good = writer.add("k" * 512, random_routes(spec, 1), [1], decoded(1))
    assert TraceStore(tmp_path).read(good).key == "k" * 512
    with refused(TraceError, field="record key"):
        TraceStore(tmp_path).read(replace(good, key=key))


@pytest.mark.parametrize(
    "layout",
    [
        {"layers": []},
        {"layers": [1, 0]},
        {"layers": [0, 0]},
        {"layers": [2]},
        {"layers": [0, 9]},
        {"layer_group": 0},
        {"token_block": 0},
        {"token_block": 65537},
        {"token_block": 4.0},
    ],
)
def test_layouts_refused(tmp_path, spec, layout):
    with refused(TraceError, field=next(iter(layout))):
        ShardWriter(tmp_path, "s", spec, **layout)
    assert os.listdir(tmp_path) == []


def test_a_refused_record_leaves_the_shard_as_it_was(tmp_path, spec, random_routes, decoded):
    good = random_routes(spec, 2)
    bad = good.copy()
    bad[1, 2, 0] = bad[1, 2, 3]
    two = {"key": "two", "routes": good, "token_ids": [1, 2], "spans": decoded(2)}
    with ShardWriter(tmp_path, "s", spec) as writer:
        first = writer.add("one", good, [1, 2], decoded(2))
        for change, facts in (
            ({"routes": bad}, {"shard": "s", "token": 1, "layer": 3}),
            ({"spans": decoded(2, -1)}, {"fault": "weight version"}),
            ({"spans": decoded(1)}, {"fault": "spans", "got": ("1",), "expected": 2}),
            ({"spans": [Span(2, 0, 7)]}, {"fault": "provenance"}),
            ({"spans": [*decoded(2), Span(0, 0, Provenance.DECODE)]}, {"fault": "span"}),
            ({"token_ids": [1, 2, 3]}, {"shard": "s", "token": 2, "fault": "token without routes"}),
            ({"token_ids": [1, -100]}, {"shard": "s", "token": 1, "fault": "token id"}),
        ):
            with refused(RouteValidationError, request="two", **facts):
                writer.add(**two | change)
        with refused(TraceError, shard="s", record="one", fault="key twice"):
            writer.add("one", good, [1, 2], decoded(2))
        with refused(TraceError, shard="s", record="two"):
            writer.mark_aborted("two")
        second = writer.add("two", good[:1], [1], decoded(1))
    store = TraceStore(tmp_path)
    np.testing.assert_array_equal(store.read(first).routes, good)
    np.testing.assert_array_equal(store.read(second).routes, good[:1])


@pytest.mark.parametrize("rows, keep_order", [(2, False), (200, False), (200, True)], ids=str)
@pytest.mark.parametrize(
    "dtype, wrong, fault",
    [
        ("uint8", None, "expert twice"),
        ("uint8", 32, "no expert"),
        ("uint8", 255, "no expert"),
        ("uint16", 261, "no expert"),
    ],
)
def test_a_set_that_is_none_is_named(tmp_path, spec, random_routes, decoded, rows, keep_order, dtype, wrong, fault):
    """In a record with expert counts or without; 261 would be 5 as a single byte."""
    routes = random_routes(spec, rows).astype(dtype)
    routes[-1, 2, 3] = routes[-1, 2, 0] if wrong is None else wrong
    writer = ShardWriter(tmp_path, "s", spec, keep_order=keep_order)
    with refused(RouteValidationError, request="a", shard="s", token=rows - 1, layer=3, fault=fault):
        writer.add("a", routes, range(rows), decoded(rows))
    writer.publish()
    assert TraceStore(tmp_path).records("s") == []


def test_neighbouring_spans_that_say_the_same_become_one(tmp_path, spec, random_routes):
    pieces = [Span(1, 3, Provenance.PREFILL), Span(2, 3, Provenance.PREFILL), Span(1, 3, 1), Span(1, 4, 1)]
    with ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("k", random_routes(spec, 5), range(5), pieces)
    spans = TraceStore(tmp_path).read(ref).spans
    assert spans == (Span(3, 3, Provenance.PREFILL), Span(1, 3, Provenance.DECODE), Span(1, 4, Provenance.DECODE))


def test_info_decodes_nothing(tmp_path, spec, write_shard, monkeypatch):
    shard = write_shard(tmp_path, "s", spec, lengths=(900, 1100), token_block=512)
    store, real, seen = TraceStore(tmp_path), os.pread, []
    store.read(shard.refs[0], rows=(0, 0))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    info = store.info(shard.refs[1])
    assert sum(seen) < 300 and info.stored_bytes > 4000
    assert (info.key, info.rows, info.own_rows, info.aborted) == (shard.refs[1].key, 1102, 1100, True)
    assert info.parent == replace(shard.refs[0], rows=2) and info.layers == (0, 1, 3) and info.aux == ("logprobs",)
    assert info.spans == (Span(1102, 7, Provenance.DECODE),)


def test_a_reference_travels_as_messagepack(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(shard.refs), type=list[RouteRef])
    assert sent == shard.refs
    np.testing.assert_array_equal(TraceStore(tmp_path).read(sent[0]).routes, shard.routes[0])


def test_publish_never_overwrites(tmp_path, spec, write_shard, assert_holds):
    early = ShardWriter(tmp_path, "s", spec)
    shard = write_shard(tmp_path, "s", spec)
    before = shard.path.read_bytes()
    with refused(TraceError, fault="exists", shard="s", folder=tmp_path):
        early.publish()
    with refused(TraceError, fault="exists", shard="s", folder=tmp_path):
        ShardWriter(tmp_path, "s", spec)
    assert shard.path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["manifest.jsonl", "s.safetensors"]
    assert_holds(TraceStore(tmp_path), shard)


def test_nothing_is_visible_before_publish_nor_left_by_abandon(tmp_path, spec, random_routes, decoded):
    with pytest.raises(KeyError, match="stop"), ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("k", random_routes(spec, 2), [1, 2], decoded(2))
        assert len(os.listdir(tmp_path)) == 1 and TraceStore(tmp_path).shards() == []
        with refused(TraceError, shard="s", record="k", fault="absent shard"):
            TraceStore(tmp_path).read(ref)
        raise KeyError("stop")
    assert os.listdir(tmp_path) == []
    for use in (
        writer.publish,
        lambda: writer.add("z", random_routes(spec, 1), [1], decoded(1)),
        lambda: writer.mark_aborted("k"),
    ):
        with refused(TraceError, fault="closed", shard="s"):
            use()
    writer.abandon()


def test_interrupted_add_does_not_spoil_the_shard(tmp_path, spec, random_routes, decoded, monkeypatch):
    writer = ShardWriter(tmp_path, "s", spec)
    first = writer.add("one", random_routes(spec, 2, 1), [1, 2], decoded(2))
    real, fired = os.pwrite, []

    def interrupted(fd, data, at):
        fired.append(real(fd, data[:-1], at))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", interrupted)
        writer.add("long", random_routes(spec, 500), list(range(500)), decoded(500))
    assert fired[0] > 1000
    second = writer.add("two", random_routes(spec, 2, 2), [1, 2], decoded(2))
    writer.publish()
    store = TraceStore(tmp_path)
    np.testing.assert_array_equal(store.read(first).routes, random_routes(spec, 2, 1))
    np.testing.assert_array_equal(store.read(second).routes, random_routes(spec, 2, 2))
    assert [ref.key for ref in store.records("s")] == ["one", "two"]


def test_short_writes_and_reads_are_continued(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    pwrite, pread, calls = os.pwrite, os.pread, []
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: calls.append("w") or pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append("r") or pread(fd, min(size, 5), at))
    shard = write_shard(tmp_path, "s", spec)
    assert_holds(TraceStore(tmp_path), shard)
    assert calls.count("w") > 50 and calls.count("r") > 50


def test_wrong_references_are_refused(tmp_path, spec, write_shard):
    shard = write_shard(tmp_path, "s", spec)
    other = write_shard(tmp_path, "other", spec, seed=50)
    store, ref = TraceStore(tmp_path), shard.refs[0]
    (part,) = ref.parts
    wrong = {
        "other": replace(ref, parts=(replace(part, shard="other"),)),
        "digest": replace(ref, parts=shard.refs[1].parts),
        "digest of nothing": replace(ref, parts=(replace(part, digest="0" * 16),)),
        "no digest": replace(ref, parts=(replace(part, digest="zz"),)),
        "rows": replace(ref, rows=4),
        "negative rows": replace(ref, rows=-1),
        "key": replace(ref, key=shard.refs[3].key),
        "absent key": replace(ref, key="nobody"),
        "absent shard": replace(ref, parts=(replace(part, shard="nowhere"),)),
        "no parts": replace(ref, parts=()),
    }
    for bad in wrong.values():
        for use in (store.read, store.info, store.expert_counts, lambda r: store.aux(r, "logprobs")):
            with refused(TraceError, record=bad.key):
                use(bad)
    assert store.read(other.refs[0]).key == ref.key
    for rows in ((0, 4), (-1, 2), (2, 1)):
        with refused(TraceError, fault="rows", record="step1/prompt0:0"):
            store.read(ref, rows=rows)
    for layers in ([2], [1, 0], [0, 0], [17]):
        with refused(TraceError, fault=("layer",), record="step1/prompt0:0"):
            store.read(ref, layers=layers)


def test_remove_and_a_new_shard_of_the_same_name(tmp_path, spec, write_shard, assert_holds):
    store = TraceStore(tmp_path)
    old, kept = write_shard(tmp_path, "s", spec), write_shard(tmp_path, "t", spec)
    assert_holds(store, old)
    store.remove("s")
    assert store.shards() == ["t"]
    with refused(TraceError, fault="absent shard", shard="s", record="step1/prompt0:0"):
        store.read(old.refs[0])
    with refused(TraceError, shard="s", folder=tmp_path):
        store.remove("s")
    new = write_shard(tmp_path, "s", spec, seed=9)
    assert_holds(store, new)
    assert_holds(store, kept)
    with refused(TraceError, fault="absent record", shard="s", record="step1/prompt0:0"):
        store.read(old.refs[0])


def test_many_shards_are_removed_while_others_publish(tmp_path, spec, write_shard, monkeypatch):
    """The manifest is locked for a few shards at a time."""
    store, held = TraceStore(tmp_path), []
    for name in "abcdf":
        write_shard(tmp_path, name, spec)

    def locked(root):
        held.append(root)
        return locked_manifest(root)

    monkeypatch.setattr(store_module, "_REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(store_module, "locked_manifest", locked)
    with refused(TraceError, shard="e", folder=tmp_path):
        store.remove("a", "b", "c", "d", "e", "f")
    assert len(held) == 3 and store.shards() == ["f"] and list(store.manifest().published) == ["f"]


def test_a_writer_publishes_while_shards_are_removed(tmp_path, spec, write_shard, monkeypatch):
    names, store, unlink = [f"s{number}" for number in range(20)], TraceStore(tmp_path), os.unlink
    for name in names:
        write_shard(tmp_path, name, spec)

    def slow(path, *args, **more):
        if os.path.basename(path).removesuffix(".safetensors") in names:
            begun.set()
            time.sleep(0.05)
        unlink(path, *args, **more)

    begun = threading.Event()
    monkeypatch.setattr(store_module, "_REMOVED_AT_ONCE", 2)
    monkeypatch.setattr(os, "unlink", slow)
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(store.remove, *names)
        begun.wait(10)
        write_shard(tmp_path, "new", spec)
        assert not removed.done(), "the writer waited for all"
    removed.result()
    assert store.shards() == ["new"]


def test_a_stage_of_a_long_record_is_read_by_exact_ranges(tmp_path, random_routes, decoded, monkeypatch):
    spec = TraceSpec("m", 128, 8, "m" * 48)
    routes = np.tile(random_routes(spec, 256), (8, 1, 1))
    rng = np.random.default_rng(0)
    routes = rng.permutation(routes.reshape(-1, 8)).reshape(2048, 48, 8)
    with ShardWriter(tmp_path, "s", spec) as writer:
        ref = writer.add("k", routes, rng.integers(0, 150_000, 2048), decoded(2048))
        writer.add("other", routes, rng.integers(0, 150_000, 2048), decoded(2048))
    store, real, seen = TraceStore(tmp_path), os.pread, []
    store.read(ref, rows=(0, 0))
    with library.Reading(store._library) as reading:
        reading.find([(ref.parts[0], "")])
        own = sum(chunk.size for chunk in reading.tip(ref.parts[0]).frame.chunks[8:12])
    assert own > 100_000
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    stage = range(24, 36)
    np.testing.assert_array_equal(store.read(ref, layers=stage).routes, routes[:, 24:36])
    assert len(seen) == 3 and seen[-1] == own and sum(seen) <= 1.1 * own  # head, token ids, chunks
    seen.clear()
    out = np.empty((2048, 12, 8), np.uint8)
    store.read_batch([(ref, None)], out, layers=stage)
    np.testing.assert_array_equal(out, routes[:, 24:36])
    assert len(seen) == 2 and sum(seen) <= 1.01 * own


def test_a_read_touches_its_own_record_only(tmp_path, spec, write_shard, monkeypatch):
    shard = write_shard(tmp_path, "s", spec, lengths=(1000, 5, 1000))
    store, real, seen = TraceStore(tmp_path), os.pread, []
    store.read(shard.refs[1])
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    store.read(shard.refs[1])
    assert len(seen) == 1 and seen[0] == store.info(shard.refs[1]).stored_bytes


def test_threads_share_a_store_and_its_small_cache(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    monkeypatch.setattr(library, "_CACHED_SHARDS", 2)
    shards = [write_shard(tmp_path, f"s{i}", spec, seed=i) for i in range(5)]
    store = TraceStore(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(assert_holds, store, shard) for shard in shards * 8]:
            done.result()
    assert len(store._library._cache) == 2
    open_files = len(os.listdir("/proc/self/fd"))
    for shard in shards:
        assert_holds(store, shard)
        with contextlib.suppress(TraceError):
            store.read(replace(shard.refs[0], parts=(RoutePart(f"{shard.refs[0].parts[0].shard}", "0" * 16),)))
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("keep_order", [False, True])
def test_order_is_kept_when_asked_for(tmp_path, spec, random_routes, decoded, keep_order):
    routes = random_routes(spec, 40)[:, :, ::-1]
    with ShardWriter(tmp_path, "s", spec, keep_order=keep_order) as writer:
        ref = writer.add("k", routes, range(40), decoded(40))
    np.testing.assert_array_equal(TraceStore(tmp_path).read(ref).routes, routes if keep_order else routes[:, :, ::-1])


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": ""},
        {"model_fingerprint": "a\nb"},
        {"model_fingerprint": "f" * 257},
        {"num_experts": 0},
        {"num_experts": 65537},
        {"top_k": 0},
        {"top_k": 33},
        {"layer_map": ""},
        {"layer_map": "dd"},
        {"layer_map": "dmx"},
        {"layer_map": "m" * 1025},
        {"layer_map": ("m", "d")},
    ],
)
def test_impossible_specs_are_refused(spec, change):
    with refused(TraceError, field=next(iter(change))):
        replace(spec, **change)


def test_layers_of_a_spec():
    assert TraceSpec("m", 8, 2, "dmhtrm").moe_layers == (1, 4, 5)
    assert TraceSpec.from_layers("m", 8, 2, (1, 3), 5) == TraceSpec("m", 8, 2, "dmdmd")
    for bad in ((1, 5), (1, 1), (-1,), ()):
        with refused(TraceError, field=("layer",)):
            TraceSpec.from_layers("m", 8, 2, bad, 5)


def test_a_shard_that_another_process_replaced_is_read_anew(tmp_path, spec, write_shard, assert_holds):
    """A store keeps the index of a shard, and what the manifest says, only as long as the files are the same."""
    store, before = TraceStore(tmp_path), write_shard(tmp_path, "s", spec)
    assert_holds(store, before)
    assert list(store.manifest().published) == ["s"] and store.unpublished() == []
    TraceStore(tmp_path).remove("s")
    after = write_shard(tmp_path, "s", spec, lengths=(5, 1, 2), seed=9)
    write_shard(tmp_path, "t", spec)
    assert_holds(store, after)
    with pytest.raises(TraceError):
        store.read(before.refs[1])
    assert list(store.manifest().published) == ["s", "t"] and store.unpublished() == []
