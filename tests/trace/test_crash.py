"""Durable publish: kill -9, a full or failing disk leave the complete shard or none, earlier shards as they were."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.errors import TraceError
from moe_rl.trace.store import ShardWriter, TraceStore

_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "unlink", "close")

# Publishes one shard and kills itself, without a chance to clean up, just before file system call number argv[2].
_VICTIM = f"""
import os, signal, sys
from pathlib import Path
import numpy as np
from moe_rl.trace.store import ShardWriter, TraceSpec

left = int(sys.argv[2])
def deadly(name, real):
    def call(*args, **kwargs):
        global left
        if left == 0:
            print("killed before", name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call

spec = TraceSpec("tiny-0123456789abcdef", num_experts=32, top_k=4, moe_layers=(0, 1, 3))
scores = [np.random.default_rng(i).random((n, 3, 32)) for i, n in enumerate((3, 2, 0, 3))]
for name in {_CALLS!r}:
    setattr(os, name, deadly(name, getattr(os, name)))
with ShardWriter(Path(sys.argv[1]), "s", spec) as writer:
    for i, score in enumerate(scores):
        routes = np.argsort(score, axis=-1)[..., :4].astype(np.uint16)
        writer.add(f"step1/prompt{{i}}:0", routes, list(range(10 * i, 10 * i + len(routes))), weight_version=7)
"""


def _entries(root):
    return sorted(os.listdir(root))


def test_kill_9_at_every_file_system_call(tmp_path, spec, write_shard, assert_holds):
    expected = write_shard(tmp_path / "control", "s", spec)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    seen = {}
    for left in range(100):
        root = tmp_path / str(left)
        old = write_shard(root, "old", spec, seed=20)
        child = subprocess.run(
            [sys.executable, "-c", _VICTIM, str(root), str(left)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        store = TraceStore(root)
        assert_holds(store, old)
        published = "s" in store.shards()
        if published:
            assert_holds(store, expected)
            with pytest.raises(TraceError, match="exists already"):
                ShardWriter(root, "s", spec)
        else:
            with pytest.raises(TraceError, match="cannot be opened"):
                store.read(expected.refs[0])
        leftovers = [name for name in _entries(root) if name.startswith(".")]
        assert store.collect_garbage() == leftovers
        assert _entries(root) == (["old.safetensors", "s.safetensors"] if published else ["old.safetensors"])
        if not published:
            assert_holds(store, write_shard(root, "s", spec))
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL and child.stdout.startswith("killed before"), child.stderr
        seen.setdefault(child.stdout.split()[-1], []).append((published, bool(leftovers)))
    assert child.returncode == 0 and published and not leftovers
    # The kill fired before every kind of call, and both outcomes occurred, also the one between link and unlink.
    assert set(seen) == set(_CALLS)
    assert seen["link"] == [(False, True)] and seen["unlink"] == [(True, True)]
    assert all(not published for published, _ in seen["pwrite"]) and len(seen["pwrite"]) >= 5


def test_full_disk_at_every_size(tmp_path, spec, write_shard, assert_holds):
    old = write_shard(tmp_path, "old", spec)
    size = write_shard(tmp_path / "control", "s", spec).path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = 0
    for limit in [*range(0, size, 13), size - 1]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            write_shard(tmp_path, "s", spec)
        except TraceError as error:
            refused += 1
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "nothing of it was published" in message and "shard s in" in message and "File too large" in message
        assert _entries(tmp_path) == ["control", "old.safetensors"]
    assert refused == len([*range(0, size, 13)]) + 1
    assert_holds(TraceStore(tmp_path), old)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        exactly = write_shard(tmp_path, "s", spec)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_holds(TraceStore(tmp_path), exactly)


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "link", "unlink"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failing_calls_leave_nothing(tmp_path, spec, write_shard, random_routes, monkeypatch, call, code):
    real = getattr(os, call)
    number, fired = 0, True
    while fired:
        fired, left = [], number

        def failing(*args, fired=fired, **kwargs):
            nonlocal left
            left -= 1
            if left == -1:
                fired.append(call)
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        writer = ShardWriter(tmp_path, f"s{number}", spec)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                writer.add("k", random_routes(spec, 2), [1, 2], 0)
                writer.publish()
            except TraceError as error:
                assert fired and os.strerror(code) in str(error) and f"shard s{number}" in str(error)
                assert _entries(tmp_path) == []
                with pytest.raises(TraceError, match="shard is closed"):
                    writer.publish()
            else:
                assert not fired
        number += 1
    assert number - 1 == {"pwrite": 3, "ftruncate": 1, "fsync": 2, "link": 1, "unlink": 1}[call]
    assert _entries(tmp_path) == [f"s{number - 1}.safetensors"]


def test_garbage_of_living_writers_and_foreign_files_stay(tmp_path, spec, random_routes, write_shard):
    store = TraceStore(tmp_path)
    assert store.collect_garbage() == []
    living = ShardWriter(tmp_path, "living", spec)
    ref = living.add("k", random_routes(spec, 2), [1, 2], 0)
    shard = write_shard(tmp_path, "s", spec)
    dead = tmp_path / ".dead.01234567.tmp"
    dead.write_bytes(shard.path.read_bytes())
    (tmp_path / "notes.tmp").write_text("not ours")
    (tmp_path / ".folder.01234567.tmp").mkdir()
    assert store.shards() == ["s"]
    assert store.collect_garbage() == [dead.name]
    assert store.collect_garbage() == []
    living.publish()
    assert store.read(ref).key == "k"
    assert _entries(tmp_path) == [".folder.01234567.tmp", "living.safetensors", "notes.tmp", "s.safetensors"]


def test_a_collector_that_takes_the_file_of_a_starting_writer(tmp_path, spec, random_routes, monkeypatch):
    real, taken = fcntl.flock, []

    def late(fd, how):
        if not taken:
            path = next(tmp_path.glob(".s.*.tmp"))
            taken.append(path)
            path.unlink()
        return real(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        writer = ShardWriter(tmp_path, "s", spec)
    assert len(taken) == 1
    ref = writer.add("k", random_routes(spec, 1), [1], 0)
    writer.publish()
    assert TraceStore(tmp_path).read(ref).key == "k"


def test_a_store_that_cannot_be_a_directory(tmp_path, spec):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="shard s in .*file/store"):
        ShardWriter(tmp_path / "file" / "store", "s", spec)
