"""Tests the boundary around environments: what an episode gives, its limits, and that nothing of it is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from moe_rl.errors import ConfigError, EngineError, RewardError
from moe_rl.tasks import worker_process
from moe_rl.tasks.environments.agent_session import SessionAccess
from moe_rl.tasks.environments.environment_pool import EnvironmentPool, Episode
from moe_rl.tasks.environments.examples import calculator
from moe_rl.tasks.environments.player import GatewayOwner, PlayedRow, play_rows
from tests.support.refusals import refused
from tests.tasks.model_stub import ModelStub

NOWHERE = SessionAccess("s0", "http://127.0.0.1:9/s/k", "http://127.0.0.1:9/s/k/v1", "k", turns=5, tokens=100)
EXAMPLES = "moe_rl.tasks.environments.examples"


@pytest.fixture
def open_pool(monkeypatch):
    """Opens pools over functions of bad_environments.py (bare names) or by dotted path, closed at the end."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pools = []

    def make(name: str, *, seconds=20.0, concurrent=1, **more) -> EnvironmentPool:
        path = name if "." in name else f"bad_environments.{name}"
        pools.append(EnvironmentPool(path, concurrent=concurrent, seconds=seconds, **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def model():
    """Opens stubs of a model, closed at the end."""
    stubs = []

    def make(says) -> ModelStub:
        stubs.append(ModelStub(says))
        return stubs[-1]

    yield make
    for stub in stubs:
        stub.close()


def play(pool, *rows, access=NOWHERE) -> list[Episode]:
    async def all_of() -> list[Episode]:
        return await asyncio.gather(*(pool.play(access, row) for row in rows))

    return asyncio.run(all_of())


# What an episode gives


def test_an_episode_has_its_row_its_limits_and_nothing_of_the_run(open_pool, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "1")
    [episode] = play(open_pool("facts"), {"big": 10**30, "text": "\u20ac", "none": None, "list": [1, {"a": 0.1}]})
    assert (episode.rewards, episode.problem) == (1.0, ""), episode.traceback


def test_an_episode_has_its_options_and_the_variables_that_the_config_names(open_pool, monkeypatch):
    for name in ("DOCKER_HOST", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "tcp://sandbox:1")
    given = {"tools": ["add", 2], "on": True}
    pool = open_pool("sees", options=given, variables=["DOCKER_HOST"])
    [episode] = play(pool, {"options": given, "DOCKER_HOST": "tcp://sandbox:1"})
    assert (episode.rewards, episode.problem) == (1.0, ""), episode.traceback
    with refused(ConfigError, key="task.environment.env", got=("NOT_SET",)):
        open_pool("sees", variables=["DOCKER_HOST", "NOT_SET"])


def test_chat_sends_what_it_is_given_and_returns_the_message(open_pool, model):
    stub = model(lambda body: {"content": "ab" * len(body["messages"])})
    [episode] = play(open_pool("chat"), {"question": "?", "turns": 2}, access=stub.access)
    assert episode.rewards == (2.0, 6.0), episode.traceback
    assert stub.bodies[0] == {
        "model": "policy",
        "messages": [{"role": "user", "content": "?"}],
        "temperature": 0,
    }
    assert stub.bodies[1]["messages"][1] == {"role": "assistant", "content": "ab"}


def test_ask_tells_whether_the_message_was_cut_off(open_pool, model):
    choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}}
    for reason in ("length", "stop"):
        stub = model(lambda body, reason=reason: (200, {"choices": [choice | {"finish_reason": reason}]}))
        [episode] = play(open_pool("cut_off"), {"question": "?"}, access=stub.access)
        assert episode.rewards == float(reason == "length"), episode.traceback


def test_a_refusal_of_the_gateway_is_an_exception_with_its_code(open_pool, model):
    error = {"message": "no turns left", "type": "x", "param": None, "code": "session_limit"}
    stub = model(lambda body: (400, {"error": error}))
    [episode] = play(open_pool("chat"), {"question": "?", "turns": 1}, access=stub.access)
    assert episode.rewards is None and "ChatError" in episode.problem and "session_limit" in episode.problem
    assert "in chat" in episode.traceback


