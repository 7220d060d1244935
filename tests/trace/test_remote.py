"""Tests stores behind an fsspec URL: the same records by the same exact ranges, and no writes."""

import sys

import fsspec
import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import TraceStore
from moe_rl.trace.inspection import select
from tests.support.refusals import refused


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path, spec, write_shard):
    """A store copied to where the URL points, and its content."""
    shards = [write_shard(tmp_path / "store", f"s{i}", spec, seed=i) for i in range(2)]
    if request.param == "file":
        return f"file://{tmp_path}/store", shards, tmp_path / "store"
    fs, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    for path in (tmp_path / "store").iterdir():
        fs.pipe(f"{root}/{path.name}", path.read_bytes())
    return f"memory:/{root}", shards, None


def test_reads(url, assert_holds):
    root, shards, _ = url
    store = TraceStore(root)
    assert store.shards() == ["s0", "s1"] and set(store.manifest().published) == {"s0", "s1"}
    for shard in shards:
        assert_holds(store, shard)
        np.testing.assert_array_equal(store.aux(shard.refs[-1], "logprobs"), shard.aux)
    routes = np.concatenate([routes for shard in shards for routes in shard.routes])
    out = np.empty(routes.shape, np.uint8)
    store.read_batch([(ref, None) for shard in shards for ref in shard.refs], out)
    np.testing.assert_array_equal(out, routes)
    assert store.info(shards[0].refs[-1]).parent.key == shards[0].refs[0].key


def test_nothing_is_removed(url):
    root, _, _ = url
    store = TraceStore(root)
    for use in (lambda: store.remove("s0"), store.collect_garbage):
        with refused(TraceError, fault="read-only", folder=root):
            use()
    assert store.shards() == ["s0", "s1"]


def test_damage_and_absence(url):
    root, shards, _ = url
    fs, path = fsspec.core.url_to_fs(f"{root}/s0.safetensors")
    raw = fs.cat(path)
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in range(0, len(raw), 11):
        fs.pipe(path, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        store, stopped = TraceStore(root), 0
        for ref, routes in zip(shards[0].refs, shards[0].routes, strict=True):
            try:
                np.testing.assert_array_equal(store.read(ref).routes, routes)
            except TraceError:
                stopped += 1
        assert stopped == 4 or start <= at
    fs.pipe(path, raw[:-1])
    with refused(TraceError, fault="damaged shard", shard="s0"):
        TraceStore(root).read(shards[0].refs[0])
    fs.rm(path)
    with refused(TraceError, fault="absent shard", shard="s0", record=shards[0].refs[0].key):
        TraceStore(root).read(shards[0].refs[0])
    assert TraceStore(root + "/none").shards() == []


def test_a_command_refuses_what_is_no_store(url, monkeypatch):
    root, _, _ = url
    assert select(root).shards == ("s0", "s1") and select(f"{root}/s0.safetensors").shards == ("s0",)
    for target in (f"{root}/none", f"{root}/manifest.jsonl"):
        with refused(TraceError, folder=target):
            select(target)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for target, named in (("s3://bucket/store", "s3fs"), ("gs3://bucket/store", "gs3")):
        with refused(TraceError, folder=target, got=(named,)):
            select(target)

    def refusing(*args, **kwargs):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(TraceStore(root)._library.folder._fs, "ls", refusing)
    with refused(TraceError, folder=root, got=("no credentials",)):
        select(root)


def test_a_file_that_shrinks_after_its_index_was_read(url):
    root, shards, _ = url
    store = TraceStore(root)
    store.read(shards[0].refs[0])
    fs, path = fsspec.core.url_to_fs(f"{root}/s0.safetensors")
    fs.pipe(path, fs.cat(path)[:700])
    with pytest.raises(TraceError):
        store.read(shards[0].refs[0])


def test_bytes_are_asked_for_by_range(url, monkeypatch):
    root, shards, _ = url
    store = TraceStore(root)
    store.read(shards[0].refs[0])
    asked, fs = [], store._library.folder._fs
    real = fs.cat_ranges
    monkeypatch.setattr(
        fs, "cat_ranges", lambda p, s, e, **k: asked.extend(zip(s, e, strict=True)) or real(p, s, e, **k)
    )
    store.read(shards[0].refs[1])
    assert len(asked) == 1 and asked[0][1] - asked[0][0] == store.info(shards[0].refs[1]).stored_bytes
