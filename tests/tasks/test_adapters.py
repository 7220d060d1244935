"""Tests the adapters of other packages' environments, with the packages where they are installed.

MOE_RL_ADAPTERS_PYTHON names an interpreter that has them. Otherwise they are looked for in this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
import venv
from http import HTTPStatus
from pathlib import Path

import httpx
import msgspec
import pytest

from moe_rl.config.environment import EnvironmentConfig
from moe_rl.errors import ConfigError
from moe_rl.tasks.environments.environment_pool import EnvironmentPool, Episode
from tests.support.ports import free_port
from tests.tasks.model_stub import ModelStub

ADAPTERS = "moe_rl.tasks.environments.adapters"
PYTHON = Path(os.environ.get("MOE_RL_ADAPTERS_PYTHON", sys.executable))
LIMIT = (400, {"error": {"message": "no turns left", "type": "x", "param": None, "code": "session_limit"}})


def need(package: str) -> None:
    """Skip the test where the package is not installed."""
    found = subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True, check=False, cwd="/")
    if found.returncode:
        pytest.skip(f"{package} is not installed for {PYTHON}")


@pytest.fixture
def play(monkeypatch):
    """Plays rows with a function in place of the model. Returns how the episode ended, and the stub."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    stubs = []

    def run(adapter: str, says, row: dict, *, python: Path = PYTHON, memory=4096) -> tuple[Episode, ModelStub]:
        stub = ModelStub(says)
        stubs.append(stub)
        with EnvironmentPool(f"{ADAPTERS}.{adapter}.run", concurrent=1, seconds=60, memory_limit_mib=memory,
                             python=None if python == Path(sys.executable) else python) as pool:  # fmt: skip
            return asyncio.run(pool.play(stub.access, row)), stub

    yield run
    for stub in stubs:
        stub.close()


