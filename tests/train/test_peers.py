"""Ranks watch each other: who is lost is named, and nobody waits for the dead."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_rl.train.peers import EXIT_CODE

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
from pathlib import Path
from moe_rl.errors import EngineError
from moe_rl.train.peers import Peers
folder, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    with Peers(folder, rank, 2, timeout_seconds=2, grace_seconds=3) as peers:
        with peers.phase("train", 7):
            print("ready", flush=True)
            if how.startswith("fail"):
                time.sleep(1)
                raise EngineError("planted")
            if how == "broken by a failure":
                peer = folder / "rank1.json"
                while not (peer.exists() and '"phase": "failed"' in peer.read_text()):
                    time.sleep(0.01)
                raise RuntimeError("Connection closed by peer")
            if how == "broken collective":
                while True:
                    try:
                        time.sleep(0.05)
                        if not (folder / "rank1.json").exists():
                            continue
                        import json, os
                        os.kill(json.loads((folder / "rank1.json").read_text())["pid"], 0)
                    except ProcessLookupError:
                        raise RuntimeError("Connection closed by peer") from None
            time.sleep(1 if how == "finish" else 60)
except EngineError:
    if how == "fail slowly":
        time.sleep(1.5)  # engine and groups are closed before anyone prints the error
    raise
"""


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*hows):
        for rank, how in enumerate(hows):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(tmp_path / "ranks"), str(rank), how],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            started.append(process)
        for process in started:
            assert process.stdout.readline() == "ready\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process, within):
    began = time.monotonic()
    _, errors = process.communicate(timeout=within)
    assert time.monotonic() - began < within
    return process.returncode, errors


def test_a_killed_rank_is_named_with_its_phase(ranks, tmp_path):
    survivor, victim = ranks("sleep", "sleep")
    victim.kill()
    victim.wait()
    code, errors = end(survivor, 10)
    assert code == EXIT_CODE
    assert f"rank 1 (pid {victim.pid} on " in errors and "in phase train of step 7, died" in errors
    assert f"--resume {tmp_path}" in errors and len(errors.splitlines()) == 1


def test_a_stopped_rank_is_named_and_ended(ranks):
    survivor, victim = ranks("sleep", "sleep")
    os.kill(victim.pid, signal.SIGSTOP)
    code, errors = end(survivor, 15)
    assert code == EXIT_CODE and f"rank 1 (pid {victim.pid}" in errors and "no sign of life for 2 s" in errors
    assert victim.wait(5) == -signal.SIGKILL


def test_a_rank_that_explained_itself_is_not_explained_again(ranks):
    survivor, failed = ranks("sleep", "fail")
    assert end(failed, 10)[0] == 1
    code, errors = end(survivor, 10)
    assert (code, errors) == (EXIT_CODE, "")


@pytest.mark.parametrize("other", ["sleep", "broken by a failure"])
def test_a_rank_that_fails_is_heard_before_the_others_end(ranks, other):
    """torchrun ends all ranks when the first has ended: that one must be the one with something to say, also where its
    connections end before it does and a collective of another rank breaks off."""
    survivor, failed = ranks(other, "fail slowly")
    while failed.poll() is None:
        assert survivor.poll() is None
        time.sleep(0.05)
    assert failed.returncode == 1 and "planted" in failed.stderr.read()
    code, errors = end(survivor, 10)
    assert (code, errors) == (EXIT_CODE, "")


def test_a_collective_that_breaks_off_is_laid_to_the_dead_peer(ranks):
    survivor, victim = ranks("broken collective", "sleep")
    victim.kill()
    victim.wait()
    code, errors = end(survivor, 10)
    assert code == EXIT_CODE and "rank 1" in errors and "Traceback" not in errors


def test_a_rank_that_finished_is_not_missed(ranks, tmp_path):
    slower, done = ranks("sleep", "finish")
    assert end(done, 10)[0] == 0
    assert json.loads((tmp_path / "ranks" / "rank1.json").read_text())["phase"] == "finished"
    time.sleep(3)  # longer than the timeout
    assert slower.poll() is None


def test_sigterm_without_a_lost_peer_says_so(ranks):
    asked, other = ranks("sleep", "sleep")
    asked.send_signal(signal.SIGTERM)
    code, errors = end(asked, 10)
    assert code == EXIT_CODE and "rank 0 was ended by SIGTERM in phase train of step 7" in errors
