"""Tests that verify() finds every damage, and nothing in an intact shard."""

import os

import pytest

from moe_rl.errors import TraceError
from moe_rl.trace import TraceStore, audit, codec, frame, verify
from moe_rl.trace.audit import faults
from moe_rl.trace.inspection import select
from moe_rl.trace.manifest import MANIFEST
from tests.support.refusals import refused


def test_every_damaged_byte_is_found(tmp_path, spec, write_shard, monkeypatch):
    monkeypatch.setattr(frame, "COUNTS_FROM", 0)
    shard = write_shard(tmp_path, "s", spec, lengths=(2, 1, 2))
    raw = shard.path.read_bytes()
    assert verify(TraceStore(tmp_path), "s") == []
    with open(shard.path, "r+b", buffering=0) as file:
        for at in range(len(raw)):
            os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << at % 8]), at)
            problems = verify(TraceStore(tmp_path), "s")
            assert problems and "s" in problems[0], at
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert verify(TraceStore(tmp_path), "s") == []


def test_counts_that_are_not_those_of_the_routes(tmp_path, spec, write_shard, monkeypatch):
    monkeypatch.setattr(frame, "COUNTS_FROM", 0)
    with monkeypatch.context() as patch:
        real = codec.count_experts
        patch.setattr(codec, "count_experts", lambda routes, experts: real(routes, experts) + 1)
        write_shard(tmp_path, "s", spec, lengths=(3,))
    (problem,) = verify(TraceStore(tmp_path), "s")
    assert "shard s, record step1/prompt0:0: the stored expert counts" in problem


def test_a_shard_without_a_line(tmp_path, spec, write_shard):
    write_shard(tmp_path, "s", spec)
    (tmp_path / MANIFEST).unlink()
    assert verify(TraceStore(tmp_path), "s") == ["shard s is not in the manifest"]
    assert len(verify(TraceStore(tmp_path), "none")) == 2
    with refused(TraceError, field="shard name"):
        verify(TraceStore(tmp_path), "../s")


@pytest.mark.parametrize("at", ["verify", "_not_routes"])
def test_a_shard_that_the_run_removes_meanwhile_has_no_fault(tmp_path, spec, write_shard, monkeypatch, at):
    for name in ("a", "b", "c"):
        write_shard(tmp_path, name, spec)
    selection, real = select(str(tmp_path)), getattr(audit, at)

    def removing(store, shard):
        if shard == "a":
            TraceStore(tmp_path).remove("a", "b")
            write_shard(tmp_path, "d", spec)
        return real(store, shard)

    monkeypatch.setattr(audit, at, removing)
    assert faults(selection) == []
    assert faults(select(str(tmp_path))) == []
    (tmp_path / "c.safetensors").unlink()
    (lost,) = faults(select(str(tmp_path)))
    assert "shard c was published and is not there" in lost


def test_a_shard_that_is_lost_while_it_is_read_is_a_fault(tmp_path, spec, write_shard, monkeypatch):
    write_shard(tmp_path, "a", spec)
    selection, real = select(str(tmp_path)), audit.verify

    def losing(store, shard):
        (tmp_path / "a.safetensors").unlink()
        return real(store, shard)

    monkeypatch.setattr(audit, "verify", losing)
    (lost,) = faults(selection)
    assert "shard a" in lost
