import dataclasses
import shutil
from collections import namedtuple

import pytest

from moe_rl.config.load import load_config
from moe_rl.planning.cluster_plan import Stage
from moe_rl.planning.fit import disk_problems, memory_problems


def test_a_full_disk(plan_of, config_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    assert list(disk_problems(load_config(config_file), plan_of())) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    (message,) = disk_problems(load_config(config_file), plan_of())
    assert "free disk" in message and "got 1 bytes" in message


CLUSTER = ("cluster.gpus=2", "cluster.gpu_memory_gib=1", "cluster.reserved_gib=0")


def test_what_fits_is_no_problem(plan_of):
    assert plan_of().limit_bytes is None and memory_problems(plan_of()) == []
    plan = plan_of(*CLUSTER)
    assert plan.limit_bytes == 1 << 30 and memory_problems(plan) == []
    assert plan_of(*CLUSTER[:2], "cluster.reserved_gib=0.25").limit_bytes == 3 << 28


@pytest.mark.parametrize(
    ("part", "overrides", "remedy"),
    [
        ("optimizer_bytes", [], "More ranks"),
        ("optimizer_bytes", ["train.distributed_optimizer=false"], "Set train.distributed_optimizer"),
        ("parameter_bytes", [], "Raise parallel.expert, or parallel.pipeline"),
        ("main_grad_bytes", [], "Raise parallel.expert, or parallel.pipeline"),
        ("reference_bytes", [], "Set objective.kl_coef to 0"),
        ("head_bytes", [], "Raise parallel.tensor"),
        ("kept_bytes", [], "Set train.recompute to uniform"),
        ("kept_bytes", ["train.recompute=uniform"], "Lower train.microbatch_tokens or raise parallel.context"),
    ],
)
def test_what_lowers_the_largest_part_is_said(plan_of, part, overrides, remedy):
    """A part of 2 GiB on GPUs of 1 GiB."""
    plan = plan_of(*CLUSTER, *overrides)
    memory, activations = plan.stages[0].memory, plan.stages[0].activations
    if hasattr(memory, part):
        memory = dataclasses.replace(memory, **{part: 2 << 30})
    else:
        activations = dataclasses.replace(activations, **{part: 2 << 30})
    (message,) = memory_problems(dataclasses.replace(plan, stages=(Stage(memory, activations),)))
    assert "pipeline stage 0" in message and "got 2.0 GiB, expected at most 1.0 GiB" in message
    assert message.split(". ")[-1].startswith(remedy)


def test_a_byte_more_than_there_is(plan_of):
    plan = plan_of(*CLUSTER, "rollout.kv_cache_mib=1")
    plan = dataclasses.replace(plan, sampler=dataclasses.replace(plan.sampler, kv_cache_bytes=0))
    assert memory_problems(dataclasses.replace(plan, limit_bytes=plan.fullest.total_bytes)) == []
    (message,) = memory_problems(dataclasses.replace(plan, limit_bytes=plan.fullest.total_bytes - 1))
    assert "on a rank" in message


def test_a_sampler_that_does_not_fit(plan_of):
    (message,) = memory_problems(plan_of(*CLUSTER, "rollout.kv_cache_mib=1024"))
    assert "sampler" in message and "Lower rollout.kv_cache_mib" in message
    (message,) = memory_problems(plan_of(*CLUSTER, "rollout.max_completion_tokens=20000", "rollout.kv_cache_mib=1"))
    assert "not one sequence" in message and "at least 20,010" in message
