"""Tests reading ahead: the same records, served from memory, within a memory bound."""

import os
import threading
import time

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceStore
from tests.support.refusals import refused


def _until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def filled(tmp_path, spec, random_routes, decoded):
    routes = [random_routes(spec, 100, i) for i in range(10)]
    with ShardWriter(tmp_path, "s", spec) as writer:
        refs = [writer.add(f"k{i}", one, range(100), decoded(100)) for i, one in enumerate(routes)]
    return tmp_path, refs, routes


def _ahead(store):
    return [future for _, future in store._prefetcher._ahead.values() if future.done()]


def test_later_reads_are_served_from_memory(filled, monkeypatch):
    root, refs, routes = filled
    store = TraceStore(root)
    store.prefetch(refs[:4], layers=[1, 3])
    _until(lambda: len(_ahead(store)) == 4)
    real, seen = os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(size) or real(fd, size, at))
    record = store.read(refs[2], layers=[1, 3], rows=(10, 30))
    np.testing.assert_array_equal(record.routes, routes[2][10:30, 1:])
    assert (record.first_row, record.token_ids.tolist(), record.spans[0].rows) == (10, list(range(10, 30)), 20)
    out = np.empty((150, 2, 4), np.uint8)
    store.read_batch([(refs[0], None), (refs[1], (50, 100))], out, layers=[1, 3])
    np.testing.assert_array_equal(out, np.concatenate([routes[0], routes[1][50:]])[:, 1:])
    assert seen == []
    # Each record is served once; other layers and records are read from the file.
    store.read(refs[2], layers=[1, 3])
    store.read_batch([(refs[3], None), (refs[5], None)], np.empty((200, 2, 4), np.uint8), layers=[1, 3])
    np.testing.assert_array_equal(store.read(refs[3]).routes, routes[3])
    assert len(seen) == 3


def test_memory_is_bounded_and_taking_goes_on(filled, spec):
    root, refs, routes = filled
    size = 100 * spec.row_bytes
    store = TraceStore(root, prefetch_bytes=2 * size + 1)
    store.prefetch(refs)
    _until(lambda: len(_ahead(store)) == 3)
    time.sleep(0.05)
    assert len(store._prefetcher._ahead) == 3 and store._prefetcher._bytes == 3 * size
    for ref, one in zip(refs, routes, strict=True):
        np.testing.assert_array_equal(store.read(ref).routes, one)
        assert store._prefetcher._bytes <= 3 * size
    _until(lambda: not any(thread.name == "trace-prefetch" for thread in threading.enumerate()))
    assert store._prefetcher._bytes == 0 and not store._prefetcher._ahead


def test_out_of_order_reads_do_not_wait(filled):
    root, refs, routes = filled
    store = TraceStore(root, prefetch_bytes=1)
    store.prefetch(refs)
    for i in reversed(range(10)):
        np.testing.assert_array_equal(store.read(refs[i]).routes, routes[i])


def test_a_new_plan_replaces_the_old(filled):
    root, refs, _ = filled
    store = TraceStore(root, prefetch_bytes=1)
    store.prefetch(refs[:5])
    _until(lambda: len(_ahead(store)) == 1)
    store.prefetch(refs[5:6])
    _until(lambda: [key[0].key for key in store._prefetcher._ahead] == ["k5"] and len(_ahead(store)) == 1)
    store.prefetch([])
    assert not store._prefetcher._ahead and store._prefetcher._bytes == 0
    _until(lambda: not any(thread.name == "trace-prefetch" for thread in threading.enumerate()))


def test_the_reader_gets_the_error(filled):
    root, refs, routes = filled
    path = root / "s.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little")] ^= 1
    path.write_bytes(raw)
    store = TraceStore(root)
    store.prefetch(refs[:3])
    with refused(TraceError, fault="damaged record", record=refs[0].parts[0].digest):
        store.read(refs[0])
    np.testing.assert_array_equal(store.read(refs[1]).routes, routes[1])
    np.testing.assert_array_equal(store.read(refs[2]).routes, routes[2])


def test_many_readers_of_one_plan(filled):
    root, refs, routes = filled
    store, wrong = TraceStore(root, prefetch_bytes=3000), []
    store.prefetch(refs)

    def work():
        for ref, one in zip(refs, routes, strict=True):
            if not np.array_equal(store.read(ref).routes, one):
                wrong.append(ref)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
