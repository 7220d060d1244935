"""Tests that the engine in a child process and a server start vLLM alike; each difference has a stated reason."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from moe_rl.cli import main
from moe_rl.config.load import load_config
from moe_rl.errors import EngineError
from moe_rl.messages import encode
from moe_rl.models.hf import read_model
from moe_rl.rollout.rollouts import engine_settings
from moe_rl.vllm import api_server, arguments, wire
from tests.support.refusals import refused

CONFIG = "configs/tiny_moe_cpu.yaml"
ONLY_SERVER = {"host", "port", "enable_scale_out", "scheduling_policy", "middleware"}
ONLY_SERVER |= {"enable_expert_parallel", "stream_interval"}
NATIVE = {"enable_return_routed_experts": True}


class _Started(Exception):
    """Raised where vLLM would load a model."""


@pytest.fixture
def of_engine(tmp_path):
    """Return the arguments that a run's engine starts with."""

    def start(*overrides: str) -> dict[str, object]:
        import vllm

        from moe_rl.vllm.child import ChildEngine

        config = load_config(Path(CONFIG), [f"run.runs_dir={tmp_path}", *overrides])
        facts = read_model(config.model.path)
        # as the child gets them
        settings = wire.CALLS.decode(encode(wire.Start(engine_settings(config, facts, tmp_path)))).settings
        with patch.object(vllm, "LLM", side_effect=_Started) as llm, pytest.raises(_Started):
            ChildEngine(settings, lambda: None)
        return llm.call_args.kwargs

    return start


@pytest.fixture
def of_server(tmp_path):
    """Return the arguments of a run's server, or of one that serves `model`; `further` are arguments after "--"."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def start(*overrides: str, further: tuple[str, ...] = (), model: str = "") -> dict[str, object]:
        def run(given, *_) -> None:
            raise _Started(vars(given))

        served = ["--config", CONFIG, f"run.runs_dir={tmp_path}", *overrides]
        if model:
            served = ["--model", model, "--trace-root", str(tmp_path)]
        given = [*served, "--token-file", str(tmp_path / "token")]
        with patch.object(api_server, "_run", run), pytest.raises(_Started) as started:
            main(["serve", *given, "--", *further])
        return started.value.args[0]

    with patch.dict(os.environ):
        yield start
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def parsed(monkeypatch):
    """Return what becomes of a server's command line for vLLM."""
    monkeypatch.setattr("vllm.entrypoints.serve.utils.api_utils.cli_env_setup", lambda: None)
    return lambda fixed, *further: api_server._vllm_arguments(fixed, {}, further)


@pytest.mark.parametrize(
    "overrides", [(), ("rollout.capture=worker", "rollout.keep_sampling_mask=true", "objective.score_centering=5")]
)
def test_engine_and_server_are_started_alike(of_engine, of_server, overrides):
    engine, server = of_engine(*overrides), of_server(*overrides)
    assert {"model", "additional_config", "kv_cache_memory_bytes", "enforce_eager"} <= engine.keys()
    assert engine.pop("enable_sleep_mode") is False and server["enable_sleep_mode"] is False
    assert engine.pop("sleep_preserve_parameter_names") == ["draft.*"], "at level 2 a draft would lose its weights"
    recorded, served = (one.pop("additional_config")["moe_rl"] for one in (engine, server))
    assert recorded.pop("trace_root") != served.pop("trace_root")  # the run's store, and the folder of many
    assert recorded == served and recorded["head"] == (5 if overrides else 0)
    assert {name: server[name] for name in engine} == engine
    assert ("worker_cls" in engine) == bool(overrides)


PASSED = {
    "enable_prefix_caching": False,
    "block_size": 64,
    "max_num_batched_tokens": 96,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
}


def test_what_the_config_passes_on_reaches_both(of_engine, of_server):
    override = f"rollout.vllm={json.dumps(PASSED)}"
    for given in (of_engine(override), of_server(override)):
        assert {name: given[name] for name in PASSED} == PASSED
    assert of_server()["stream_interval"] == 16
    assert of_server("rollout.vllm.stream_interval=8")["stream_interval"] == 8


def test_drafts_are_scheduled_only_when_it_is_known_which_were_accepted(of_engine, of_server, monkeypatch):
    monkeypatch.setattr(arguments, "_refuse_native", lambda recording: None)
    drafts = "rollout.vllm={speculative_config: {method: ngram, num_speculative_tokens: 2}}"
    for start in (of_engine, of_server):
        assert start(drafts)["async_scheduling"] is False
        for vllm_decides in (start(), start(drafts, "rollout.capture=native")):
            assert vllm_decides.get("async_scheduling") is None
    assert of_server(further=("--spec-method", "ngram", "--spec-tokens", "2"))["async_scheduling"] is False


