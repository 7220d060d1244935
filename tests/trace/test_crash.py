"""Tests durable publishing: after kill -9 or a full or failing disk a shard is complete or absent, others unchanged."""

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
from moe_rl.trace import ShardWriter, TraceStore, recover
from moe_rl.trace import manifest as manifest_module
from moe_rl.trace.audit import faults
from moe_rl.trace.inspection import select
from moe_rl.trace.manifest import MANIFEST
from tests.support.refusals import refused, tells

_CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "unlink", "close")

# Publishes one shard and kills itself, without a chance to clean up, just before file system call number argv[2].
_VICTIM = f"""
import os, signal, sys
from pathlib import Path
import numpy as np
from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.types import Provenance, Span

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

spec = TraceSpec("tiny-0123456789abcdef", num_experts=32, top_k=4, layer_map="mmdm")
scores = [np.random.default_rng(i).random((n, 3, 32)) for i, n in enumerate((3, 2, 1))]
for name in {_CALLS!r}:
    setattr(os, name, deadly(name, getattr(os, name)))
with ShardWriter(Path(sys.argv[1]), "s", spec, layer_group=2, token_block=2) as writer:
    for i, score in enumerate(scores):
        routes = np.sort(np.argsort(score, axis=-1)[..., :4]).astype(np.uint16)
        spans = [Span(len(routes), 7, Provenance.DECODE)]
        writer.add(f"step1/prompt{{i}}:0", routes, np.arange(10 * i, 10 * i + len(routes)), spans)
"""


def _entries(root):
    return sorted(os.listdir(root))


@pytest.fixture
def write_plain(random_routes, decoded):
    """Write the victim's shard to its last byte; return path, references and routes."""

    def write(root, name, spec):
        refs, routes = [], [random_routes(spec, n, i) for i, n in enumerate((3, 2, 1))]
        with ShardWriter(root, name, spec, layer_group=2, token_block=2) as writer:
            for i, one in enumerate(routes):
                refs.append(writer.add(f"step1/prompt{i}:0", one, range(10 * i, 10 * i + len(one)), decoded(len(one))))
        return root / f"{name}.safetensors", refs, routes

    return write


def _assert_reads(store, refs, routes):
    for ref, one in zip(refs, routes, strict=True):
        assert (store.read(ref).routes == one).all()


def test_kill_9_at_every_file_system_call(tmp_path, spec, write_shard, write_plain, assert_holds):
    path, refs, routes = write_plain(tmp_path / "control", "s", spec)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    seen, recovered = {}, set()
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
            assert (root / "s.safetensors").read_bytes() == path.read_bytes()
            _assert_reads(store, refs, routes)
            assert "s" in store.manifest().published  # the line comes before the shard
            with refused(TraceError, fault="exists", shard="s"):
                ShardWriter(root, "s", spec)
        else:
            with refused(TraceError, fault="absent shard", shard="s"):
                store.read(refs[0])
        leftovers = [name for name in _entries(root) if name.startswith(".")]
        if leftovers and not published and (root / leftovers[0]).stat().st_size:
            saved = recover(root / leftovers[0], "saved")
            _assert_reads(store, saved.records, routes[: len(saved.records)])
            recovered.add(len(saved.records))
            store.remove("saved")
        assert store.collect_garbage() == leftovers
        assert _entries(root) == [MANIFEST, "old.safetensors", *(["s.safetensors"] if published else [])]
        if not published:
            write_plain(root, "s", spec)
            _assert_reads(store, refs, routes)
        assert set(store.manifest().published) == {"old", "s"} and store.manifest().damaged == ()
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL and child.stdout.startswith("killed before"), child.stderr
        seen.setdefault(child.stdout.split()[-1], []).append((published, bool(leftovers)))
    assert child.returncode == 0 and published and not leftovers
    # The kill happened before every kind of call, both outcomes occurred, and one kill fell between link and unlink.
    assert set(seen) == set(_CALLS)
    assert seen["link"] == [(False, True)] and seen["unlink"] == [(True, True)]
    assert all(not published for published, _ in seen["pwrite"]) and len(seen["pwrite"]) == 7
    assert recovered == {0, 1, 2, 3}


_COMPACTING = ("open", "pwrite", "fsync", "replace", "unlink", "dup2", "close")


