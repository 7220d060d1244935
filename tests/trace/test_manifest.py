"""Tests the manifest: what was published and removed, in order, and what follows from it."""

import fcntl
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.trace import manifest as manifest_module
from moe_rl.trace.files import LocalFolder
from moe_rl.trace.manifest import MANIFEST, ManifestReader, locked_manifest, parse_manifest
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


def test_a_process_that_hangs_with_the_lock_is_told_and_holds_nobody_up_for_ever(
    tmp_path, spec, write_shard, monkeypatch
):
    write_shard(tmp_path, "a", spec)
    monkeypatch.setattr("moe_rl.trace.manifest._LOCK_SECONDS", 0.05)
    with open(tmp_path / MANIFEST, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with refused(TraceError, MANIFEST, "0.05 s", shard="b"):
            write_shard(tmp_path, "b", spec)
        with refused(TraceError, MANIFEST, "0.05 s", shard="a"):
            TraceStore(tmp_path).remove("a")
    write_shard(tmp_path, "b", spec)
    assert TraceStore(tmp_path).shards() == ["a", "b"]


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


def _line_of(root, event, name):
    with locked_manifest(root) as manifest:
        fields = {"digest": name * 2, "bytes": 1, "records": 0} if event == "published" else {}
        manifest.append(event, name, **fields)


def _open(root):
    return LocalFolder(root).open(MANIFEST)


@pytest.mark.parametrize("seed", range(2))
def test_a_reader_that_goes_on_sees_what_a_new_one_sees(tmp_path, seed):
    """Lines are added, undone, torn and flipped, and the file is compacted, in any order."""
    rng, reader, path, kinds = random.Random(seed), ManifestReader(), tmp_path / MANIFEST, set()
    _line_of(tmp_path, "published", "first")
    for number in range(60):
        kind = rng.choice(["published", "published", "removed", "torn", "undone", "flip", "compact"])
        kinds.add(kind)
        before = path.stat().st_size
        if kind in ("published", "removed"):
            _line_of(tmp_path, kind, f"s{rng.randrange(12)}")
        elif kind == "torn":
            with open(path, "ab") as file:
                file.write(b'{"event":"publ'[: rng.randrange(1, 14)])
        elif kind == "undone":  # as a writer whose link failed, while another one already publishes
            _line_of(tmp_path, "published", f"u{number}")
            reader.read(_open(tmp_path))
            os.truncate(path, before)
            for again in range(rng.randrange(1, 4)):
                _line_of(tmp_path, "published", f"v{again}")
        elif kind == "flip":
            raw = bytearray(path.read_bytes())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
            os.utime(path, ns=(number, number))  # the clock of a file system ticks slowly
        else:
            with locked_manifest(tmp_path) as manifest:
                known = parse_manifest(path.read_bytes())
                manifest.compact()
                _same_but_removed(known, parse_manifest(path.read_bytes()))
            while rng.random() < 0.7:
                _line_of(tmp_path, "published", f"s{rng.randrange(12)}")
        reader.read(_open(tmp_path))
        assert reader.manifest() == parse_manifest(path.read_bytes())
    assert len(kinds) == 6


def _same_but_removed(before, after):
    assert list(after.published.items()) == list(before.published.items())
    assert len(after.damaged) == len(before.damaged)


def test_a_step_costs_the_same_after_many_steps(tmp_path, monkeypatch):
    """Counted: lines that readers and the writer parse, and bytes that readers read."""
    cost = Counter()

    def parsed(data, real=manifest_module._parsed):
        for one in real(data):
            cost["lines"] += 1
            yield one

    class Counting:
        def __init__(self, file):
            self.identity, self.size, self.close, self._file = file.identity, file.size, file.close, file

        def fetch(self, ranges):
            for data in self._file.fetch(ranges):
                cost["bytes"] += len(data)
                yield data

    def opened(folder, name, real=LocalFolder.open):
        file = real(folder, name)
        return Counting(file) if name == MANIFEST else file

    monkeypatch.setattr(manifest_module, "_parsed", parsed)
    monkeypatch.setattr(LocalFolder, "open", opened)
    trainer, rank, costs = TraceStore(tmp_path), TraceStore(tmp_path), []
    for step in range(150):
        cost.clear()
        ShardWriter(tmp_path, f"step{step:06d}", TraceSpec("m", 4, 2, "m")).publish()
        trainer.check_published([f"step{step:06d}"])
        rank.records(f"step{step:06d}")
        if step >= 3:
            trainer.remove(f"step{step - 3:06d}")
        costs.append((cost["lines"], cost["bytes"]))
    length = len((tmp_path / MANIFEST).read_bytes().splitlines()[0]) + 1
    for what, most in ((0, 5), (1, 8 * length)):
        assert statistics.median(one[what] for one in costs) <= most
    first, last = costs[:75], costs[75:]
    for what in (0, 1):  # the steps in which the file is compacted included
        assert sum(one[what] for one in last) <= 1.2 * sum(one[what] for one in first)
    assert len((tmp_path / MANIFEST).read_bytes().splitlines()) < 100
    assert list(trainer.manifest().published) == ["step000147", "step000148", "step000149"]
    assert trainer.unpublished() == []


@pytest.mark.parametrize("nfs", [False, True])
def test_a_writer_that_waited_for_a_replaced_manifest_writes_to_the_new_one(tmp_path, nfs):
    """NFS gives a replaced file that a process has open another name."""
    for name in "abc":
        _line_of(tmp_path, "published", name)
    with locked_manifest(tmp_path) as manifest:
        waiting = threading.Thread(target=_line_of, args=(tmp_path, "published", "d"))
        waiting.start()
        waiting.join(0.2)
        manifest.append("removed", "b")
        if nfs:
            os.link(tmp_path / MANIFEST, tmp_path / ".nfs0000000000000001")
        manifest.compact()
        manifest.append("published", "e", digest="e", bytes=1, records=0)
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(30)
    assert list(parse_manifest((tmp_path / MANIFEST).read_bytes()).published) == ["a", "c", "e", "d"]
