"""Servers by URL: what is refused before any is asked, and what several nodes need of their network."""

from __future__ import annotations

import socket
from unittest.mock import patch

import pytest

from moe_rl.config.check_cluster import node_problems, server_problems, several_nodes, start_problems
from moe_rl.config.load import load_config

CONFIG = "configs/tiny_moe_cpu.yaml"
GOOD = ["rollout.servers=[http://10.0.0.5:8000,http://node-6:8000]", "rollout.token_file=token"]
CLUSTER = "cluster={gpus: 2, gpu_memory_gib: 79, engines: 2, gpus_per_engine: 2}"


def problems(*overrides: str) -> list[str]:
    return list(server_problems(load_config(CONFIG, list(overrides))))


def test_good_servers():
    assert problems() == problems(*GOOD) == problems(*GOOD, "rollout.max_lost_servers=1") == []
    assert problems(*GOOD, CLUSTER) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*GOOD, "rollout.servers=[https://a:1,http://b:1]"], "they speak http: got 'https://a:1'"),
        ([*GOOD, "rollout.servers=[a:1]"], "they speak http: got 'a:1'"),
        ([*GOOD, "rollout.servers=[http://a]"], "host and port are both needed: got 'http://a'"),
        ([*GOOD, "rollout.servers=[http://:8000]"], "host and port"),
        ([*GOOD, "rollout.servers=[http://a:99999]"], "no URL"),
        ([*GOOD, "rollout.servers=[http://a:1/v1]"], "nothing but host and port"),
        ([*GOOD, "rollout.servers=[http://me:secret@a:1]"], "nothing but host and port"),
        ([*GOOD, "rollout.servers=[http://a:1,http://A:1/]"], "more than once: got http://a:1"),
        (GOOD[:1], "rollout.token_file: the servers let nobody in"),
        (GOOD[1:], "rollout.token_file: is of rollout.servers, and there are none"),
        (["rollout.max_lost_servers=1"], "rollout.max_lost_servers: is of rollout.servers"),
        ([*GOOD, "rollout.max_lost_servers=2"], "none would be left: got 2, expected less than 2"),
        ([*GOOD, "rollout.capture=native"], "cannot record by vLLM's own capture"),
        ([*GOOD, "rollout.sleep_level=1"], "servers have GPUs of their own"),
        ([*GOOD, "rollout.prompts_per_step=1", "train.updates_per_step=1"], "more than the prompts of a step"),
        ([*GOOD, CLUSTER.replace("engines: 2", "engines: 3")], "cluster.engines: not the servers that there are"),
    ],
)
def test_what_is_no_fleet_is_refused(overrides, said):
    (problem,) = problems(*overrides)
    assert said in problem


def test_a_cluster_of_several_engines_is_not_started_without_them():
    started = lambda *overrides: list(start_problems(load_config(CONFIG, list(overrides))))  # noqa: E731
    (problem,) = started(CLUSTER)
    assert "cluster.engines is 2, cluster.gpus_per_engine is 2" in problem and "docs/howto/cluster.md" in problem
    assert started(*GOOD, CLUSTER) == started() == started("cluster={gpus: 2, gpu_memory_gib: 79}") == []


def test_nodes_are_told_from_ranks():
    assert not several_nodes({}) and not several_nodes({"WORLD_SIZE": "4"})
    assert not several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_ranks_on_several_nodes_need_a_way_to_each_other():
    here, there = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert list(node_problems(there | {"GLOO_SOCKET_IFNAME": "lo"})) == []
    (problem,) = node_problems(there | {"GLOO_SOCKET_IFNAME": "ib7"})
    assert "no such interface" in problem and "got ib7" in problem and "'lo'" in problem
    for addresses, said in (
        (["127.0.1.1", "::1"], "leads to loopback, where no other node is"),
        (["127.0.1.1", "10.0.0.7"], None),
        (["fe80::1%eth0"], None),
    ):
        answer = [(0, 0, 0, "", (address, 0)) for address in addresses]
        with patch.object(socket, "getaddrinfo", lambda *_, answer=answer, **__: answer):
            assert [said in problem for problem in node_problems(there)] == ([True] if said else [])
            assert list(node_problems(here)) == []
    with patch.object(socket, "getaddrinfo", side_effect=OSError("unknown")):
        (problem,) = node_problems(there)
        assert "has no address" in problem and "NCCL_SOCKET_IFNAME" in problem
