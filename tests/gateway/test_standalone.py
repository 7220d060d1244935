"""Tests `moe-rl serve --gateway`: what it refuses, and whole processes over an engine and over servers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest

from moe_rl.cli import main
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.sessions import Session
from moe_rl.trace import TraceStore
from tests.gateway.conftest import ADD, LONGEST, RunningGateway
from tests.gateway.test_openai import ask, client_of
from tests.rollout.serving import ROOT, START_SECONDS, serving_run
from tests.support.processes import wait_until

CONFIG = str(ROOT / "configs/tiny_moe_cpu.yaml")


def overrides(checkpoint: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"model.path={checkpoint}", f"run.runs_dir={folder / 'runs'}", f"rollout.max_prompt_tokens={LONGEST - 3000}",
        "rollout.max_completion_tokens=3000", "rollout.dtype=float32", "rollout.max_concurrent=16",
        "rollout.kv_cache_mib=64", "gateway.renderer={name: qwen3}", *more,
    ]  # fmt: skip


@contextmanager
def gateway_process(checkpoint: Path, folder: Path, *more: str, resume: Path | None = None, port: int = 0):
    """Start `moe-rl serve --gateway` in a process of its own, in the folder of an earlier one if there is one."""
    ready, log = folder / "gateway.json", folder / "gateway.log"
    command = [
        sys.executable,
        str(ROOT / "tools/serve_vllm.py"),
        "--gateway",
        "--json",
        str(ready),
        "--port",
        str(port),
    ]
    if resume is None:
        command += ["--config", CONFIG, *overrides(checkpoint, folder)]
    else:
        command += ["--resume", str(resume)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with open(log, "ab") as out:
        process = subprocess.Popen([*command, *more], cwd=ROOT, stdout=out, stderr=out, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.1)
            told = json.loads(ready.read_text())
            yield SimpleNamespace(process=process, log=log, folder=Path(told["folder"]), url=told["url"],
                                  token=Path(told["token_file"]).read_text().strip())  # fmt: skip
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.kill()
                process.wait()


def owner(running, method: str, path: str, **more) -> dict:
    headers = {"Authorization": f"Bearer {running.token}"}
    answer = httpx.request(method, running.url + path, headers=headers, timeout=60, trust_env=False, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def end(server) -> None:
    """Kill a server and its engine."""
    for one in server.processes():
        one.kill()


def compare(running, name: str, router) -> Session:
    """Read a kept session, and compare its rows with `transformers`."""
    store = TraceStore(running.folder / "trace")
    session = Session.of(SessionKeeper(running.folder / "sessions", store).load(name))
    RunningGateway(running.url, None, store, running.folder, None, []).agrees(session, router)
    return session


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no --config"),
        (["--config", CONFIG, "--model", "m"], "--model"),
        (["--config", CONFIG, "--reads-text"], "--reads-text"),
        (["--config", CONFIG, "--resume", "runs"], "--resume"),
        (["--config", CONFIG, "gateway.no_such=1", "--json", "no_such/gateway.json"], "no_such/gateway.json"),
        (["--resume", "no_such"], "--resume"),
        (["--config", CONFIG, "--", "--max-num-seqs", "3"], "--max-num-seqs"),
        (["--config", CONFIG, "gateway.no_such=1"], "gateway.no_such"),
        (["--config", CONFIG, "gateway.renderer={name: no_such}"], "gateway.renderer"),
        (["--config", CONFIG, "gateway.renderer={name: qwen3}"], "gateway.renderer"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, said, tmp_path, capsys):
    given = arguments[:2] + [f"run.runs_dir={tmp_path}"] * bool(arguments) + arguments[2:]
    assert main(["serve", "--gateway", *given]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_an_engine_of_its_own(checkpoint, router, tmp_path):
    with gateway_process(checkpoint, tmp_path) as running:
        assert "starting the sampler and the gateway; vLLM's log is in " in running.log.read_text()
        opened = owner(running, "POST", "/sessions", json={"group": "g"})
        client = client_of(running, opened)
        first = [{"role": "user", "content": "hi"}]
        reply = ask(client, first, stop=["you"]).choices[0].message
        assert reply.content.strip() == "hello"
        busy = owner(running, "POST", "/sessions", json={"group": "g"})
        ask(client_of(running, busy), first, max_tokens=2)
        asking = threading.Thread(target=_ask_and_be_left, args=(client_of(running, busy), first))
        asking.start()
        time.sleep(0.2)
        engine = psutil.Process(running.process.pid).children()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0, running.log.read_text()[-4000:]
        assert engine and not any(one.is_running() and one.status() != "zombie" for one in engine)
        asking.join()
        assert len(compare(running, opened["session"], router).turns) == 1
        # Its second request was under way, and may have ended in time.
        assert len(compare(running, busy["session"], router).turns) in (1, 2)


def _complete_and_be_left(client, answers: list) -> None:
    """Ask for what nothing but its length ends."""
    with suppress(openai.APIConnectionError, openai.InternalServerError):
        answers += client.completions.create(model="any", prompt="ab", max_tokens=3000).choices


def kill_while_asked(running, client) -> None:
    """Kill a gateway while it samples for a client."""
    answers: list = []
    asking = threading.Thread(target=_complete_and_be_left, args=(client, answers))
    asking.start()
    time.sleep(0.3)
    running.process.kill()
    running.process.wait()
    asking.join()
    assert answers == [], "it had been answered before"


def _ask_and_be_left(client, messages) -> None:
    with suppress(openai.APIConnectionError, openai.InternalServerError):
        ask(client, messages, temperature=1, max_tokens=390, stop=["never said"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_gateway_goes_on_in_its_folder(checkpoint, router, tmp_path):
    """The gateway gets SIGKILL while it samples, and the same client goes on with the one that starts again."""
    first = [{"role": "user", "content": "2+3?"}]
    with gateway_process(checkpoint, tmp_path) as running:
        opened = owner(running, "POST", "/sessions", json={"group": "g", "turns": 4})
        changed = owner(running, "POST", "/sessions", json={})
        client = client_of(running, opened)
        reply = ask(client, first, [ADD]).choices[0].message
        ask(client_of(running, changed), first, max_tokens=2)
        assert main(["serve", "--gateway", "--resume", str(running.folder)]) == 2  # it still runs there
        kill_while_asked(running, client)
    assert TraceStore(running.folder / "trace").shards() == []  # the next one recovers what the engine wrote
    journals = running.folder / "sessions"
    assert opened["key"].partition(".")[2].encode() not in b"".join(path.read_bytes() for path in journals.iterdir())
    journal = journals / f"{changed['session']}.journal"
    journal.write_bytes(journal.read_bytes().replace(b"A", b"B", 1))
    (tmp_path / "gateway.json").unlink()
    port = int(running.url.rpartition(":")[2])
    with gateway_process(checkpoint, tmp_path, "gateway.session_turns=9", resume=running.folder, port=port) as again:
        assert (again.url, again.token, again.folder) == (running.url, running.token, running.folder)
        assert str(journal) in again.log.read_text()
        listed = owner(again, "GET", "/sessions")
        assert (listed["counts"]["reopened"], listed["counts"]["not_reopened"]) == (1, 1)
        assert [one["session"] for one in listed["sessions"]] == [opened["session"]]
        tool = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
        said = ask(client, [*first, reply, tool], [ADD]).choices[0].message
        assert said.content.strip() == "5."
        ask(client, first, [ADD], n=2, max_tokens=3)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, first)
        assert caught.value.code == "session_limit"  # it has its own limit, and no new one
        owner(again, "POST", f"/sessions/{opened['session']}/finish")
        session = compare(again, opened["session"], router)
        assert [turn.kind for turn in session.turns] == ["first", "continued", "forked", "forked"]
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(60) == 0, again.log.read_text()[-4000:]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_gateway_goes_on_over_its_server(checkpoint, router, tmp_path):
    """The server goes on with what the killed gateway had asked, and takes the requests of the next one."""
    token, first = tmp_path / "servers.token", [{"role": "user", "content": "2+3?"}]
    with ExitStack() as stack:
        folder = tmp_path / "server"
        folder.mkdir()
        server = stack.enter_context(
            serving_run(folder, CONFIG, *overrides(checkpoint, tmp_path), "--token-file", str(token))
        )
        assert "Traceback" not in server.log.read_text()
        fleet = (f"rollout.servers=[{server.url}]", f"rollout.token_file={token}")
        with gateway_process(checkpoint, tmp_path, *fleet) as running:
            opened = owner(running, "POST", "/sessions", json={})
            client = client_of(running, opened)
            reply = ask(client, first, [ADD]).choices[0].message
            kill_while_asked(running, client)
        assert TraceStore(running.folder / "trace").shards() == []  # the next one has the server publish it
        (tmp_path / "gateway.json").unlink()
        port = int(running.url.rpartition(":")[2])
        again = stack.enter_context(gateway_process(checkpoint, tmp_path, resume=running.folder, port=port))
        tool = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
        assert ask(client, [*first, reply, tool], [ADD]).choices[0].message.content.strip() == "5."
        owner(again, "POST", f"/sessions/{opened['session']}/finish")
        session = compare(again, opened["session"], router)
        assert [turn.continues for turn in session.turns] == [False, True]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_over_two_servers_of_which_one_dies(checkpoint, router, tmp_path):
    """A turn that the lost server sampled is sampled again by the other one. With both lost the gateway ends."""
    token = tmp_path / "servers.token"
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            folder = tmp_path / f"server{number}"
            folder.mkdir()
            more = overrides(checkpoint, tmp_path)
            servers.append(stack.enter_context(serving_run(folder, CONFIG, *more, "--token-file",
                                                           str(token))))  # fmt: skip
        urls = ",".join(server.url for server in servers)
        fleet = (f"rollout.servers=[{urls}]", f"rollout.token_file={token}", "rollout.max_lost_servers=1")
        running = stack.enter_context(gateway_process(checkpoint, tmp_path, *fleet))
        opened = [owner(running, "POST", "/sessions", json={"group": "g"}) for _ in range(4)]
        first = [{"role": "user", "content": "ab"}]

        def turns(most: int) -> list[threading.Thread]:
            def one(session) -> None:
                ask(client_of(running, session), first, temperature=1, max_tokens=most)

            threads = [threading.Thread(target=one, args=(session,)) for session in opened]
            for thread in threads:
                thread.start()
            return threads

        for thread in turns(5):
            thread.join()
        before = servers[0].client().stats()[0]["forwarded"]
        threads = turns(1500)
        assert wait_until(lambda: servers[0].client().stats()[0]["forwarded"] > before + 40)
        end(servers[0])
        for thread in threads:
            thread.join()
        listed = owner(running, "GET", "/sessions")
        assert listed["counts"]["sampled_again"] >= 1, "the server was lost when nothing was under way"
        assert [one["turns"] for one in listed["sessions"]] == [2] * 4
        for session in opened:
            owner(running, "POST", f"/sessions/{session['session']}/finish")
            assert [turn.kind for turn in compare(running, session["session"], router).turns] == ["first", "forked"]
        opened = [owner(running, "POST", "/sessions", json={})]
        end(servers[1])
        with pytest.raises(openai.InternalServerError):
            ask(client_of(running, opened[0]), first)
        assert running.process.wait(60) == 3, running.log.read_text()[-4000:]
