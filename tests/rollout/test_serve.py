"""Tests what is refused before a recording server starts: arguments, addresses, readable token files. Starts none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
from unittest.mock import patch

import pytest

from moe_rl.cli import main
from moe_rl.errors import DiskError, EngineError, SamplerGone
from moe_rl.vllm import api_server
from moe_rl.vllm.control import read_token
from moe_rl.vllm.nodes import PORT, Nodes
from tests.rollout.serving import ROOT
from tests.support import refusals

ENVIRONMENT = "task.environment={run: moe_rl.tasks.environments.examples.calculator.run}"


@pytest.mark.parametrize(
    ("mode", "text", "message"),
    [
        (0o644, "x" * 43, "readable by others"),
        (0o600, "short", "no token"),
        (0o600, "x" * 42 + "!", "no token"),
        (None, "", "read"),
    ],
)
def test_tokens_that_are_no_secret_are_refused(tmp_path, mode, text, message):
    path = tmp_path / "token"
    if mode is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(EngineError, match=message):
        read_token(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(EngineError, match="cannot be"):
        read_token(link)


def test_a_token_is_made_once(tmp_path):
    api_server.make_token(tmp_path / "token")
    token = read_token(tmp_path / "token")
    api_server.make_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token and stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_of_two_servers_that_make_a_token_the_first_wins_and_none_reads_a_part(tmp_path, monkeypatch):
    path, make, found = tmp_path / "token", api_server.secrets.token_urlsafe, []

    def meanwhile_another(size):
        monkeypatch.setattr(api_server.secrets, "token_urlsafe", make)
        api_server.make_token(path)
        found.append(read_token(path))
        return make(size)

    monkeypatch.setattr(api_server.secrets, "token_urlsafe", meanwhile_another)
    api_server.make_token(path)
    assert [read_token(path)] == found and [*tmp_path.iterdir()] == [path]


def test_other_machines_are_listened_to_only_when_told(capsys):
    with api_server.bound_socket(None, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert capsys.readouterr().err == ""
    with api_server.bound_socket("0.0.0.0", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "warning: 0.0.0.0" in capsys.readouterr().err


@pytest.fixture
def refused(checkpoint, tmp_path, capsys):
    """Call the tool's main with bad arguments and return its message."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    tokens = tmp_path / "token"

    def call(*changes: str) -> str:
        usual = ["--model", str(checkpoint), "--model-fingerprint", "tiny", "--trace-root", str(tmp_path / "trace")]
        assert main(["serve", *usual, "--token-file", str(tokens), *changes]) == 2
        assert not (tmp_path / "trace").exists()
        return capsys.readouterr().err

    with patch.dict(os.environ):
        yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_cannot_be_served_is_refused_at_once(refused, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen" in refused("--port", port)
        (tmp_path / "file").touch()
        for folder in ("nowhere", "file"):
            assert f"{folder}/ready.json" in refused("--port", port, "--json", str(tmp_path / folder / "ready.json"))
    assert "cannot listen" in refused("--host", "192.0.2.77")
    assert "no such folder" in refused("--model", str(tmp_path / "nowhere"), "--model-fingerprint", "")
    (tmp_path / "open").write_text("x" * 43)
    (tmp_path / "open").chmod(0o640)
    assert "readable by others" in refused("--token-file", str(tmp_path / "open"))


def test_a_server_that_cannot_be_announced_ends_as_sigterm_ends_it(tmp_path):
    async def serve():
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        async with api_server.announced(lambda: True, "at {url}", {"url": "u"}, tmp_path / "nowhere/ready.json"):
            async with asyncio.timeout(20):
                await ended.wait()

    with refusals.refused(DiskError, file=tmp_path / "nowhere/ready.json"):
        asyncio.run(serve())


@pytest.mark.parametrize("died", [False, True])
def test_a_server_whose_engine_died_does_not_end_as_one_that_was_stopped(tmp_path, died):
    """SLURM's script starts it again only after an error. In vLLM a stopped engine looks like a dead one."""

    class Engine:
        errored = False

        async def collective_rpc(self, _):
            return [True]

        async def update_weight_version(self, _):
            pass

        def shutdown(self, timeout):
            self.errored = True

    @contextlib.asynccontextmanager
    async def engine_client(_):
        engine = Engine()
        yield engine
        engine.shutdown(timeout=0)

    async def until_the_end(engine, *_, **__):
        if died:
            engine.errored = True
        else:
            engine.shutdown(timeout=0)
        return asyncio.sleep(0)

    entry = "vllm.entrypoints.launchers.api_server.entry"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        patch(f"{entry}.build_async_engine_client", engine_client),
        patch(f"{entry}.build_and_serve", until_the_end),
        pytest.raises(SamplerGone) if died else contextlib.nullcontext(),
    ):
        document = {"url": "u", "capture": "patch", "token_file": "t", "trace_root": "r"}
        asyncio.run(api_server._run(None, listener, document, None))


