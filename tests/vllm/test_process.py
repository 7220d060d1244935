"""The temporary folder of vLLM: its own while its process lives, removed by the next one when that was killed."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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
    """vLLM names it after the file by which its workers met. Another engine's stays."""
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