def bisect(reply: str):
    """Return a model that guesses a number between 1 and 20. reply: how it writes a guess."""

    def says(body):
        low, high = 1, 20
        for asked, told in zip(body["messages"][:-1], body["messages"][1:], strict=True):
            guess = re.search(r"\d+", asked["content"]) if asked["role"] == "assistant" else None
            if guess:
                low = int(guess[0]) + 1 if "higher" in told["content"] else low
                high = int(guess[0]) - 1 if "lower" in told["content"] else high
        return {"content": reply.format((low + high) // 2)}

    return says


def continues(stub: ModelStub) -> bool:
    """Return whether each request begins with the messages of the one before."""
    asked = [body["messages"] for body in stub.bodies]
    return all(later[: len(one)] == one for one, later in zip(asked[:-1], asked[1:], strict=True))


# textarena


def test_a_game_alone_gives_its_reward_and_tells_what_is_new(play):
    need("textarena")
    row = {"game": "GuessTheNumber-v0", "seed": 3, "sampling": {"max_tokens": 9}}
    episode, stub = play("textarena_game", bisect("I think [{}]."), row)
    assert (episode.rewards, episode.problem) == (1.0, ""), episode.traceback
    told = [one["content"] for one in stub.bodies[-1]["messages"] if one["role"] == "user"]
    assert "between 1 and 20" in told[0] and len(told) > 1
    assert all("between 1 and 20" not in one and "target number is" in one for one in told[1:])
    assert continues(stub) and stub.bodies[0]["max_tokens"] == 9
    again, _ = play("textarena_game", bisect("[{}]"), row)
    assert again.rewards == 1.0


def test_a_game_that_is_lost_or_not_finished(play):
    need("textarena")
    episode, stub = play("textarena_game", lambda body: {"content": "no move"}, {"game": "Nim-v0", "players": 2,
                         "opponent": "adapted.last_free"})  # fmt: skip
    assert episode.rewards == -1.0 and len(stub.bodies) == 2, episode  # one wrong move is forgiven
    says = iter([{"content": "[1]"}, LIMIT])
    episode, _ = play("textarena_game", lambda body: next(says), {"game": "GuessTheNumber-v0", "seed": 3})
    assert episode.rewards == 0.0, episode


@pytest.mark.parametrize(("player", "reward"), [(0, 1.0), (1, -1.0)])
def test_a_game_against_a_function(play, player, reward):
    need("textarena")

    def first_free(body):
        free = body["messages"][-1]["content"].partition("Available Moves")[2]
        return {"content": re.findall(r"\[\d\]", free)[0]}

    row = {"game": "TicTacToe-v0", "players": 2, "player": player, "opponent": "adapted.last_free"}
    episode, stub = play("textarena_game", first_free, row)
    assert episode.rewards == reward, episode
    assert continues(stub) and "You are Player" in stub.bodies[0]["messages"][0]["content"]


def test_a_row_whose_players_do_not_fit_is_refused(play):
    need("textarena")
    for row in ({"players": 2}, {"opponent": "adapted.last_free"}):
        episode, stub = play("textarena_game", lambda body: {}, {"game": "TicTacToe-v0", **row})
        assert episode.rewards is None and "opponent" in episode.problem and stub.bodies == []


# OpenEnv


class GuessServer:
    """Speaks the protocol of an OpenEnv server, with the game of openenv_guess.py."""

    SCHEMA = {
        "properties": {"metadata": {"type": "object"}, "guess": {"title": "Guess", "type": "integer"}},
        "required": ["guess"],
        "title": "Guess",
        "type": "object",
    }

    def __init__(self) -> None:
        from websockets.sync.server import serve

        self.schema, self.closed = dict(self.SCHEMA), 0
        self._server = serve(self._episode, "127.0.0.1", 0, process_request=self._http)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _http(self, connection, request):
        if request.path != "/ws":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": self.schema}) + "\n")

    def _episode(self, connection) -> None:
        number = 5
        for raw in connection:
            message = json.loads(raw)
            if message["type"] == "close":
                self.closed += 1
                return
            guess = message["data"].get("guess")
            if message["type"] == "reset":
                number = message["data"].get("number", 5)
                answer = {"observation": {"hint": "guess"}, "reward": None, "done": False}
            elif not isinstance(guess, int):
                fault = {"loc": ["guess"], "msg": "Input should be a valid integer"}
                answer = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [fault]}
            elif guess < 0:
                answer = {"message": "planted", "code": "EXECUTION_ERROR"}
            else:
                hint = "right" if guess == number else "higher" if guess < number else "lower"
                answer = {"observation": {"hint": hint}, "reward": float(guess == number), "done": guess == number}
            kind = "error" if "code" in answer else "observation"
            connection.send(json.dumps({"type": kind, "data": answer}))

    def close(self) -> None:
        self._server.shutdown()


class PackageServer:
    """Runs openenv_guess.py."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        script = Path(__file__).with_name("openenv_guess.py")
        self._process = subprocess.Popen([PYTHON, str(script), str(port)])
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/health", trust_env=False)
                return
            except httpx.TransportError:
                assert self._process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module", params=[GuessServer, PackageServer])
def guessing(request):
    """A server of the game: the one of this file, and the real one where the package is installed."""
    need("openenv.core.env_server" if request.param is PackageServer else "websockets")
    server = request.param()
    yield server
    server.close()


def test_an_openenv_server_gives_a_reward_for_each_turn(play, guessing):
    row = {"url": guessing.url, "reset": {"number": 13}, "sampling": {"max_tokens": 9}}
    episode, stub = play("openenv_server", bisect('{{"guess": {}}}'), row)
    assert episode.rewards == (0.0, 0.0, 0.0, 1.0), episode  # 10, 15, 12, 13
    assert continues(stub) and stub.bodies[0]["max_tokens"] == 9
    system, first, *_ = stub.bodies[0]["messages"]
    assert system["role"] == "system" and '"guess"' in system["content"] and "metadata" not in system["content"]
    assert json.loads(first["content"]) == {"hint": "guess"}


def test_an_action_that_is_refused_is_told_and_gives_no_reward(play, guessing):
    says = iter(["five", '```json\n{"guess": "x"}\n```', "4", '{"guess": 5}'])
    row = {"url": guessing.url, "prompt": "Guess."}
    episode, stub = play("openenv_server", lambda body: {"content": next(says)}, row)
    assert episode.rewards == (0.0, 0.0, 0.0, 1.0), episode
    told = [json.loads(one["content"]) for one in stub.bodies[-1]["messages"][1:] if one["role"] == "user"]
    assert [sorted(one) for one in told] == [["hint"], ["error"], ["error"], ["hint"]]
    assert "guess: " in told[1]["error"] and stub.bodies[0]["messages"][0]["content"] == "Guess."


def test_the_end_of_the_session_keeps_the_rewards_until_then(play, guessing):
    says = iter([{"content": "1"}, LIMIT])
    closed = getattr(guessing, "closed", 0)
    episode, _ = play("openenv_server", lambda body: next(says), {"url": guessing.url})
    assert episode.rewards == (0.0,), episode
    assert isinstance(guessing, PackageServer) or guessing.closed == closed + 1


def test_a_fault_of_the_openenv_server_is_a_failure(play, guessing):
    episode, _ = play("openenv_server", lambda body: {"content": "-1"}, {"url": guessing.url})
    assert episode.rewards is None and "planted" in episode.problem, episode
    episode, _ = play("openenv_server", lambda body: {}, {"url": guessing.url + "/nothing"})
    assert episode.rewards is None
    episode, _ = play("openenv_server", lambda body: {}, {"url": "http://127.0.0.1:9"})
    assert episode.rewards is None and "ConnectError" in episode.problem


def test_an_openenv_server_of_tools_is_refused(play):
    need("websockets")
    server = GuessServer()
    server.schema["title"] = "CallToolAction"
    episode, stub = play("openenv_server", lambda body: {}, {"url": server.url})
    server.close()
    assert episode.rewards is None and "MCP" in episode.problem and stub.bodies == []


# verifiers


def test_a_task_of_verifiers_gives_its_weighted_reward(play):
    need("verifiers.v1")
    row = {"environment": {"taskset": {"id": "verifiers-sums"}}, "task": 2, "sampling": {"max_tokens": 9}}
    episode, stub = play("verifiers_task", lambda body: {"content": "5"}, row)
    assert episode.rewards == 1.25, episode
    (body,) = stub.bodies
    assert body["messages"] == [{"role": "user", "content": "2+3?"}] and body["max_tokens"] == 9
    episode, _ = play("verifiers_task", lambda body: {"content": "it is six"}, row)
    assert episode.rewards == 0.0, episode


def test_a_task_of_verifiers_that_fails_has_no_reward(play):
    need("verifiers.v1")
    row = {"environment": {"taskset": {"id": "verifiers-sums"}}}
    episode, _ = play("verifiers_task", lambda body: LIMIT, row)
    assert episode.rewards is None and "verifiers failed" in episode.problem, episode
    for wrong, said in (({"task": 3}, "task"), ({"seat": "judge"}, "seat")):
        episode, _ = play("verifiers_task", lambda body: {"content": "3"}, row | wrong)
        assert episode.rewards is None and said in episode.problem, episode


# Extras and interpreters


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [
        ("textarena_game", "textarena", "textarena"),
        ("openenv_server", "websockets", "openenv"),
        ("verifiers_task", "verifiers", "verifiers"),
    ],
)
def test_an_adapter_without_its_package_names_the_extra(tmp_path, monkeypatch, adapter, package, extra):
    (tmp_path / f"{package}.py").write_text("raise ImportError('it is not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool(f"{ADAPTERS}.{adapter}.run", concurrent=1, seconds=5)
    assert f"'.[{extra}]'" in str(caught.value) and "it is not here" in str(caught.value)


def test_an_episode_with_another_interpreter_has_its_packages_and_none_of_ours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin/python"
    with pytest.raises(ConfigError, match="msgspec"):
        EnvironmentPool("adapted.facts", concurrent=1, seconds=5, python=python)
    with pytest.raises(ConfigError, match="nowhere"):
        EnvironmentPool("nowhere.run", concurrent=1, seconds=5, python=PYTHON)
    with pytest.raises(ConfigError, match="no_such"):
        EnvironmentPool("adapted.facts", concurrent=1, seconds=5, python=tmp_path / "no_such")
    ours = Path(msgspec.__file__).parents[1]
    theirs = tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages"
    (theirs / "msgspec").symlink_to(ours / "msgspec")
    (theirs / "only_there.py").write_text("HERE = True\n")
    with EnvironmentPool.of(EnvironmentConfig(run="adapted.facts", python=python), concurrent=1) as pool:
        stub = ModelStub(lambda body: {})
        row = {"prefix": str(tmp_path), "not_there": str(ours)}
        episode = asyncio.run(pool.play(stub.access, row))
        stub.close()
    assert episode.rewards == 1.0, episode
