"""Tests that `moe-rl train --ranks` exits with the status of its ranks, and that they say why they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.train.hangs import FILE, tell

ROOT = Path(__file__).parents[2]
# Starts two ranks of the program behind it, as `moe-rl train --ranks 2` does.
START = "import sys; from moe_rl.commands.launch import start; sys.exit(start(2, ['-c', sys.argv[1]], 5.0))"
RANK = "import os, signal, sys, time; from moe_rl.train.hangs import tell; rank = int(os.environ['RANK']);"


def started(program):
    # Unbuffered, Python writes a text and the end of its line apart, and the lines of two ranks mix.
    left_out = ("TORCHELASTIC", "PYTHONUNBUFFERED")
    given = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    command, pipes = (
        [sys.executable, "-c", START, RANK + program],
        {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )
    return subprocess.Popen(command, cwd=ROOT, env=given, text=True, **pipes)


@pytest.mark.parametrize(
    "program, status, said",
    [
        ("sys.exit(0)", 0, ""),
        ("tell('why', 4) if rank else time.sleep(60); os._exit(4)", 4, "why\n"),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 3, "was ended by SIGKILL\n"),
    ],
    ids=["done", "collapsed", "killed"],
)
def test_the_status_is_that_of_the_rank_that_ended_first_and_nothing_else_is_printed(program, status, said):
    process = started(program)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert errors.endswith(said) and len(errors.splitlines()) == bool(said)


def test_a_run_that_was_asked_to_stop_exits_with_its_own_status():
    waits = "signal.signal(signal.SIGTERM, lambda *_: (tell('stopped', 5), os._exit(5))); print('up', flush=True);"
    process = started(waits + "time.sleep(60)")
    for _ in range(2):
        assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (5, "stopped\nstopped\n")


def test_the_table_of_torchrun_shows_why_a_rank_ended(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv(FILE, str(file))
    tell("the reward is gone: got nothing", 2)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert "traceback : the reward is gone: got nothing\n" in ChildFailedError("train", {0: failure}).format_msg()
    assert json.loads(file.read_text())["message"]["errorCode"] == 2
