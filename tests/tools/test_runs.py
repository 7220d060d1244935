"""Tests that what starts ranks takes them with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.dev.runs import still_running

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(1000)
"""
STARTS = """
import sys, time
from pathlib import Path
from tools.dev.runs import Launch
launch = Launch(Path(sys.argv[1]), sys.argv[1], script=sys.argv[2])
print(launch.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_ranks_end_with_what_started_them(tmp_path, number):
    """As benchmarks/pipeline.py does, whose runs are in sessions of their own."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-c", STARTS, str(tmp_path), str(tmp_path / "rank.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        mine = [int(benchmark.stdout.readline())]
        deadline, files = time.monotonic() + 120, [tmp_path / f"rank-{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, (tmp_path / "output-0").read_text()
            time.sleep(0.05)
        mine += [int(file.read_text()) for file in files]
        assert len(set(mine)) == 3 and still_running(mine, within=0) == mine
        os.kill(benchmark.pid, number)
    assert still_running(mine, within=60) == []