def test_episodes_run_side_by_side_and_never_more_than_allowed(open_pool, model):
    at_once, most = [], []

    def says(body):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.5)
        at_once.pop()
        return {"content": "x"}

    stub = model(says)
    episodes = play(open_pool("chat", concurrent=3), *[{"question": "?", "turns": 1}] * 6, access=stub.access)
    assert [episode.rewards for episode in episodes] == [(1.0,)] * 6
    assert 2 <= max(most) <= 3


# Faults

RAISED = {
    "raise": ("KeyError: 'planted'", "in _raise"),
    "exit": ("SystemExit", "in _exit"),
    "exit_in_a_task": ("SystemExit", "in leave"),
    "unprintable": ("_Unprintable", "in _unprintable"),
    "own_timeout": ("TimeoutError", "in _own_timeout"),
    "hoard": ("MemoryError", "in _hoard"),
    "big_file": ("OSError", "in _big_file"),
    "huge": ("OverflowError", ""),
    "none": ("returned NoneType", ""),
    "text": ("returned str", ""),
    "bool": ("returned bool", ""),
    "tuple": ("returned tuple", ""),
    "nan": ("returned nan", ""),
    "astronomic": ("returned 1e+308", ""),
    "text_in_list": ("returned str for turn 1", ""),
    "nan_in_list": ("returned nan", ""),
    "os_exit": ("died (exit code 0)", ""),
    "abort": ("died (signal 6", "in _abort"),
}
HANGING = {
    "endless_await": ("no reward within 1 s", "in _endless_await"),
    "will_not_stop": ("no reward within 1 s; killed", ""),
    "endless_loop": ("no reward within 1 s; killed", "in _endless_loop"),
    "stop": ("no reward within 1 s; killed", ""),
    "flood": ("no reward within 1 s; killed", ""),
    "leave_children_and_hang": ("no reward within 1 s; killed", "in _leave_children_and_hang"),
}


def faulty_rows(faults, tmp_path) -> list[dict]:
    return [{"fault": fault, "witness": str(tmp_path / fault)} for fault in faults]


def assert_failed(episodes, faults, tmp_path, helpers):
    for episode, (fault, (problem, place)) in zip(episodes, faults.items(), strict=True):
        assert not helpers.group_members(int((tmp_path / fault).read_text())), fault
        assert episode.rewards is None and problem in episode.problem, (fault, episode)
        assert place in episode.traceback, (fault, episode.traceback)


def test_what_goes_wrong_is_a_failure_with_its_traceback_and_never_a_reward(open_pool, helpers, tmp_path):
    pool = open_pool("misbehave", seconds=30, concurrent=4)
    *episodes, healthy = play(pool, *faulty_rows(RAISED, tmp_path), {"fault": "healthy"})
    assert_failed(episodes, RAISED, tmp_path, helpers)
    assert healthy.rewards == 1.0


def test_what_hangs_is_ended(open_pool, helpers, tmp_path):
    pool = open_pool("misbehave", seconds=1, concurrent=6)
    assert_failed(play(pool, *faulty_rows(HANGING, tmp_path)), HANGING, tmp_path, helpers)


@pytest.mark.parametrize("fault", ["leave_children", "leave_children_and_die", "leave_children_and_hang"])
def test_no_process_of_an_episode_is_left(open_pool, helpers, monkeypatch, tmp_path, fault):
    found, kill = [], os.kill
    monkeypatch.setattr(worker_process.os, "kill", lambda pid, sent: (found.append(pid), kill(pid, sent)))
    pool = open_pool("misbehave", seconds=2)
    [episode] = play(pool, *faulty_rows([fault], tmp_path))
    assert (episode.rewards == 1.0) == (fault == "leave_children"), episode
    pid = int((tmp_path / fault).read_text())
    assert len(set(found)) >= 4, "no child had left the group"
    assert helpers.wait_until(lambda: not helpers.group_members(pid) and not any(map(helpers.alive, found)), 5)


@pytest.mark.parametrize("fault", ["fork_and_return", "leave_a_thread"])
def test_what_is_left_running_delays_no_reward(open_pool, helpers, tmp_path, fault):
    [episode] = play(open_pool("misbehave"), *faulty_rows([fault], tmp_path))
    assert (tmp_path / fault).exists() and episode.rewards == 1.0
    assert episode.seconds < 10


