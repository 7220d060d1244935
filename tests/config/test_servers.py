"""Tests the checks of `rollout.servers` before any server is asked, and of the network between nodes."""

from __future__ import annotations

import socket
from unittest.mock import patch

import pytest

from moe_rl.config.check_cluster import (
    neighbour_problems,
    node_problems,
    queue_problems,
    server_problems,
    several_nodes,
    start_problems,
)
from moe_rl.config.load import load_config
from tests.support.refusals import tells

CONFIG = "configs/tiny_moe_cpu.yaml"
GOOD = ["rollout.servers=[http://10.0.0.5:8000,http://node-6:8000]", "rollout.token_file=token"]
EVENTS = "rollout.vllm.stream_interval=16"
CLUSTER = "cluster={gpus: 2, gpu_memory_gib: 79, engines: 2, gpus_per_engine: 2}"


def problems(*overrides: str) -> list[str]:
    return list(server_problems(load_config(CONFIG, list(overrides))))


def test_good_servers():
    assert problems() == problems(*GOOD) == problems(*GOOD, "rollout.max_lost_servers=1") == []
    assert problems(*GOOD, CLUSTER) == []
    assert problems(*GOOD, EVENTS) == problems(CLUSTER, EVENTS) == []


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        ([*GOOD, "rollout.servers=[https://a:1,http://b:1]"], {"got": "'https://a:1'"}),
        ([*GOOD, "rollout.servers=[a:1]"], {"got": "'a:1'"}),
        ([*GOOD, "rollout.servers=[http://a]"], {"got": "'http://a'"}),
        ([*GOOD, "rollout.servers=[http://:8000]"], {"got": "'http://:8000'"}),
        ([*GOOD, "rollout.servers=[http://a:99999]"], {"got": "'http://a:99999'"}),
        ([*GOOD, "rollout.servers=[http://a:1/v1]"], {"got": "'http://a:1/v1'"}),
        ([*GOOD, "rollout.servers=[http://me:secret@a:1]"], {"got": "'http://me:secret@a:1'"}),
        ([*GOOD, "rollout.servers=[http://a:1,http://A:1/]"], {"got": "http://a:1"}),
        (GOOD[:1], {"key": "rollout.token_file", "got": "null"}),
        (GOOD[1:], {"key": "rollout.token_file", "got": "token"}),
        (["rollout.max_lost_servers=1"], {"key": "rollout.max_lost_servers", "got": 1}),
        ([*GOOD, "rollout.max_lost_servers=2"], {"key": "rollout.max_lost_servers", "got": 2, "expected": ("2",)}),
        ([*GOOD, "rollout.sleep_level=1"], {"key": "rollout.sleep_level", "got": 1}),
        ([*GOOD, "rollout.prompts_per_step=1", "train.updates_per_step=1"], {"got": 2}),
        ([*GOOD, "rollout.engines=2"], {"key": "rollout.engines", "given": "rollout.servers is set", "got": 2}),
        (["rollout.engines=2", "rollout.prompts_per_step=1"], {"key": "rollout.engines", "got": 2}),
        (
            ["cluster={gpus: 2, gpus_per_node: 2, gpu_memory_gib: 79, gpus_per_engine: 3}"],
            {"key": "cluster.gpus_per_engine", "got": "3", "expected": "a multiple"},
        ),
        (["rollout.engines=2", CLUSTER], {"key": "cluster.engines", "got": "2 engines of 2 GPUs"}),
        (["rollout.engines=2", "cluster={gpus: 2, gpu_memory_gib: 79}"], {"key": "cluster.engines"}),
        ([*GOOD, CLUSTER.replace("engines: 2", "engines: 3")], {"key": "cluster.engines", "got": 3}),
        ([EVENTS], {"key": "rollout.vllm.stream_interval", "given": "no rollout.servers", "got": 16}),
        (["rollout.engines=2", EVENTS], {"key": "rollout.vllm.stream_interval"}),
    ],
)
def test_what_is_no_fleet_is_refused(overrides, facts):
    (problem,) = problems(*overrides)
    tells(problem, **{"key": "rollout.servers"} | facts)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        ([], {"given": "one server or engine", "expected": "null"}),
        (["rollout.engines=2", "rollout.in_flight=9"], {"got": 9, "expected": ("at most 8", "2 samplers")}),
        ([*GOOD, "rollout.in_flight=9"], {"got": 9, "expected": ("at most 8", "2 samplers")}),
        ([CLUSTER, "rollout.max_concurrent=5", "rollout.in_flight=6"], {"got": 6, "expected": ("at most 5",)}),
        ([*GOOD, "rollout.prompts_per_step=2"], {"given": "rollout.prompts_per_step is 2", "expected": "null"}),
        ([*GOOD, "pipeline.mode=async"], {"given": "pipeline.mode is async"}),
        (
            [*GOOD, "task.environment={run: moe_rl.tasks.environments.examples.calculator.run}"],
            {"given": "task.environment is set"},
        ),
    ],
)
def test_a_queue_that_would_change_nothing_is_refused(overrides, facts):
    def found(*more: str) -> list[str]:
        sizes = ["rollout.prompts_per_step=5", "rollout.group_size=4", "rollout.in_flight=4"]
        return list(queue_problems(load_config(CONFIG, [*sizes, *more])))

    (problem,) = found(*overrides)
    tells(problem, **{"key": "rollout.in_flight"} | facts)
    assert found("rollout.in_flight=null") == found(*GOOD, "rollout.in_flight=8") == []
    assert found(*GOOD, "pipeline.mode=async", "pipeline.max_staleness=0") == found("rollout.engines=2") == []


