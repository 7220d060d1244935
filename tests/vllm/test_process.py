"""Tests vLLM's temporary folder: locked while its process lives, removed by the next process after a kill."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_rl.vllm.process import Scratch

HOLD = "import sys; from moe_rl.vllm.process import Scratch; print(Scratch().name, flush=True); sys.stdin.read()"


def test_the_next_one_removes_what_a_killed_process_left_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        for _ in range(2)
    ]
    killed, living = (Path(holder.stdout.readline().strip()) for holder in holders)
    holders[0].kill()
    assert holders[0].wait() == -signal.SIGKILL and killed.is_dir()
    mine = Scratch()
    assert not killed.exists() and living.is_dir() and Path(mine.name).is_dir()
    (Path(mine.name) / "file").write_text("x")
    mine.cleanup()
    mine.cleanup()
    holders[1].communicate("")
    assert [path for path in tmp_path.iterdir() if path != living] == []


def test_memory_that_workers_shared_goes_with_it(tmp_path, monkeypatch):
    """vLLM names shared memory after the file by which its workers met. Another engine's memory stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, other = (f"vllm_dist_{secrets.token_hex(16)}" for _ in range(2))
    shared = [Path("/dev/shm") / f"{name}-tp:0-[0-1]-cpushm_0" for name in (mine, other)]
    scratch = Scratch()
    try:
        for path in (Path(scratch.name) / mine, *shared):
            path.write_text("x")
        scratch.cleanup()
        assert [path.exists() for path in shared] == [False, True]
    finally:
        for path in shared:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("child", [True, False])
def test_a_child_does_not_die_of_what_it_prints_on_a_full_disk(tmp_path, child):
    """An engine that cannot write its log must still report the full disk to the trainer."""
    code = (
        "import resource, sys, traceback; from moe_rl.vllm.process import channel_to_parent\n"
        f"{'channel = channel_to_parent(None)' if child else ''}\n"
        "print('before', flush=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc(); print('x' * 99)\n"
        "sys.exit(7)\n"
    )
    ours, theirs = socket.socketpair()
    with (tmp_path / "log").open("wb") as log, ours, theirs:
        command = [sys.executable, "-u", "-c", code, str(theirs.fileno()), str(os.getpid())]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=60, pass_fds=[theirs.fileno()])
    assert (done.returncode == 7) == child
    text = (tmp_path / "log").read_text()
    assert text.startswith("before\n") and len(text) <= 20  # the witness: the limit struck