def test_an_environment_can_end_its_children(open_pool):
    [episode] = play(open_pool("terminate"), {})
    assert episode.rewards == signal.SIGTERM, episode


def test_memory_is_limited(open_pool, tmp_path):
    [episode] = play(open_pool("misbehave", memory_limit_mib=1024), *faulty_rows(["hoard"], tmp_path))
    assert "MemoryError" in episode.problem and (tmp_path / "hoard").exists()


def test_a_cancelled_episode_is_killed(open_pool, helpers, model, tmp_path):
    stub, witness = model(lambda body: {"content": "x"}), tmp_path / "witness"
    pool = open_pool("forever", seconds=600)

    async def cancel() -> int:
        task = asyncio.create_task(pool.play(stub.access, {"witness": str(witness)}))
        while not witness.exists() or not witness.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return int(witness.read_text())

    pid = asyncio.run(cancel())
    assert helpers.wait_until(lambda: not helpers.alive(pid), 5)


def test_a_closed_pool_takes_no_episode_and_leaves_no_descriptor(open_pool):
    before = len(os.listdir("/proc/self/fd"))
    pool = open_pool("misbehave", concurrent=2)
    assert [episode.rewards for episode in play(pool, *[{"fault": "healthy"}] * 3)] == [1.0] * 3
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with refused(RewardError, fault="closed"):
        play(pool, {"fault": "healthy"})


PARENT = """
import asyncio, sys
from moe_rl.tasks.environments.agent_session import SessionAccess
from moe_rl.tasks.environments.environment_pool import EnvironmentPool
sys.path.insert(0, sys.argv[1])
pool = EnvironmentPool("bad_environments.misbehave", concurrent=1, seconds=1000)
asyncio.run(pool.play(SessionAccess("s", "", "", ""), {"fault": "endless_loop", "witness": sys.argv[2]}))
"""


def test_an_episode_dies_with_its_parent(helpers, tmp_path):
    witness = tmp_path / "witness"
    environment = os.environ | {"PYTHONPATH": str(Path(sys.modules["moe_rl"].__file__).parents[1])}
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), str(witness)]
    with subprocess.Popen(command, env=environment) as parent:
        try:
            assert helpers.wait_until(lambda: witness.exists() and witness.read_text())
            pid = int(witness.read_text())
            assert helpers.alive(pid)
        finally:
            parent.kill()
    assert helpers.wait_until(lambda: not helpers.alive(pid), 5)


