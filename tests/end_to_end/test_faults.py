"""A dead or hung engine, one of two, and a hung rank end the run, soon, with a message that names them, and leave no
process. One engine that dies: tests/rollout/test_faults.py; a server: tests/rollout/test_server.py."""

import os
import re
import signal
import time

import pytest

from tests.end_to_end.conftest import Launch, config
from tools.dev.runs import still_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "who, blow, said",
    [
        pytest.param("engine", signal.SIGSTOP, r"vLLM engine \d hangs \(pid {pid}, .*/engine\d.log", id="engine-hung"),
        pytest.param("engine", signal.SIGKILL, r"vLLM engine \d died \(pid {pid}, .*/engine\d.log", id="engine-dead"),
        pytest.param("rank", signal.SIGSTOP, r"rank 1 \(pid {pid}", id="rank-hung"),
    ],
)
def test_it_ends_and_names_the_dead(tmp_path, who, blow, said):
    more = ["run.steps=200", "run.peer_timeout_seconds=8", "rollout.engines=2"]
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *more))
    run.until(
        lambda: (
            run.folder
            and (run.folder / "metrics.jsonl").exists()
            and '"kind": "train"' in (run.folder / "metrics.jsonl").read_text()
        ),
        600,
    )
    pid = run.engine_pids()[-1] if who == "engine" else run.rank_pid(1)
    everyone = run.processes()
    assert pid in everyone and len(everyone) >= 6  # torchrun, two ranks, two engines, verifier
    os.kill(pid, blow)
    began = time.monotonic()
    assert run.wait(60) != 0
    assert time.monotonic() - began < 60
    assert re.search(said.format(pid=pid), run.text()), run.text()[-4000:]
    assert not still_running(everyone, 5)
