"""Tests the manifest: what was published and removed, in order, and what follows from it."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceStore
from moe_rl.trace.manifest import MANIFEST, parse_manifest
from tests.support.refusals import refused


def test_it_tells_what_was_published_and_removed(tmp_path, spec, write_shard):
    store = TraceStore(tmp_path)
    assert store.manifest().published == {}
    shards = {name: write_shard(tmp_path, name, spec, seed=i) for i, name in enumerate("bca")}
    store.remove("c")
    manifest = store.manifest()
    assert list(manifest.published) == ["b", "a"] and manifest.damaged == ()
    for name, published in manifest.published.items():
        assert (published.bytes, published.records) == (shards[name].path.stat().st_size, 4)
    write_shard(tmp_path, "c", spec, seed=9)
    assert list(store.manifest().published) == ["b", "a", "c"]
    lines = [json.loads(line) for line in (tmp_path / MANIFEST).read_text().splitlines()]
    assert [(line["event"], line["shard"]) for line in lines] == [
        ("published", "b"),
        ("published", "c"),
        ("published", "a"),
        ("removed", "c"),
        ("published", "c"),
    ]


def test_a_shard_that_is_not_the_published_one_is_refused(tmp_path, spec, write_shard, assert_holds):
    write_shard(tmp_path, "s", spec)
    other = write_shard(tmp_path / "other", "s", spec, seed=1)
    shutil.copy(other.path, tmp_path / "s.safetensors")
    with refused(TraceError, TraceStore(tmp_path).manifest().published["s"].digest, fault="damaged shard", shard="s"):
        TraceStore(tmp_path).read(other.refs[0])
    # Copied here under a name that was never published: readable, but not in the manifest.
    (tmp_path / "s.safetensors").unlink()
    third = write_shard(tmp_path / "third", "t", spec, seed=2)
    shutil.copy(third.path, tmp_path / "t.safetensors")
    store = TraceStore(tmp_path)
    assert_holds(store, third)
    assert store.shards() == ["t"] and list(store.manifest().published) == ["s"]


def test_every_flip_and_cut_of_a_line_is_seen(tmp_path, spec, write_shard):
    for name in "ab":
        write_shard(tmp_path, name, spec)
    raw = (tmp_path / MANIFEST).read_bytes()
    good = parse_manifest(raw)
    assert list(good.published) == ["a", "b"]
    line = raw.index(b"\n") + 1
    for at in range(line):
        for bit in range(8):
            bad = parse_manifest(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            assert bad.damaged and all(good.published[name] == one for name, one in bad.published.items())
    for at in range(line + 1, len(raw)):
        cut = parse_manifest(raw[:at])
        assert (list(cut.published), cut.damaged) == (["a"], (2,))
    for junk in (b"\n", b"[]\n", b"[" * 9000 + b"\n", b'{"check":"x"}\n', b"\xff\n", b'{"event":"published"}\n'):
        assert parse_manifest(raw + junk).damaged == (3,)


def test_a_writer_that_died_in_its_line(tmp_path, spec, write_shard, assert_holds):
    first = write_shard(tmp_path, "a", spec)
    with open(tmp_path / MANIFEST, "ab") as file:
        file.write(b'{"event":"publ')
    second = write_shard(tmp_path, "b", spec)
    store = TraceStore(tmp_path)
    assert list(store.manifest().published) == ["a", "b"] and store.manifest().damaged == (2,)
    assert_holds(store, first)
    assert_holds(store, second)


def test_a_damaged_manifest_hides_no_shard(tmp_path, spec, write_shard, assert_holds):
    shard = write_shard(tmp_path, "s", spec)
    for content in (b"", b"\x00" * 100, b"{}\n" * 10):
        (tmp_path / MANIFEST).write_bytes(content)
        assert_holds(TraceStore(tmp_path), shard)
    assert len(TraceStore(tmp_path).manifest().damaged) == 10


def test_publishing_waits_for_the_lock(tmp_path, spec, write_shard):
    write_shard(tmp_path, "a", spec)
    script = f"""
from pathlib import Path
from moe_rl.trace import ShardWriter, TraceSpec
with ShardWriter(Path({str(tmp_path)!r}), "b", TraceSpec("m", 4, 2, "m")):
    print("publishing", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(tmp_path / MANIFEST, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "publishing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        assert TraceStore(tmp_path).shards() == ["a"] and list(TraceStore(tmp_path).manifest().published) == ["a"]
    assert child.wait(30) == 0
    child.stdout.close()
    assert list(TraceStore(tmp_path).manifest().published) == ["a", "b"] and TraceStore(tmp_path).shards() == ["a", "b"]


def test_many_writers_of_one_store(tmp_path, spec):
    script = f"""
import sys
from pathlib import Path
from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceSpec
won = 0
for i in range(20):
    try:
        ShardWriter(Path({str(tmp_path)!r}), f"s{{i}}", TraceSpec(f"m{{sys.argv[1]}}", 4, 2, "m")).publish()
        won += 1
    except TraceError as error:
        assert error.message.fault == "exists"
print(won)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    won = [int(child.communicate(timeout=60)[0]) for child in children]
    assert sum(won) == 20
    store = TraceStore(tmp_path)
    assert len(store.shards()) == 20 and set(store.manifest().published) == set(store.shards())
    assert all(store.records(name) == [] for name in store.shards())  # each is the one in the manifest


def test_retention_by_number_and_size(tmp_path, spec, write_shard, random_routes, decoded):
    store = TraceStore(tmp_path)
    first = write_shard(tmp_path, "z", spec)
    sizes = {"z": first.path.stat().st_size}
    for name in "yxw":
        sizes[name] = write_shard(tmp_path, name, spec).path.stat().st_size
    assert store.retain() == [] and store.retain(keep_shards=4, max_bytes=sum(sizes.values())) == []
    with ShardWriter(tmp_path, "child", spec) as writer:
        ref = writer.add("k", random_routes(spec, 1), [1], decoded(1), parent=first.refs[0])
    # The newest continues a record of the oldest, so that one stays and counts.
    assert store.retain(keep_shards=3) == ["y", "x"]
    assert store.shards() == ["child", "w", "z"] and len(store.read(ref).routes) == 4
    child = (tmp_path / "child.safetensors").stat().st_size
    assert store.retain(max_bytes=child + sizes["z"] + sizes["w"] - 1) == ["w"]
    assert store.retain(keep_shards=2) == []
    assert store.retain(keep_shards=1) == ["z", "child"]
    assert store.shards() == [] and store.manifest().published == {}