def test_a_server_refuses_to_schedule_drafts_before_it_is_known_which_were_accepted(parsed):
    drafts = ("--spec-method", "ngram", "--spec-tokens", "2", "--async-scheduling")
    with refused(EngineError, got=True, option="--async-scheduling"):
        parsed({}, *drafts)
    assert parsed(NATIVE, *drafts).async_scheduling is parsed({}, "--async-scheduling").async_scheduling is True


@pytest.mark.parametrize("fixed", [{}, NATIVE])
def test_a_server_refuses_micro_batches_whatever_captures(parsed, fixed):
    """vLLM's own capturer writes each of them to the first rows of its buffer."""
    with refused(EngineError, got=True, option="--enable-dbo"):
        parsed(fixed, "--enable-dbo")
    with refused(EngineError, got=2, option="--ubatch-size"):
        parsed(fixed, "--ubatch-size", "2")


def test_workers_get_no_recorder_where_vllm_captures_itself(of_engine, of_server, monkeypatch):
    monkeypatch.setattr(arguments, "_refuse_native", lambda recording: None)
    for start in (of_engine, of_server):
        for capture in ("native", "worker"):
            given, native = start(f"rollout.capture={capture}"), capture == "native"
            assert given["additional_config"]["moe_rl"]["native"] == native
            assert bool(given.get("enable_return_routed_experts")) == native


def test_a_server_without_weights_has_no_draft_that_needs_some(parsed):
    """A run sends the draft none, so it would propose nonsense for ever."""

    def started(load: str, method: str):
        draft = json.dumps({"method": method, "num_speculative_tokens": 2})
        return parsed({}, "--load-format", load, "--speculative-config", draft)

    assert started("dummy", "ngram").load_format == "dummy"
    assert started("auto", "mtp").speculative_config["method"] == "mtp"
    with refused(EngineError, got=("dummy", "mtp"), option="--load-format"):
        started("dummy", "mtp")


@pytest.mark.parametrize(
    ("overrides", "cpu", "engine", "server"),
    [
        ((), True, False, False),
        ((), False, False, True),  # servers have their own GPUs
        (("rollout.router_logits_fraction=0.5",), False, False, False),  # a graph does not call the routers
        (("rollout.cuda_graphs=true",), True, True, True),
        (("rollout.cuda_graphs=false",), False, False, False),
    ],
)
def test_servers_with_gpus_use_cuda_graphs(of_engine, of_server, monkeypatch, overrides, cpu, engine, server):
    from vllm.platforms import current_platform

    assert of_engine(*overrides)["enforce_eager"] is not engine
    completed = arguments.completed

    def on_this_platform(sizes):
        with patch.object(type(current_platform), "is_cpu", lambda self: cpu):
            return completed(sizes)

    monkeypatch.setattr(arguments, "completed", on_this_platform)
    assert of_server(*overrides)["enforce_eager"] is not server


def test_a_server_closes_no_connection_that_a_run_uses(of_server):
    of_server()
    assert int(os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 60


def test_a_server_refuses_what_a_run_would_refuse(capsys):
    assert main(["serve", "--config", CONFIG, "rollout.vllm.enable_prefix_cachin=true"]) == 2
    assert "Did you mean enable_prefix_caching?" in capsys.readouterr().err


def test_a_server_has_more_only_for_requests_over_http_and_its_share_of_updates(of_engine, of_server):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    usual = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    given = {name for name, value in of_server().items() if value != usual[name]}
    assert given - of_engine().keys() == ONLY_SERVER


def test_what_the_config_decides_may_be_replaced_for_one_server(of_server):
    server = of_server(further=("--max-num-seqs", "3", "--no-enforce-eager"))
    assert (server["max_num_seqs"], server["enforce_eager"]) == (3, False)


@pytest.mark.parametrize(
    ("further", "cache", "share"),
    [
        ((), 1 << 30, 0.92),
        (("--kv-cache-memory-bytes", "5"), 5, 0.92),
        (("--gpu-memory-utilization", "0.1"), None, 0.1),
        (("--gpu_memory_utilization=0.1",), None, 0.1),
    ],
)
def test_a_server_of_a_model_starts_on_a_cpu_that_others_use_too(of_server, further, cache, share):
    """Without a size, vLLM requires 0.92 of the memory to be free."""
    server = of_server(further=further, model="assets/tiny_moe/policy")
    assert (server["kv_cache_memory_bytes"], server["gpu_memory_utilization"]) == (cache, share)
