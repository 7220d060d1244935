"""Ranks watch each other: who is lost is named, and nobody waits for the dead."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_rl.train.peers import EXIT_CODE, STOPPED

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
from pathlib import Path
from moe_rl.errors import EngineError
from moe_rl.train.peers import Peers, StopRequested
folder, rank, how, count, apart = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
count, apart = int(count), apart == "True"
if apart:  # each on a host of its own
    import socket
    socket.gethostname = lambda: f"host{rank}"
near = range(rank, rank + 1) if apart else None
grace = 60 if how == "patient" else 3
try:
    with Peers(folder, rank, count, timeout_seconds=2, grace_seconds=grace, near=near) as peers:
        peers.save_done(5, 0.1)
        with peers.phase("train", 7, seconds=60 if how == "long step" else 0):
            print("ready", flush=True)
            if how.startswith("fail"):
                time.sleep(1)
                if how == "fail on a full disk":
                    import errno
                    def no_space(*_):
                        raise OSError(errno.ENOSPC, "No space left on device")
                    Path.write_text = no_space
                raise EngineError("planted")
            if how == "broken by a failure":
                peer = folder / "rank1.json"
                while not (peer.exists() and '"phase": "failed"' in peer.read_text()):
                    time.sleep(0.01)
                raise RuntimeError("Connection closed by peer")
            if how == "broken off":
                time.sleep(1)
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
            if how == "sampling":
                try:
                    with peers.to_be_left():
                        time.sleep(60)
                except StopRequested:
                    print("left", flush=True)
            if how == "in a collective":
                import ctypes
                ctypes.CDLL(None).sleep(60)  # no handler runs before it returns
            time.sleep(1 if how == "finish" else 60)
except EngineError:
    if how == "fail slowly":
        time.sleep(1.5)  # engine and groups are closed before anyone prints the error
    raise
"""


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*hows, apart=False):
        for rank, how in enumerate(hows):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(tmp_path / "ranks"), str(rank), how, str(len(hows)), str(apart)],
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


def test_a_full_disk_does_not_take_the_place_of_what_a_rank_has_to_say(ranks):
    survivor, failed = ranks("sleep", "fail on a full disk")
    code, errors = end(failed, 10)
    assert code == 1 and errors.splitlines()[-1].endswith("EngineError: planted") and "No space left" not in errors
    assert f"rank 1 (pid {failed.pid} on " in end(survivor, 10)[1]  # its last beat did not arrive


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


def test_a_peer_that_is_still_dying_when_the_collective_breaks_off_is_named(ranks):
    survivor, dying = ranks("broken off", "sleep")
    time.sleep(2)
    assert survivor.poll() is None  # it has had its error for a second
    dying.kill()
    code, errors = end(survivor, 10)
    assert code == EXIT_CODE and f"rank 1 (pid {dying.pid} on " in errors and "died" in errors


def test_ranks_on_other_nodes_give_the_same_reason(ranks):
    """Rank 1 hears rank 0 only; its collective broke off, and it waits to be told why."""
    first, told, victim, other = ranks("sleep", "broken off", "sleep", "sleep", apart=True)
    for process in (victim, other):
        process.kill()
        process.wait()
    said = f"rank 2 (pid {victim.pid} on host2), in phase train of step 7, gave no sign of life for 2 s"
    said += ", nor lately rank 3 on host3"
    for process in (first, told):
        code, errors = end(process, 15)
        assert code == EXIT_CODE and said in errors and "Traceback" not in errors


def test_a_rank_that_finished_is_not_missed(ranks, tmp_path):
    slower, done = ranks("sleep", "finish")
    assert end(done, 10)[0] == 0
    assert json.loads((tmp_path / "ranks" / "rank1.json").read_text())["phase"] == "finished"
    time.sleep(3)  # longer than the timeout
    assert slower.poll() is None


def test_sigint_ends_it_there_and_then(ranks):
    asked, other = ranks("sleep", "sleep")
    asked.send_signal(signal.SIGINT)
    code, errors = end(asked, 10)
    assert code == EXIT_CODE and "rank 0, in phase train of step 7, was ended by SIGINT" in errors
    assert "the checkpoint after step 5 stands, steps 6 to 7 are done again" in errors


def test_sigterm_makes_a_rank_leave_its_sampling_and_is_told_to_the_others(ranks, tmp_path):
    other, sampler = ranks("in a collective", "sampling")
    other.send_signal(signal.SIGTERM)
    assert sampler.stdout.readline() == "left\n"
    # nobody saves here: both have ended when the time is up, and say what stands
    for process, who in ((sampler, 1), (other, 0)):
        code, errors = end(process, 15)
        assert code == STOPPED and f"rank {who}, in phase train of step 7, was asked to stop and did not" in errors
        assert "checkpoint.grace_seconds = 3; the checkpoint after step 5 stands" in errors


def test_what_does_not_fit_into_the_grace_is_not_begun(ranks):
    asked, other = ranks("long step", "sleep")
    asked.send_signal(signal.SIGTERM)
    code, errors = end(asked, 10)
    assert code == STOPPED
    assert "to come to a stop and save would take about" in errors and "steps 6 to 7 are done again" in errors
    # it is not taken for dead: the other hears that they were asked, and ends in its own time
    code, errors = end(other, 15)
    assert code == STOPPED and "did not within checkpoint.grace_seconds" in errors


def test_one_request_may_come_twice(ranks):
    asked, other = ranks("sleep", "sleep")
    asked.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    asked.send_signal(signal.SIGTERM)  # as torchrun does, after a scheduler that signalled both
    time.sleep(0.5)
    assert asked.poll() is None
    assert "was asked to stop and did not" in end(asked, 15)[1]


def test_a_second_request_ends_it(ranks):
    asked, other = ranks("patient", "patient")
    asked.send_signal(signal.SIGTERM)
    time.sleep(4)
    assert asked.poll() is None
    asked.send_signal(signal.SIGTERM)
    code, errors = end(asked, 10)
    assert code == STOPPED and "was asked to stop a second time" in errors


def test_a_rank_whose_torchrun_died_ends(tmp_path):
    """It would go on alone, beside the run that takes its folder over."""
    script = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]); sys.stdin.read()"
    command = [sys.executable, "-c", script, "-c", RANK, str(tmp_path / "ranks"), "0", "sleep", "2", "False"]
    agent = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert agent.stdout.readline() == "ready\n"
    agent.kill()
    _, errors = agent.communicate(timeout=10)  # which the rank holds open for as long as it lives
    assert f"torchrun (pid {agent.pid}), which started rank 0, died" in errors
