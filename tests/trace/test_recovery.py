"""Tests recovery after a dead writer: every complete record before the first damaged byte, and nothing else."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import ShardWriter, TraceStore, recover, recovery
from moe_rl.trace.shard import parse_header
from tests.support.refusals import refused, tells


@pytest.fixture
def left(tmp_path, spec, random_routes, decoded):
    """A copy of a dead writer's file, the end of each frame, and the frames' content."""
    lengths = (3, 2, 5)
    routes = [random_routes(spec, rows, rows) for rows in lengths]
    writer = ShardWriter(tmp_path, "s", spec, layer_group=2, token_block=2)
    (path,) = tmp_path.glob(".s.*.tmp")
    ends, refs = [path.stat().st_size], []
    for i, rows in enumerate(lengths):
        parent = refs[0] if i == 2 else None
        aux = {"logprobs": np.arange(rows, dtype=np.float32)}
        refs.append(writer.add(f"k{i}", routes[i], range(rows), decoded(rows), parent=parent, aux=aux))
        ends.append(path.stat().st_size)
    routes[2] = np.concatenate([routes[0], routes[2]])
    raw = path.read_bytes()
    writer.abandon()
    dead = tmp_path / ".s.01234567.tmp"
    dead.write_bytes(raw)
    return dead, ends, refs, routes


def _expect(store, recovered, name, refs, routes):
    assert [ref.key for ref in recovered.records] == [ref.key for ref in refs]
    for ref, old, one in zip(recovered.records, refs, routes, strict=True):
        # Digests stay the same: an old reference only needs the new shard's name.
        assert ref == replace(old, parts=(replace(old.parts[0], shard=name),))
        np.testing.assert_array_equal(store.read(ref).routes, one)
        assert len(store.aux(ref, "logprobs")) == store.info(ref).own_rows


def test_the_spec_of_an_unsealed_file_is_in_its_header(left, spec):
    dead, ends, *_ = left
    header, _ = parse_header(dead.read_bytes()[: ends[0]])
    assert (header.sealed, header.spec, header.layers) == (False, spec, (0, 1, 3))


def test_cut_at_any_byte(tmp_path, left):
    dead, ends, refs, routes = left
    raw, store = dead.read_bytes(), TraceStore(tmp_path)
    for size in [*range(len(raw), ends[0] - 1, -3), *ends]:
        dead.write_bytes(raw[:size])
        recovered = recover(dead, f"r{size}")
        complete = sum(end <= size for end in ends[1:])
        assert recovered.left == size - ends[complete] and bool(recovered.fault) == (size != ends[complete])
        _expect(store, recovered, f"r{size}", refs[:complete], routes[:complete])
        store.remove(f"r{size}")
    for size in range(0, ends[0], 7):
        dead.write_bytes(raw[:size])
        with refused(TraceError, fault="damaged file", file=dead):
            recover(dead, "none")
    assert store.shards() == [] and sorted(os.listdir(tmp_path)) == [dead.name, "manifest.jsonl"]


def test_damage_at_any_byte_ends_the_records_there(tmp_path, left):
    dead, ends, refs, routes = left
    raw, store = dead.read_bytes(), TraceStore(tmp_path)
    with open(dead, "r+b", buffering=0) as file:
        for at in [*range(0, ends[0], 5), *range(ends[0], len(raw), 2)]:
            os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << at % 8]), at)
            if at < ends[0]:
                with refused(TraceError, fault="damaged file", file=dead):
                    recover(dead, "none")
            else:
                recovered = recover(dead, f"r{at}")
                complete = sum(end <= at for end in ends[1:])
                assert recovered.left == len(raw) - ends[complete] and recovered.fault
                _expect(store, recovered, f"r{at}", refs[:complete], routes[:complete])
                store.remove(f"r{at}")
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert recover(dead, "whole").fault == ""


def test_a_file_of_a_living_writer_is_left_alone(tmp_path, spec, random_routes, decoded):
    writer = ShardWriter(tmp_path, "s", spec)
    ref = writer.add("k", random_routes(spec, 2), [1, 2], decoded(2))
    (path,) = tmp_path.glob(".s.*.tmp")
    with refused(TraceError, fault="unfinished", file=path):
        recover(path, "r")
    writer.publish()
    assert TraceStore(tmp_path).read(ref).key == "k" and TraceStore(tmp_path).shards() == ["s"]


def test_what_is_refused(tmp_path, left, write_shard, spec):
    dead, *_ = left
    write_shard(tmp_path, "taken", spec)
    with refused(TraceError, fault="exists", shard="taken"):
        recover(dead, "taken")
    with refused(TraceError, fault="absent file", file=tmp_path / ".none.01234567.tmp"):
        recover(tmp_path / ".none.01234567.tmp", "r")
    dead.unlink()
    os.mkfifo(dead)
    with refused(TraceError, fault="damaged file", file=dead) as caught:
        recover(dead, "r")
    tells(caught.value.__cause__, fault="no regular file")


def test_a_sealed_file_that_was_not_linked_is_recovered_whole(tmp_path, write_shard, spec, monkeypatch):
    shard = write_shard(tmp_path / "other", "s", spec)
    dead = tmp_path / ".s.01234567.tmp"
    dead.write_bytes(shard.path.read_bytes())
    recovered = recover(dead, "r")
    assert recovered.fault == "" and len(recovered.records) == 4
    assert [r.parts[0].digest for r in recovered.records] == [r.parts[0].digest for r in shard.refs]


def test_a_collector_may_take_the_file_once_it_is_recovered(tmp_path, left, monkeypatch):
    dead, _, refs, _ = left
    store = TraceStore(tmp_path)

    def collected(path, name):
        recover(path, name)
        assert store.collect_garbage() == [dead.name]

    monkeypatch.setattr(recovery, "recover", collected)
    assert recovery.recover_shard(tmp_path, "s", 0.0)
    assert store.records("s") == refs


def test_a_full_disk_while_recovering(tmp_path, left, monkeypatch):
    dead, _, refs, routes = left
    real, fired = os.pwrite, []

    def full(fd, data, at):
        if len(fired) == 2:
            raise OSError(28, "No space left on device")
        fired.append(at)
        return real(fd, data, at)

    with monkeypatch.context() as patch, refused(TraceError, os.strerror(errno.ENOSPC)):
        patch.setattr(os, "pwrite", full)
        recover(dead, "r")
    assert len(fired) == 2 and os.listdir(tmp_path) == [dead.name]
    _expect(TraceStore(tmp_path), recover(dead, "r"), "r", refs, routes)


def test_a_file_that_cannot_be_recovered_is_not_waited_for(tmp_path, left, monkeypatch):
    dead, *_ = left
    recover(dead, "s")  # its writer died just after it had published the shard
    monkeypatch.setattr(recovery, "_POLL_SECONDS", 3600.0)
    recovery.recover_shard(tmp_path, "s", 7200.0)
    dead.write_bytes(b"")
    assert not recovery.recover_shard(tmp_path, "s", 7200.0)
