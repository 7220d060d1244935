"""Ranks watch each other: the error names the lost rank, and no rank waits for a dead one."""

import os
import signal
import time

import pytest

from moe_rl.train.peers import EXIT_CODE, STOPPED
from tests.support.forks import FORKS
from tests.train.peer_processes import beside, hold_store, run_rank


class Process:
    """A process of the tests, like a Popen, except that its output goes into files."""

    def __init__(self, function, *arguments, folder):
        self._out, self._errors = folder / f"{time.monotonic_ns()}.out", folder / f"{time.monotonic_ns()}.err"
        self._process = FORKS.Process(target=function, args=(self._out, self._errors, *arguments))
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def send_signal(self, number):
        os.kill(self.pid, number)

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=20):
        self._process.join(timeout)
        assert self.poll() is not None
        return self.poll()

    def line(self, number, timeout=30):
        """Return a line of its output as soon as it appears."""
        limit = time.monotonic() + timeout
        while not self._out.exists() or self._out.read_text().count("\n") <= number:
            assert time.monotonic() < limit and self.poll() is None, self.errors()
            time.sleep(0.01)
        return self._out.read_text().splitlines()[number]

    def errors(self):
        return self._errors.read_text() if self._errors.exists() else ""


@pytest.fixture
def start(tmp_path):
    started = []

    def start(function, *arguments):
        started.append(Process(function, *arguments, folder=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def torchrun(start):
    """Stands in for the torchrun process that holds the store."""
    return start(hold_store)


@pytest.fixture
def ranks(start, torchrun, tmp_path):
    def ranks(*hows, apart=False):
        port = torchrun.line(0)
        started = [start(run_rank, port, tmp_path, rank, how, len(hows), apart) for rank, how in enumerate(hows)]
        for process in started:
            assert process.line(0) == "ready"
        return started

    return ranks


@pytest.fixture
def saved(tmp_path):
    """Give the run a checkpoint."""
    (tmp_path / "checkpoints/step-000005").mkdir(parents=True)


def end(process, within):
    began = time.monotonic()
    process.wait(within)
    assert time.monotonic() - began < within
    return process.returncode, process.errors()


def test_a_killed_rank_is_named_with_its_phase(ranks, tmp_path):
    survivor, victim = ranks("sleep", "sleep")
    victim.kill()
    victim.wait()
    code, errors = end(survivor, 10)
    assert code == EXIT_CODE
    assert f"rank 1 (pid {victim.pid} on " in errors and "in phase train of step 7, died" in errors
    assert f"begin the run again in its folder with --resume {tmp_path} --step 0" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("published", [True, False])
def test_a_checkpoint_that_is_about_to_appear_is_waited_for(ranks, tmp_path, published):
    """Every rank has handed in its part, so it would be wrong to report that there is no checkpoint."""
    hidden = tmp_path / "checkpoints/.step-000005.tmp"
    hidden.mkdir(parents=True)
    for rank in range(2 if published else 1):
        (hidden / f"rank{rank}.part").write_text("")
    survivor, victim = ranks("sleep", "sleep")
    victim.kill()
    victim.wait()
    if published:
        time.sleep(2)
        assert survivor.poll() is None
        hidden.rename(hidden.with_name("step-000005"))
    code, errors = end(survivor, 10)
    assert (code, "go on after step 5" in errors, "--step 0" in errors) == (EXIT_CODE, published, not published)


def test_a_stopped_rank_is_named_and_ended(ranks):
    survivor, victim = ranks("sleep", "sleep")
    os.kill(victim.pid, signal.SIGSTOP)
    code, errors = end(survivor, 15)
    assert code == EXIT_CODE and f"rank 1 (pid {victim.pid}" in errors and "no sign of life for 2 s" in errors
    assert victim.wait(5) == -signal.SIGKILL


def test_ranks_that_live_and_do_not_get_on_are_ended_and_the_late_one_is_named(ranks, tmp_path):
    ranks_ = ranks("hang", "hang late", "hang")
    for process in ranks_:
        code, errors = end(process, 40)
        assert code == EXIT_CODE and "no rank has moved for" in errors
        late = f"rank 1 (pid {ranks_[1].pid} on "
        assert late in errors and "in phase train (update) of step 7, microbatch 1, layer 3, is late: " in errors
        assert "it has begun 4 collectives where others of its group have begun 5" in errors
    for rank in range(3):
        stacks = (tmp_path / f"hang/rank{rank:05d}.stacks").read_text()
        assert "peer_processes.py" in stacks and "in _do" in stacks
        assert (tmp_path / f"hang/rank{rank:05d}.collectives.json").read_text() == "{}"


def test_a_rank_that_explained_itself_is_not_explained_again(ranks):
    survivor, failed = ranks("sleep", "fail")
    assert end(failed, 10)[0] == 1
    code, errors = end(survivor, 10)
    assert (code, errors) == (EXIT_CODE, "")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_store_does_not_take_the_place_of_what_a_rank_has_to_say(ranks, torchrun, blow):
    torchrun.line(0)
    (failed,) = ranks(f"blow {blow:d} {torchrun.pid}")
    code, errors = end(failed, 10)
    assert code == 1 and errors.splitlines()[-1].endswith("EngineError: planted") and "moe_rl: " not in errors


@pytest.mark.parametrize(
    "blow, said", [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "gave no answer for 2 s")], ids=["killed", "stopped"]
)
def test_a_store_that_is_gone_or_stopped_ends_all_ranks(ranks, torchrun, blow, said):
    first, other = ranks("sleep", "in a collective", apart=True)
    time.sleep(1)  # time for the ranks to hear each other
    torchrun.send_signal(blow)
    code, errors = end(first, 10)
    store = f"torchrun's store at 127.0.0.1:{torchrun.line(0)}" if blow == signal.SIGSTOP else "torchrun's store at"
    assert code == EXIT_CODE and store in errors and f"{said}; the run stops" in errors
    code, errors = end(other, 10)
    assert code == EXIT_CODE and f"{said}; the run stops" in errors
    assert f", beside rank 0 (pid {first.pid} on host0), in phase train of step 7," in errors


def test_ranks_that_were_all_stopped_for_a_while_go_on(ranks, torchrun):
    processes = (torchrun, *ranks("sleep", "sleep"))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            process.send_signal(number)
        time.sleep(2.5)  # longer than the timeout
    assert [process.poll() for process in processes] == [None] * 3


@pytest.mark.parametrize("other", ["sleep", "broken by a failure"])
def test_a_rank_that_fails_is_heard_before_the_others_end(ranks, other):
    """torchrun ends all ranks when the first one ends. So the first one must be the rank with the error, also if its
    connections close before it ends and a collective on another rank fails."""
    survivor, failed = ranks(other, "fail slowly")
    while failed.poll() is None:
        assert survivor.poll() is None
        time.sleep(0.05)
    assert failed.returncode == 1 and "planted" in failed.errors()
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
    assert survivor.poll() is None  # it got its error a second ago
    dying.kill()
    code, errors = end(survivor, 10)
    assert code == EXIT_CODE and f"rank 1 (pid {dying.pid} on " in errors and "died" in errors


def test_ranks_on_other_nodes_give_the_same_reason(ranks, torchrun):
    """Rank 1 hears from rank 0 only. Its collective failed, and it waits for the reason. torchrun ends with rank 0."""
    first, told, victim, other = ranks("sleep", "broken off", "sleep", "sleep", apart=True)
    for process in (victim, other):
        process.kill()
        process.wait()
    said = f"rank 2 (pid {victim.pid} on host2), in phase train of step 7, gave no sign of life for 2 s"
    said += ", nor lately rank 3 on host3"
    for process in (first, told):
        code, errors = end(process, 15)
        assert code == EXIT_CODE and said in errors and "Traceback" not in errors
        torchrun.kill()


def test_a_rank_on_another_node_waits_for_a_reason_before_it_gives_its_own_error(ranks):
    """The node of a peer may be silent for the whole timeout, 2 s, and die up to 5 s after its connections."""
    other, broken = ranks("sleep", "broken off", apart=True)
    began = time.monotonic()
    broken.wait(30)
    assert time.monotonic() - began > 5  # 8 s from its own "ready"; the other one's may have come later
    assert broken.returncode == 1 and "Connection closed by peer" in broken.errors() and other.poll() is None


def test_a_rank_that_finished_is_not_missed(ranks):
    slower, done = ranks("hear", "finish")
    assert end(done, 10)[0] == 0
    assert slower.line(1) == "rank 1 finished"
    time.sleep(3)  # longer than the timeout
    assert slower.poll() is None


def test_sigint_ends_it_there_and_then(ranks, saved):
    asked, other = ranks("sleep", "sleep")
    asked.send_signal(signal.SIGINT)
    code, errors = end(asked, 10)
    assert code == EXIT_CODE and "rank 0, in phase train of step 7, was ended by SIGINT" in errors
    assert "the last checkpoint is after step 5, steps 6 to 7 will be repeated" in errors


def test_sigterm_makes_a_rank_leave_its_sampling_and_is_told_to_the_others(ranks, tmp_path, saved):
    other, sampler = ranks("in a collective", "sampling")
    other.send_signal(signal.SIGTERM)
    assert sampler.line(1) == "left"
    # Nothing saves here: both ranks end when the time is up, and name the last checkpoint.
    for process, who in ((sampler, 1), (other, 0)):
        code, errors = end(process, 15)
        assert code == STOPPED and f"rank {who}, in phase train of step 7, was asked to stop and did not" in errors
        assert "checkpoint.grace_seconds = 3; the last checkpoint is after step 5" in errors


def test_work_that_is_left_late_gets_half_of_the_grace(ranks, saved):
    """The signal that makes the rank leave it is its own, and no second request."""
    (alone,) = ranks("settling")
    alone.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert alone.line(1) == "left" and 5 < time.monotonic() - asked < 9
    code, errors = end(alone, 15)
    assert code == STOPPED and "checkpoint.grace_seconds = 12" in errors and "a second time" not in errors


def test_what_does_not_fit_into_the_grace_is_not_begun(ranks, saved):
    asked, other = ranks("long step", "sleep")
    asked.send_signal(signal.SIGTERM)
    code, errors = end(asked, 10)
    assert code == STOPPED
    assert "finishing the step and saving would take" in errors and "steps 6 to 7 will be repeated" in errors
    # The ended rank does not count as dead: the other rank learns of the request, and ends in its own time.
    code, errors = end(other, 15)
    assert code == STOPPED and "did not end within checkpoint.grace_seconds" in errors


def test_one_request_may_come_twice(ranks):
    asked, other = ranks("sleep", "sleep")
    asked.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    asked.send_signal(signal.SIGTERM)  # torchrun sends this after a scheduler signalled both
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


def test_a_rank_whose_torchrun_died_ends(start, torchrun, tmp_path):
    """Otherwise it would go on beside the run that takes over its folder."""
    agent = start(beside, torchrun.line(0), tmp_path)
    assert agent.line(0) == "ready"
    agent.kill()
    limit = time.monotonic() + 10
    while f"torchrun (pid {agent.pid}), which started rank 0, died" not in agent.errors():
        assert time.monotonic() < limit
        time.sleep(0.05)
