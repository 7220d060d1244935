"""A hung engine, a dead or hung rank ends the run, soon, with a message that names it, and leaves no process. An engine
that dies: tests/rollout/test_faults.py; a server: tests/rollout/test_server.py."""

import os
import signal
import time

import pytest

from tests.end_to_end.conftest import Launch, config
from tools.dev.runs import still_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "who, blow, said",
    [
        pytest.param("engine", signal.SIGSTOP, "The vLLM engine hangs", id="engine-hung"),
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
        600,
    )
    pid = run.engine_pid() if who == "engine" else run.rank_pid(1)
    everyone = run.processes()
    assert pid in everyone and len(everyone) >= 5  # torchrun, two ranks, engine, verifier
    os.kill(pid, blow)
    began = time.monotonic()
    assert run.wait(60) != 0
    assert time.monotonic() - began < 60
    assert said.format(pid=pid) in run.text()
    assert not still_running(everyone, 5)