# The child calls Python and the file system alone, and ends with _exit: no lock of another thread is asked for.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_kill_9_at_every_call_of_a_removal_that_compacts(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    monkeypatch.setattr(manifest_module, "_SPARE_LINES", -1000)  # every removal replaces the manifest
    seen = set()
    for left in range(100):
        root = tmp_path / str(left)
        shards = {name: write_shard(root, name, spec, seed=i) for i, name in enumerate("abc")}
        child = os.fork()
        if child == 0:
            calls = iter(range(left))

            def deadly(real, calls=calls):
                def call(*args, **kwargs):
                    if next(calls, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return call

            for name in _COMPACTING:
                setattr(os, name, deadly(getattr(os, name)))
            TraceStore(root).remove("b")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        store = TraceStore(root)
        for name in store.shards():
            assert_holds(store, shards[name])
        manifest = store.manifest()
        assert manifest.damaged == () and {"a", "c"} <= set(manifest.published) <= {"a", "b", "c"}
        assert store.unpublished() == [] and {"a", "c"} <= set(store.shards())
        leftovers = [name for name in _entries(root) if name.startswith(".")]
        assert store.collect_garbage() == leftovers and len(leftovers) <= 1
        write_shard(root, "d", spec)
        assert list(store.manifest().published)[-1] == "d"
        seen.add((tuple(store.shards()), bool(leftovers), len((root / MANIFEST).read_bytes().splitlines())))
        if "b" in store.manifest().published:
            store.remove("b")  # again: the first removal may have left its line alone
        assert faults(select(str(root))) == []
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert status == 0 and left > 10
    # Killed before the shard was removed; with a file that had not taken the name; and after it had.
    all_shards, three = ("a", "b", "c", "d"), ("a", "c", "d")
    assert {(all_shards, False, 4), (three, True, 5), (three, False, 3)} <= seen


def test_a_full_disk_leaves_the_manifest_as_it_was(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    """The line of the removed shard still fits, its compacted manifest does not."""
    monkeypatch.setattr(manifest_module, "_SPARE_LINES", -1000)
    shards = [write_shard(tmp_path, name, spec) for name in "abc"]

    def full(fd, data, at, real=os.pwrite):
        if at == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    store = TraceStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        store.remove("b")
    assert _entries(tmp_path) == ["a.safetensors", "c.safetensors", MANIFEST]
    assert len((tmp_path / MANIFEST).read_bytes().splitlines()) == 4
    assert list(store.manifest().published) == ["a", "c"]
    assert_holds(store, shards[2])


def test_full_disk_at_every_size(tmp_path, spec, write_shard, write_plain, assert_holds):
    old = write_shard(tmp_path, "old", spec)
    size = write_plain(tmp_path / "control", "s", spec)[0].stat().st_size
    manifest = (tmp_path / MANIFEST).read_bytes()
    assert len(manifest) + 200 < size  # so that the limit strikes in the shard
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = 0
    for limit in [*range(0, size, 13), size - 1]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            write_plain(tmp_path, "s", spec)
        except TraceError as error:
            refused += 1
            message = error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tells(message, shard="s", folder=tmp_path, got=("File too large",))
        assert _entries(tmp_path) == ["control", MANIFEST, "old.safetensors"]
        assert (tmp_path / MANIFEST).read_bytes() == manifest
    assert refused == len([*range(0, size, 13)]) + 1
    assert_holds(TraceStore(tmp_path), old)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        _, refs, routes = write_plain(tmp_path, "s", spec)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _assert_reads(TraceStore(tmp_path), refs, routes)


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "link", "unlink"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failing_calls_leave_nothing(tmp_path, spec, random_routes, decoded, monkeypatch, call, code):
    with ShardWriter(tmp_path, "old", spec) as writer:
        old = writer.add("k", random_routes(spec, 2), [1, 2], decoded(2))
    manifest = (tmp_path / MANIFEST).read_bytes()
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

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                writer = ShardWriter(tmp_path, f"s{number}", spec)
                writer.add("k", random_routes(spec, 2), [1, 2], decoded(2))
                writer.publish()
            except TraceError as error:
                assert fired
                tells(error, shard=f"s{number}", got=(os.strerror(code),))
                assert _entries(tmp_path) == [MANIFEST, "old.safetensors"]
                assert (tmp_path / MANIFEST).read_bytes() == manifest
                assert writer.closed
                with refused(TraceError, fault="closed"):
                    writer.publish()
            else:
                assert not fired
        number += 1
    assert number - 1 == {"pwrite": 5, "ftruncate": 1, "fsync": 3, "link": 1, "unlink": 1}[call]
    assert _entries(tmp_path) == [MANIFEST, "old.safetensors", f"s{number - 1}.safetensors"]
    assert TraceStore(tmp_path).read(old).key == "k"


def test_a_shard_is_removed_from_a_full_disk(tmp_path, spec, write_shard, assert_holds, monkeypatch):
    shard = write_shard(tmp_path, "s", spec)
    manifest, fired = (tmp_path / MANIFEST).read_bytes(), []

    def full(fd, data, at):
        fired.append(at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = TraceStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        store.remove("s")
    assert fired and store.shards() == [] and (tmp_path / MANIFEST).read_bytes() == manifest
    # The stale manifest line does no harm: the name can be used.
    assert_holds(store, write_shard(tmp_path, "s", spec, seed=3))
    with refused(TraceError, fault="absent record", shard="s"):
        store.read(shard.refs[0])


def test_garbage_of_living_writers_and_foreign_files_stay(tmp_path, spec, random_routes, decoded, write_shard):
    store = TraceStore(tmp_path)
    assert store.collect_garbage() == []
    living = ShardWriter(tmp_path, "living", spec)
    ref = living.add("k", random_routes(spec, 2), [1, 2], decoded(2))
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
    assert _entries(tmp_path) == [
        ".folder.01234567.tmp",
        "living.safetensors",
        MANIFEST,
        "notes.tmp",
        "s.safetensors",
    ]


def test_a_collector_that_takes_the_file_of_a_starting_writer(tmp_path, spec, random_routes, decoded, monkeypatch):
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
    ref = writer.add("k", random_routes(spec, 1), [1], decoded(1))
    writer.publish()
    assert TraceStore(tmp_path).read(ref).key == "k"


def test_a_store_that_cannot_be_a_directory(tmp_path, spec):
    (tmp_path / "file").write_text("")
    with refused(TraceError, shard="s", folder=tmp_path / "file" / "store"):
        ShardWriter(tmp_path / "file" / "store", "s", spec)