@pytest.mark.parametrize(
    ("environment", "piece"),
    [
        ("not_callable", "int"),
        ("absent", "absent"),
        ("one_argument", "run(session, row)"),
        ("bad_import.f", "RuntimeError: planted at import"),
        ("bad_import_exit.g", "7"),
        ("no_such_module.h", "no_such_module"),
        ("bad-syntax.h", "dotted"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_at_the_start(open_pool, environment, piece):
    with refused(ConfigError, piece, argument="environment"):
        open_pool(environment)


def test_a_plain_function_fails(open_pool):
    [episode] = play(open_pool("plain"), {})
    assert episode.rewards is None and "async" in episode.problem


# Sessions of rows


def played(pool, stub, *rows) -> list[PlayedRow]:
    async def all_of() -> list[PlayedRow]:
        async with GatewayOwner(stub.url, "token", turns=5) as owner:
            return [one async for one in play_rows(rows, pool, owner)]

    return asyncio.run(all_of())


BUSY = 409, {"error": "busy", "code": "busy"}
FINISHED = {"turns": 2, "branches": 1, "tokens": 9, "sampled_tokens": 4}


def test_a_session_that_is_still_busy_is_finished_when_it_is_not(open_pool, model):
    stub = model(lambda body: {"content": "ab"})
    stub.finishes = [BUSY, BUSY, (200, FINISHED)]
    [one] = played(open_pool("chat"), stub, {"question": "?", "turns": 2})
    assert (one.rewards, one.reward, one.problem) == ((2.0, 2.0), 4.0, "") and len(stub.finishes) == 1
    assert (one.turns, one.branches, one.tokens, one.sampled_tokens) == (2, 1, 9, 4)


@pytest.mark.parametrize(
    ("finish", "problem"),
    [
        ((409, {"error": "turn 1 has no record", "code": "session"}), "turn 1 has no record"),
        ((200, FINISHED | {"turns": 3}), "2 rewards, expected one for each of 3 turns"),
    ],
)
def test_a_session_that_does_not_fit_its_rewards_is_a_failure(open_pool, model, finish, problem):
    stub = model(lambda body: {"content": "ab"})
    stub.finishes = [finish]
    [one] = played(open_pool("chat"), stub, {"question": "?", "turns": 2})
    assert (one.rewards, one.reward) == (None, None) and problem in one.problem


def test_a_gateway_that_has_lost_the_session_ends_the_play(open_pool, model):
    stub = model(lambda body: {"content": "ab"})
    stub.finishes = [(404, {"error": "no open session has this name", "code": "not_found"})]
    with refused(EngineError, "404", url=stub.url):
        played(open_pool("chat", concurrent=2), stub, *[{"question": "?", "turns": 1}] * 4)


# Examples


def test_the_function_of_the_page(open_pool, model, monkeypatch, tmp_path):
    page = (Path(__file__).parents[2] / "docs/howto/environments.md").read_text()
    (tmp_path / "of_the_page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    stub = model(lambda body: {"content": "It is 5."})
    rows = {"question": "2+3?", "answer": 5}, {"question": "2+3?", "answer": 4}
    assert [one.rewards for one in play(open_pool("of_the_page.run"), *rows, access=stub.access)] == [1.0, 0.0]


def test_the_calculator_computes_and_runs_nothing_else():
    assert calculator.calculate("2 * (3 + -4) / 3") == Fraction(-2, 3)
    assert calculator.calculate("0.1 + 0.2") == Fraction(3, 10)
    for bad in ("2 ** 99", "x", "f(1)", "().__class__", "1 +", "(" * 150, "1" * 201, "True", "'a'", "1e999", "1j"):
        with pytest.raises(ValueError):
            calculator.calculate(bad)
    assert calculator.answer({"name": "calculate", "arguments": '{"expression": "1/0"}'}).startswith("error: ")
    for arguments in ("", "[]", "{}", '{"expression": 3}', '{"expression": "' + "9*" * 99 + '9"}'):
        assert isinstance(calculator.answer({"name": "calculate", "arguments": arguments}), str)
    for arguments in ('{"expression": ["1+1"]}', '{"expression": {}}', '{"expression": null}', "[" * 100_000):
        assert calculator.answer({"name": "calculate", "arguments": arguments}).startswith("error: ")


def test_the_calculator_example(open_pool, model):
    def says(body):
        last = body["messages"][-1]
        if last["role"] == "tool":
            return {"content": f"It is {last['content']}."}
        function = {"name": "calculate", "arguments": '{"expression": "17 * 23"}'}
        return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    stub = model(says)
    rows = {"question": "17 * 23?", "answer": 391}, {"question": "17 * 23?", "answer": 392}
    assert [one.rewards for one in play(open_pool(f"{EXAMPLES}.calculator.run"), *rows, access=stub.access)] == [1, 0]
    assert stub.bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "391"}
    assert stub.bodies[0]["tools"] == [calculator.TOOL]


def test_the_number_game_example(open_pool, model):
    def says(body):
        told = [message["content"] for message in body["messages"][2::2]]
        low, high = 1, 100
        for guess, hint in zip([message["content"] for message in body["messages"][1::2]], told, strict=True):
            if guess != "?":
                low, high = (int(guess) + 1, high) if hint == "Higher." else (low, int(guess) - 1)
        return {"content": str((low + high) // 2) if told else "?"}

    stub = model(says)
    [episode] = play(open_pool(f"{EXAMPLES}.number_game.run"), {"secret": 37}, access=stub.access)
    # 50, 25, 37, behind the turn without a number
    assert episode.rewards == (-0.1, 0.0, 0.0, 1.0), episode


def test_the_example_with_the_openai_package(open_pool, model):
    stub = model(lambda body: {"content": "4" if len(body["messages"]) == 1 else "It is 5."})
    rows = {"question": "2+3?", "answer": 5}, {"question": "2+3?", "answer": 4}
    pool = open_pool(f"{EXAMPLES}.openai_harness.run", concurrent=2)
    assert [one.rewards for one in play(pool, *rows, access=stub.access)] == [1.0, 0.0]
    assert set(stub.keys) == {"Bearer key"} and len(stub.bodies) == 4
