"""Tests that a full disk is reported as one, with file, bytes and free space, and leaves no half-written file.

A limit on file sizes stands in for the full disk: the system itself refuses, in the middle of a write.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from moe_rl.disk import check_writable, reason, refusal, write_json, write_whole, writing
from moe_rl.errors import DiskError, TraceDiskError, TraceError
from moe_rl.report.log import RunLog
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.types import Provenance, Span
from tests.support.refusals import refused, tells

LIMIT = 300  # bytes
SAID = r"File too large, [\d,]+ bytes to write, [\d,]+ bytes free"


@contextmanager
def full():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def metrics(folder):
    log = RunLog(folder, total_steps=9, mode="r3")
    try:
        log._write('{"step": 1, "kind": "train", "some": "' + "x" * LIMIT + '"}\n')
    finally:
        log.close()


def ledger(folder):
    PromptLedger(folder / "prompts.jsonl").record(0, [0], ["prompt" * LIMIT], "digest")


def rollouts(folder):
    KeptRollouts(folder, TraceStore(folder)).save(1, RolloutBatch([], list(range(LIMIT)), {}, ""))


def shard(folder):
    spec = TraceSpec("model", 8, 2, "mm")
    with ShardWriter(folder, "step000001", spec) as writer:
        routes = np.zeros((LIMIT, 2, 2), np.uint8) + np.arange(2, dtype=np.uint8)
        writer.add("key", routes, range(LIMIT), [Span(LIMIT, 0, Provenance.DECODE)])


@pytest.mark.parametrize(
    "write, about",
    [
        (metrics, {"file": "metrics.jsonl"}),
        (ledger, {"file": "prompts.jsonl"}),
        (rollouts, {"file": "step000001.rollout"}),
        (shard, {"shard": "step000001", "folder": ""}),
        (lambda folder: write_whole(folder / "config.yaml", "x" * 999), {"file": "config.yaml"}),
    ],
)
def test_it_is_named_with_the_file_and_the_bytes(tmp_path, write, about):
    with full(), pytest.raises(DiskError) as raised:
        write(tmp_path)
    places = {name: str(tmp_path / value) if name != "shard" else value for name, value in about.items()}
    message = tells(raised.value, fault="EFBIG", **places)
    assert re.search(SAID, message.got)
    # A file that is read whole does not exist; a file of lines ends in a torn line, which a resume drops.
    assert {path.name for path in tmp_path.iterdir()} <= {"metrics.jsonl", "prompts.jsonl"}


def test_a_shard_that_a_disk_refused_is_a_fault_of_the_trace_too(tmp_path):
    with full(), pytest.raises(TraceError) as raised:
        shard(tmp_path)
    assert isinstance(raised.value, TraceDiskError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_ways_in_which_a_disk_is_full(tmp_path, number):
    told = refused(DiskError, "a thing", fault=errno.errorcode[number], got=(os.strerror(number), "bytes free"))
    with told, writing("a thing could not be written", tmp_path / "not/there/yet"):
        raise OSError(number, os.strerror(number))


def test_what_else_a_system_refuses_is_not_called_a_full_disk(tmp_path):
    text = refusal(OSError(errno.EIO, "Input/output error"), "a thing could not be written", tmp_path)
    assert text.fault == "" and "bytes free" not in text and "Input/output error" in text.got


def test_what_libraries_make_of_it_is_seen_through(tmp_path):
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with full(), pytest.raises((OSError, SafetensorError)) as raised:
        save_file({"a": torch.ones(LIMIT)}, tmp_path / "a")
    assert reason(raised.value, tmp_path).startswith("a limit to the size of files is reached (")
    with full(), open(tmp_path / "b", "wb", buffering=0) as stream, pytest.raises(RuntimeError) as raised:
        torch.save(torch.ones(1 << 12), stream)
    assert reason(raised.value, tmp_path).startswith("a limit to the size of files is reached (")


def test_a_file_that_could_not_be_replaced_is_as_it_was(tmp_path):
    file = tmp_path / "summary.json"
    write_whole(file, "before")
    with full(), pytest.raises(DiskError):
        write_whole(file, "x" * 999)
    assert file.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"a": 1})
    assert json.loads(os.read(reader, 99)) == {"a": 1} and pipe.is_fifo()
    os.close(reader)


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    fsync, replace, done = os.fsync, Path.replace, []
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (done.append("renamed"), replace(path, target)))
    write_whole(tmp_path / "file", "content")
    assert done == [str(tmp_path / "file.tmp"), "renamed", str(tmp_path)]


def test_what_the_system_takes_in_parts_is_written_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    write_whole(tmp_path / "file", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["absent/out.json", "folder"])
def test_a_file_of_an_option_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DiskError) as refusal_of_it:
        check_writable(tmp_path / name, "--json")
    tells(refusal_of_it.value, "--json", file=str(tmp_path / name))


def test_a_file_of_an_option_is_left_as_it_is_and_a_device_is_taken(tmp_path):
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json", "--json")
    check_writable(tmp_path / "new.json", "--json")
    check_writable(Path("/dev/null"), "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and (tmp_path / "old.json").read_text() == "old"
