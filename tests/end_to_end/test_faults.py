"""A dead or hung engine or rank ends the run, soon, with a message that names it, and leaves no process."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Launch, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def engine_pid(run):
    for pid in run.processes():
        try:
            if b"moe_rl.rollout.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    return None


def victim_of(run, who):
    return engine_pid(run) if who == "engine" else run.rank_pid(1)


@pytest.mark.parametrize(
    "who, blow, said",
    [
        pytest.param("engine", signal.SIGKILL, "The vLLM engine died", id="engine-killed"),
        pytest.param("engine", signal.SIGSTOP, "The vLLM engine hangs", id="engine-hung"),
        pytest.param("rank", signal.SIGKILL, "rank 1 (pid {pid}", id="rank-killed"),
        pytest.param("rank", signal.SIGSTOP, "rank 1 (pid {pid}", id="rank-hung"),
    ],
)
def test_it_ends_and_names_the_dead(tmp_path, who, blow, said):
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", "run.steps=200", "run.peer_timeout_seconds=8"))
    run.until(
        lambda: (
            run.folder
            and (run.folder / "metrics.jsonl").exists()
            and '"kind": "train"' in (run.folder / "metrics.jsonl").read_text()
        ),
        200,
    )
    pid = victim_of(run, who)
    everyone = run.processes()
    assert pid in everyone and len(everyone) >= 5  # torchrun, two ranks, engine, verifier
    os.kill(pid, blow)
    began = time.monotonic()
    assert run.wait(60) != 0
    assert time.monotonic() - began < 60
    assert said.format(pid=pid) in run.text()
    time.sleep(1)
    left = [
        p
        for p in everyone
        if Path(f"/proc/{p}").exists() and Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ]
    assert not left
