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
from tests.gateway.conftest import LONGEST, RunningGateway
from tests.gateway.test_openai import ask, client_of
from tests.rollout.serving import ROOT, START_SECONDS, serving_run

CONFIG = str(ROOT / "configs/tiny_moe_cpu.yaml")


def overrides(checkpoint: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"model.path={checkpoint}", f"run.runs_dir={folder / 'runs'}", f"rollout.max_prompt_tokens={LONGEST - 400}",
        "rollout.max_completion_tokens=400", "rollout.dtype=float32", "rollout.max_concurrent=16",
        "rollout.kv_cache_mib=64", "gateway.renderer={name: qwen3}", *more,
    ]  # fmt: skip


@contextmanager
def gateway_process(checkpoint: Path, folder: Path, *more: str):
    """Start `moe-rl serve --gateway` in a process of its own."""
    ready, log = folder / "gateway.json", folder / "gateway.log"
    command = [sys.executable, str(ROOT / "tools/serve_vllm.py"), "--gateway", "--config", CONFIG, "--json", str(ready)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, *overrides(checkpoint, folder, *more)], cwd=ROOT, stdout=out, stderr=out, env=environment
        )
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
    RunningGateway(running.url, None, store, running.folder, None).agrees(session, router)
    return session


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no --config"),
        (["--config", CONFIG, "--model", "m"], "--model"),
        (["--config", CONFIG, "--reads-text"], "--reads-text"),
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


def _ask_and_be_left(client, messages) -> None:
    with suppress(openai.APIConnectionError, openai.InternalServerError):
        ask(client, messages, temperature=1, max_tokens=390, stop=["never said"])


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
        threads = turns(300)
        time.sleep(0.5)
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
