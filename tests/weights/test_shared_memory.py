"""Tests shared memory: the sampler reads what was written, and no memory is left whichever process is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from moe_rl.errors import WeightSyncError
from moe_rl.weights.digest import info_of
from moe_rl.weights.reader import placed
from moe_rl.weights.shared_memory import SegmentWriter, read_segments
from moe_rl.weights.update import decode, encode
from tests.support.forks import FORKS
from tests.weights.sending import by_memory
from tests.weights.test_digest import some_tensors

SIZE = 32 << 20


def trainer(pipe):
    """Put tensors into shared memory, report where, and stay alive."""
    with by_memory({"a": torch.full((SIZE // 4,), 7.0), "b": torch.ones(5)}, version=1)[0] as update:
        pipe.send_bytes(encode(update))
        time.sleep(600)


def sampler(pipe):
    """Map the reported segments, report what was read, and stay alive."""
    tensors = dict(placed(decode(pipe.recv_bytes())))
    pipe.send_bytes(str(float(tensors["a"].sum())).encode())
    time.sleep(600)


def test_tensors_come_back_as_they_were_and_a_segment_can_be_filled_again():
    writer = SegmentWriter()
    for tensors in (some_tensors(), {"x": torch.arange(1000.0), "empty": torch.zeros(0, 4), "y": torch.ones(3)}):
        writer.clear()
        infos = [info_of(name, tensor) for name, tensor in tensors.items()]
        for tensor in tensors.values():
            writer.append(tensor)
        read = dict(read_segments([writer.segment()], infos))
        assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
        read["x" if "x" in read else "b.weight"].zero_()  # a sampler that writes does so in memory of its own
        again = dict(read_segments([writer.segment()], infos))
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_writer_that_goes_takes_its_segment_along():
    before = segments(os.getpid())
    writer = SegmentWriter()
    writer.append(torch.ones(3))
    segment = writer.segment()
    assert len(segments(os.getpid())) == len(before) + 1
    del writer
    assert segments(os.getpid()) == before
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        list(read_segments([segment], [info_of("a", torch.ones(3))]))


def segments(pid) -> list[str]:
    """Return the descriptors of a process's segments, [] for a process that is gone."""
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if os.readlink(link).startswith("/memfd:moe_rl-weights"):
                found.append(link.name)
        except FileNotFoundError:
            continue
    return found


def mapped(pid) -> bool:
    return "memfd:moe_rl-weights" in Path(f"/proc/{pid}/maps").read_text()


def start(role):
    """Start a process in this role; return it and a pipe to it."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=role, args=(theirs,), daemon=True)
    process.start()
    return process, ours


@pytest.mark.parametrize("first", ["trainer", "sampler"])
def test_nothing_is_left_in_memory_when_processes_are_killed(first):
    before = set(os.listdir("/dev/shm"))
    (one, to_trainer), (other, to_sampler) = start(trainer), start(sampler)
    processes = {"trainer": one, "sampler": other}
    try:
        update = to_trainer.recv_bytes()
        to_sampler.send_bytes(update)
        assert float(to_sampler.recv_bytes()) == 7.0 * (SIZE // 4)
        pids = {name: process.pid for name, process in processes.items()}
        # Witness: the memory exists in both processes, and under no name.
        assert len(segments(pids["trainer"])) == 2 and mapped(pids["sampler"])
        assert not {name for name in os.listdir("/dev/shm") if "moe_rl" in name} - before
        kill(processes[first])
        if first == "trainer":
            assert mapped(pids["sampler"]), "what a sampler reads stays until it lets go"
            with pytest.raises(WeightSyncError, match="cannot be mapped.*expected a running trainer"):
                dict(placed(decode(update)))
        else:
            assert placed(decode(update)) and len(segments(pids["trainer"])) == 2
    finally:
        for process in processes.values():
            kill(process)
    assert not {name for name in os.listdir("/dev/shm") if "moe_rl" in name} - before
    assert not any(segments(pid.name) for pid in Path("/proc").glob("[0-9]*") if pid.name in map(str, pids.values()))


def kill(process) -> None:
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