def test_each_engine_needs_a_rank_on_the_node_of_rank_0(monkeypatch):
    def found(engines: int, ranks: int, *overrides: str) -> list[str]:
        return list(neighbour_problems(load_config(CONFIG, [f"rollout.engines={engines}", *overrides]), ranks))

    assert found(2, 2) == found(1, 1) == found(2, 1, "run.replays=earlier") == []
    (problem,) = found(3, 2)
    tells(problem, key="rollout.engines", got=3, expected=("at most 2",))
    (problem,) = found(3, 4, "cluster={gpus: 4, gpus_per_node: 2, gpu_memory_gib: 79, engines: 3}")
    tells(problem, key="rollout.engines", got=3, expected=("at most 2",))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert found(2, 4) == [] and len(found(3, 4)) == 1


def test_engines_beside_ranks_are_no_servers_that_the_cluster_lacks():
    four = load_config(CONFIG, ["rollout.engines=4", "cluster={gpus: 4, gpu_memory_gib: 79, engines: 4}"])
    assert list(start_problems(four)) == list(server_problems(four)) == []


def test_a_cluster_of_several_engines_is_not_started_without_them():
    started = lambda *overrides: list(start_problems(load_config(CONFIG, list(overrides))))  # noqa: E731
    (problem,) = started(CLUSTER)
    given = "cluster.engines is 2, cluster.gpus_per_engine is 2"
    tells(problem, "docs/howto/cluster.md", key="rollout.servers", given=given, expected=2)
    assert started(*GOOD, CLUSTER) == started() == started("cluster={gpus: 2, gpu_memory_gib: 79}") == []


def test_nodes_are_told_from_ranks():
    assert not several_nodes({}) and not several_nodes({"WORLD_SIZE": "4"})
    assert not several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_ranks_on_several_nodes_need_a_way_to_each_other():
    here, there = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert list(node_problems(there | {"GLOO_SOCKET_IFNAME": "lo"})) == []
    (problem,) = node_problems(there | {"GLOO_SOCKET_IFNAME": "ib7"})
    tells(problem, key="GLOO_SOCKET_IFNAME", got="ib7", expected=("'lo'",))
    for addresses, got in (
        (["127.0.1.1", "::1"], ["127.0.1.1, ::1"]),
        (["127.0.1.1", "10.0.0.7"], []),
        (["fe80::1%eth0"], []),
    ):
        answer = [(0, 0, 0, "", (address, 0)) for address in addresses]
        with patch.object(socket, "getaddrinfo", lambda *_, answer=answer, **__: answer):
            assert [problem.got for problem in node_problems(there)] == got
            assert list(node_problems(here)) == []
    with patch.object(socket, "getaddrinfo", side_effect=OSError("unknown")):
        (problem,) = node_problems(there)
        tells(problem, "NCCL_SOCKET_IFNAME", key="GLOO_SOCKET_IFNAME", got="unknown")
