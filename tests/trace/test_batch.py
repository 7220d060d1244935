"""Tests read_batch: it fills an array with many slices, equal to single reads, with few and exact reads of the file."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from tests.support.refusals import refused

SPEC = TraceSpec("m", 32, 4, "mdmmmmm")


@pytest.fixture(scope="module")
def filled(tmp_path_factory, random_routes, decoded):
    """Two shards of three records each, some with a shared prompt; references and routes."""
    root = tmp_path_factory.mktemp("store")
    refs, routes = [], []
    for shard in range(2):
        with ShardWriter(root, f"s{shard}", SPEC, layer_group=2, token_block=4) as writer:
            prompt = random_routes(SPEC, 9, 50 + shard)
            first = writer.add("prompt", prompt, range(9), decoded(9))
            refs.append(first)
            routes.append(prompt)
            for i, rows in enumerate((6, 0, 13)):
                own = random_routes(SPEC, rows, 60 + 10 * shard + i)
                parent = replace(first, rows=7)
                refs.append(writer.add(f"c{i}", own, range(rows), decoded(rows), parent=parent))
                routes.append(np.concatenate([prompt[:7], own]))
    return root, refs, routes


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_batch_equals_single_reads(filled, data):
    root, refs, routes = filled
    layers = data.draw(st.sampled_from([None, [], [0], [2, 3], [3, 4], [0, 2, 6], [0, 2, 3, 4, 5, 6]]))
    columns = list(range(6)) if layers is None else [SPEC.moe_layers.index(layer) for layer in layers]
    items, expected = [], [np.empty((0, len(columns), 4), np.uint16)]
    for i in data.draw(st.lists(st.integers(0, len(refs) - 1), max_size=6)):
        rows = None
        if data.draw(st.booleans()):
            rows = tuple(sorted(data.draw(st.lists(st.integers(0, refs[i].rows), min_size=2, max_size=2))))
        items.append((refs[i], rows))
        first, last = rows or (0, refs[i].rows)
        expected.append(routes[i][first:last, columns])
    store = TraceStore(root)
    for item, record, rows in zip(items, store.read_each(items, layers=layers), expected[1:], strict=True):
        np.testing.assert_array_equal(record.routes, rows)
        alone = store.read(item[0], layers=layers, rows=item[1])
        np.testing.assert_array_equal(record.token_ids, alone.token_ids)
        assert (record.key, record.spans, record.first_row) == (alone.key, alone.spans, alone.first_row)
        assert not record.routes.flags.writeable
    expected = np.concatenate(expected)
    # Once as a replay pass uses it, a view of an [L, T, K] array of a wider type, and once plain.
    for out in (
        np.full((len(columns), len(expected), 4), -1, np.int64).transpose(1, 0, 2),
        np.full(expected.shape, 255, np.uint8),
    ):
        store.read_batch(items, out, layers=layers)
        np.testing.assert_array_equal(out, expected)


def test_what_lies_together_is_read_together_and_once(filled, monkeypatch):
    root, refs, routes = filled
    store, real, seen = TraceStore(root), os.pread, []
    store.read(refs[0])
    out = np.empty((4 * 20, 6, 4), np.uint8)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append((at, size)) or real(fd, size, at))
    store.read_batch([(refs[3], None)] * 4, out)
    np.testing.assert_array_equal(out, np.tile(routes[3], (4, 1, 1)))
    # Small frames are read whole: the record and the prompt that it continues.
    assert len(seen) == 2 and sum(size for _, size in seen) == sum(store.info(refs[i]).stored_bytes for i in (0, 3))


def test_neighbouring_chunks_are_one_read(tmp_path, random_routes, decoded, monkeypatch):
    routes = random_routes(SPEC, 3000)
    with ShardWriter(tmp_path, "s", SPEC, layer_group=2, token_block=256) as writer:
        ref = writer.add("k", routes, range(3000), decoded(3000))
    store, real, seen = TraceStore(tmp_path), os.pread, []
    store.read(ref, rows=(0, 0))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    out = np.empty((3000, 2, 4), np.uint8)
    store.read_batch([(ref, (0, 1500)), (ref, (1500, 3000))], out, layers=[3, 4])
    np.testing.assert_array_equal(out, routes[:, 2:4])
    assert len(seen) == 2
    seen.clear()
    store.read_batch([(ref, (1024, 1280))], out[:256], layers=[3, 4])
    np.testing.assert_array_equal(out[:256], routes[1024:1280, 2:4])
    assert len(seen) == 2 and seen[1] < 1100  # one chunk of 512 sets of 15.1 bits


def test_arrays_that_cannot_take_the_routes_are_refused(filled):
    root, refs, _ = filled
    store, item = TraceStore(root), (refs[0], None)
    for out in (
        np.empty((8, 6, 4), np.uint8),
        np.empty((9, 5, 4), np.uint8),
        np.empty((9, 6, 3), np.uint8),
        np.empty((9, 6, 4), np.int8),
        np.empty((9, 24), np.uint8),
    ):
        with refused(TraceError, fault="array"):
            store.read_batch([item], out)
    with refused(TraceError, fault="array"):
        store.read_batch([], np.empty((1, 6, 4), np.uint8))
    with refused(TraceError, fault="rows", record=refs[0].key):
        store.read_batch([(refs[0], (0, 10))], np.empty((10, 6, 4), np.uint8))
    store.read_batch([], np.empty((0, 6, 4), np.uint8))
