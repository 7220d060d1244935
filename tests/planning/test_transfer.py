"""Tests how weights travel for every kind of trainer and sampler, and the message where that is impossible."""

import itertools

import pytest

from moe_rl.planning.cluster_plan import transfer_problems
from moe_rl.planning.transfer import weight_transfer
from tests.support.refusals import tells

WAYS = ("shared_memory", "cuda_ipc", "broadcast", "disk")
AUTO = {
    # (GPUs, where samplers run, trainer on one host)
    (False, "child", True): "shared_memory",
    (False, "servers", True): "disk",
    (False, "child", False): "disk",
    (False, "servers", False): "disk",
    (True, "child", True): "cuda_ipc",
    (True, "servers", True): "broadcast",
    (True, "child", False): "cuda_ipc",
    (True, "servers", False): "broadcast",
    (False, "children", True): "shared_memory",
    (False, "children", False): "disk",
    (True, "children", True): "cuda_ipc",
    (True, "children", False): "disk",
}


@pytest.mark.parametrize("known", AUTO)
def test_auto_is_a_way_that_may_be_named_there_too(known):
    gpu, place, one_host = known
    auto = weight_transfer("auto", gpu=gpu, place=place, one_host=one_host)
    assert auto.way == AUTO[known] and "auto" in auto.why and not auto.problem
    named = weight_transfer(auto.way, gpu=gpu, place=place, one_host=one_host)
    assert named.way == auto.way and not named.problem


def test_what_cannot_work_is_refused_with_what_does():
    refused = {
        (way, *known)
        for way, known in itertools.product(WAYS, AUTO)
        if weight_transfer(way, gpu=known[0], place=known[1], one_host=known[2]).problem
    }
    memory = {("shared_memory", *known) for known in AUTO if known[1] == "servers" or not known[2]}
    ipc = {("cuda_ipc", *known) for known in AUTO if known[:2] != (True, "child") and known != (True, "children", True)}
    one_gpu = {("broadcast", *known) for known in AUTO if known[0] and known[1] != "servers"}
    assert refused == memory | ipc | one_gpu
    problem = weight_transfer("cuda_ipc", gpu=False, place="child", one_host=True)
    assert problem.way is None
    tells(problem.problem, "auto", "shared_memory", key="rollout.weight_transfer", got="cuda_ipc", expected=("GPU",))


@pytest.mark.parametrize(("place", "one_host"), [("child", True), ("child", False), ("children", True)])
def test_a_gpu_that_both_use_at_the_same_time_hands_nothing_over_in_place(place, one_host):
    known = {"gpu": True, "place": place, "one_host": one_host, "in_turn": False}
    assert weight_transfer("auto", **known).way == ("shared_memory" if one_host else "disk")
    assert weight_transfer("cuda_ipc", **known).problem


def test_the_plan_says_the_way_and_what_a_rank_holds(plan_of):
    plan = plan_of()
    assert plan.transfer.way == "shared_memory"
    # a tiny model is smaller than a bucket: all of it
    assert plan.storage.weight_bucket_bytes == plan.storage.weight_sync_bytes
    small = plan_of("rollout.weight_bucket_mib=0.0001").storage
    assert 105 < small.weight_bucket_bytes < small.weight_sync_bytes / 2
    cluster = ("cluster.gpus=2", "cluster.gpu_memory_gib=1")
    assert plan_of(*cluster).transfer.way == "cuda_ipc"
    assert plan_of(*cluster, "cluster.gpus_per_node=1").transfer.way == "cuda_ipc", "rank 0's engine is on its GPU"
    assert plan_of(*cluster, "pipeline.mode=one_step_off").transfer.way == "shared_memory"
    # engines of their own, whose servers are named later
    assert plan_of(*cluster, "cluster.engines=2").transfer.way == "broadcast"
    several = (*cluster, "cluster.engines=2", "rollout.engines=2")
    assert plan_of(*several).transfer.way == "cuda_ipc"
    assert plan_of(*several, "cluster.gpus_per_node=1").transfer.way == "disk"
    assert plan_of("rollout.weight_transfer=disk").transfer.way == "disk"
    servers = ("rollout.servers=[http://10.0.0.5:8000]", "rollout.token_file=token")
    assert plan_of(*servers).transfer.way == "disk" and plan_of(*servers, *cluster).transfer.way == "broadcast"
    refused = plan_of("rollout.weight_transfer=cuda_ipc")
    assert refused.transfer.way is None and transfer_problems(refused) == [refused.transfer.problem]
    assert transfer_problems(plan) == []