@pytest.mark.parametrize(
    ("further", "option"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--uds", "socket"], "--uds"),
        (["--middleware", "a.b"], "--middleware"),
        (["--api-key", "k"], "--api-key"),
        (["--additional-config", '{"moe_rl": {}}'], "--additional-config"),
        (["--worker_extension_cls=a.b"], "--worker-extension-cls"),
        (["--data-parallel-rank=1"], "--data-parallel-rank"),
        (["--headless"], "--headless"),
        (["--nnodes", "2"], "--nnodes"),
    ],
)
def test_arguments_of_vllm_that_would_open_a_side_door_are_refused(refused, further, option):
    assert f"{option}: " in refused("--", *further)


def test_data_parallel_ranks_are_refused_in_favour_of_more_servers_or_native_capture(refused):
    said = refused("--", "--data-parallel-size", "2")
    assert "--data-parallel-size: " in said and "rollout.servers" in said and "--capture native" in said


@pytest.mark.parametrize(
    ("further", "option"),
    [(["--pipeline-parallel-size=2"], "--pipeline-parallel-size"), (["--no-enable-prefix-caching"], "prefix-caching")],
)
def test_what_vllms_own_capture_cannot_record_is_refused(refused, further, option):
    said = refused("--capture", "native", "--", *further)
    assert "own capture cannot run here" in said and "no Triton" in said
    with patch("moe_rl.vllm.arguments._refuse_native"):
        said = refused("--capture", "native", "--", *further)
    assert f"{option}: " in said and "own capture" in said


def test_experts_that_move_are_refused(refused):
    said = refused("--", "--tensor-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb")
    assert "--enable-eplb: " in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "CONFIG", "--model", "m"], "got --model"),
        (["--config", "CONFIG", "--support", "--head", "5", "--reads-text"], "got --support, --head, --reads-text"),
        (["--config", "CONFIG", "rollout.no_such=1"], "rollout.no_such"),
        (["--model", "m"], "nothing says which model to serve"),
        (["--model", "m", "--trace-root", "t", "run.seed=1"], "nothing says which model to serve: got run.seed=1"),
    ],
)
def test_what_is_to_be_served_is_said_once(arguments, said, capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    given = [str(ROOT / "configs/tiny_moe_cpu.yaml") if one == "CONFIG" else one for one in arguments]
    assert main(["serve", *given]) == 2 and said in capsys.readouterr().err
    for number, handler in before.items():
        signal.signal(number, handler)


NODES = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.5"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--node-rank", "1"], "got --node-rank 1, expected all three"),
        (["--master-port", "29600"], "expected all three"),
        (["--nnodes", "1", "--node-rank", "0", "--master-addr", "a"], "at least 2 nodes"),
        ([*NODES, "--node-rank", "2"], "at least 2 nodes, with ranks from 0"),
        ([*NODES, "--master-port", "65535"], "two ports"),
        ([*NODES, "--port", "8000"], "only node 0 has --port"),
        ([*NODES, "--json", "ready.json"], "only node 0 has --json"),
        ([*NODES, "--", "--tensor-parallel-size", "3"], "got 2 nodes for 3 workers"),
        ([*NODES, "--", "--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"], "reserved"),
    ],
)
def test_nodes_of_an_engine_are_given_completely(checkpoint, tmp_path, capsys, arguments, said):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    model = ["--model", str(checkpoint), "--trace-root", str(tmp_path)]
    with patch.dict(os.environ), patch("moe_rl.vllm.nodes.join", side_effect=AssertionError("it began")):
        assert main(["serve", *model, *arguments]) == 2 and said in capsys.readouterr().err
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("nodes", "count"), [([], 1), (["--nnodes", "3", *NODES[2:]], 3)])
def test_an_engine_of_several_nodes_is_started_on_all_of_them(capsys, nodes, count):
    cluster = "cluster={gpus: 4, gpus_per_node: 2, gpu_memory_gib: 79, gpus_per_engine: 4}"
    config = ["--config", str(ROOT / "configs/tiny_moe_cpu.yaml"), cluster]
    assert main(["serve", *config, *nodes]) == 2
    assert f"got {count}, expected 2" in capsys.readouterr().err
    with patch("moe_rl.commands.serve.serve") as served:
        assert main(["serve", *config, *NODES]) == 0
    settings = served.call_args.args[0]
    assert settings.nodes == Nodes(2, 1, "10.0.0.5", PORT) and settings.sizes["tensor_parallel_size"] == 4


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [([], False), (["rollout.stop=['##']"], True), ([ENVIRONMENT, "task.rewards={}", "task.pass_reward=null"], True)],
)
def test_a_server_of_a_run_reads_text_where_a_text_may_end_a_completion(overrides, reads):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with patch("moe_rl.commands.serve.serve") as served:
        assert main(["serve", "--config", str(ROOT / "configs/tiny_moe_cpu.yaml"), *overrides]) == 0
    assert served.call_args.args[0].reads_text is reads
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_server_of_a_run_records_as_the_run_does():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with patch("moe_rl.commands.serve.serve") as served:
        assert main(["serve", "--config", str(ROOT / "configs/tiny_moe_cpu.yaml"), "rollout.capture=native"]) == 0
    assert served.call_args.args[0].capture == "native"
    for number, handler in before.items():
        signal.signal(number, handler)
