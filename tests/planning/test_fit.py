import dataclasses
import re
import shutil
from collections import namedtuple

import pytest

from moe_rl.config.load import load_config
from moe_rl.models.hf import read_model
from moe_rl.planning.cluster_plan import Stage, disk_problems, memory_problems, transfer_problems
from moe_rl.planning.plan_table import render
from moe_rl.planning.sampler_memory import checkpoints_to_come, record_problems
from tests.support.refusals import tells


def test_a_full_disk(plan_of, config_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    assert list(disk_problems(load_config(config_file), plan_of())) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    (message,) = disk_problems(load_config(config_file), plan_of())
    tells(message, key="run.runs_dir", got=("1 ",))


@pytest.mark.parametrize("key", ["rollout.router_logits_fraction", "objective.score_centering"])
def test_a_record_that_could_not_be_stored(config_file, key):
    facts = dataclasses.replace(read_model(load_config(config_file).model.path), num_experts=256)
    rows = (64 << 20) // (4 * 256 * len(facts.moe_layers))
    loss = ["objective.name=cispo", "objective.weight_cap=5", "objective.clip_low=null", "objective.clip_high=null"]
    settings = {
        "rollout.router_logits_fraction": (["rollout.max_prompt_tokens=192"], 1.0, rows - 192, rows - 191),
        "objective.score_centering": ([*loss, "objective.old_logprobs=sampler"], 1024, 16384, 16385),
    }
    overrides, value, fits, too_long = settings[key]
    for tokens, problems in ((fits, 0), (too_long, 1)):
        config = load_config(config_file, [*overrides, f"{key}={value}", f"rollout.max_completion_tokens={tokens}"])
        told = list(record_problems(config, facts))
        assert len(told) == problems
    tells(told[0], key=key, expected=("64 MiB",))


def test_a_runs_dir_that_leads_nowhere_has_no_disk(plan_of, config_file, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert list(disk_problems(load_config(config_file, [f"run.runs_dir={tmp_path / 'link'}"]), plan_of())) == []


@pytest.mark.parametrize(
    ("saved", "step", "more"),
    [
        ([], None, 4),
        ([4], None, 3),
        ([4, 6], None, 2),
        ([4, 6], 4, 3),  # the newer one is put aside
        ([4, 6], "best", 3),
        ([4, 6], 0, 4),
        ([4, 6], 5, 4),  # there is none, which is told elsewhere
        ([1, 2, 3, 4, 5, 6], None, 1),  # checkpoint.keep was lowered
    ],
)
def test_checkpoints_of_a_resumed_run_leave_their_disk_to_new_ones(
    plan_of, config_file, tmp_path, monkeypatch, saved, step, more
):
    """The disk is that of the folder, which may have been moved. An unfinished checkpoint is removed."""
    often = ("checkpoint.keep=3", "checkpoint.every_steps=1", "run.steps=20")
    config, plan, folder = load_config(config_file, often), plan_of(*often), tmp_path / "moved/checkpoints"
    usage, needed, asked = namedtuple("usage", "free"), more * plan.storage.checkpoint_bytes, set()

    def found(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.add(path) or usage(free))
        return list(disk_problems(config, plan, folder.parent, step))

    for name in (".step-000009.tmp", *(f"step-{done:06d}" for done in saved)):
        (folder / name).mkdir(parents=True)
    (folder / "best").symlink_to("step-000004") if saved else None
    assert found(needed) == []
    (message,) = found(needed - 1)
    tells(message, option="--resume", folder=str(folder.parent), expected=(f"{needed:,}", f"{more} more"))
    (folder / ".step-000009.tmp/rank0.part").write_bytes(bytes(100))
    assert found(needed - 100) == [] and len(found(needed - 101)) == 1
    assert asked == {folder.parent}


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 1),  # 6 steps, and a checkpoint every 10
        (["checkpoint.every_steps=4"], 2),
        (["checkpoint.every_steps=1"], 3),
        (["eval.best=eval/pass_rate"], 4),
        (["eval.best=eval/pass_rate", "run.steps=2"], 2),
    ],
)
def test_a_short_run_needs_room_only_for_the_checkpoints_that_it_writes(plan_of, overrides, count):
    assert plan_of(*overrides).storage.checkpoints == count


def test_a_resumed_run_needs_room_for_the_checkpoints_of_its_remaining_steps(config_file):
    """It was stopped after 3 of 12 steps. Checkpoints follow after 4, 8 and 12, and 3 are kept."""
    config = load_config(config_file, ["checkpoint.keep=3", "checkpoint.every_steps=4", "run.steps=12"])
    assert [checkpoints_to_come(config, done, 1) for done in (3, 4, 8, 11)] == [3, 2, 1, 1]
    assert checkpoints_to_come(config, 4, 2) == 2 and checkpoints_to_come(config, 4, 3) == 1


CLUSTER = ("cluster.gpus=2", "cluster.gpu_memory_gib=1", "cluster.reserved_gib=0")


def test_what_fits_is_no_problem(plan_of):
    assert plan_of().limit_bytes is None and memory_problems(plan_of()) == []
    plan = plan_of(*CLUSTER)
    assert plan.limit_bytes == 1 << 30 and memory_problems(plan) == []
    assert plan_of(*CLUSTER[:2], "cluster.reserved_gib=0.25").limit_bytes == 3 << 28


@pytest.mark.parametrize(
    ("part", "overrides", "keys"),
    [
        ("optimizer_bytes", [], []),
        ("optimizer_bytes", ["train.distributed_optimizer=false"], ["train.distributed_optimizer"]),
        ("parameter_bytes", [], ["parallel.expert", "parallel.pipeline"]),
        ("main_grad_bytes", [], ["parallel.expert", "parallel.pipeline"]),
        ("reference_bytes", [], ["objective.kl_coef"]),
        ("head_bytes", [], ["parallel.tensor"]),
        ("kept_bytes", [], ["train.recompute"]),
        ("kept_bytes", ["train.recompute=uniform"], ["train.microbatch_tokens", "parallel.context"]),
    ],
)
def test_what_lowers_the_largest_part_is_said(plan_of, part, overrides, keys):
    """A part of 2 GiB on GPUs of 1 GiB."""
    plan = plan_of(*CLUSTER, *overrides)
    memory, activations = plan.stages[0].memory, plan.stages[0].activations
    if hasattr(memory, part):
        memory = dataclasses.replace(memory, **{part: 2 << 30})
    else:
        activations = dataclasses.replace(activations, **{part: 2 << 30})
    (message,) = memory_problems(dataclasses.replace(plan, stages=(Stage(memory, activations),)))
    tells(message, key="cluster.gpu_memory_gib", stage=0, got="2.0 GiB", expected=("1.0 GiB",))
    named = re.findall(r"[a-z]+\.[a-z_]+", message.partition(message.expected)[2])
    assert named[: len(keys)] == keys


def test_a_byte_more_than_there_is(plan_of):
    plan = plan_of(*CLUSTER, "cluster.engines=2", "rollout.kv_cache_mib=1")
    plan = dataclasses.replace(plan, sampler=dataclasses.replace(plan.sampler, kv_cache_bytes=0, sync_bytes=0))
    assert memory_problems(dataclasses.replace(plan, limit_bytes=plan.fullest.total_bytes)) == []
    (message,) = memory_problems(dataclasses.replace(plan, limit_bytes=plan.fullest.total_bytes - 1))
    tells(message, fault="trainer", stage=0)


@pytest.mark.parametrize(("level", "together"), [(0, "training"), (1, "resting"), (2, "resting")])
def test_rank_0_and_the_engine_on_its_gpu_are_counted_together(plan_of, level, together):
    """One that sleeps needs its memory only while the trainer holds the model and no activations."""
    plan = plan_of(*CLUSTER, f"rollout.sleep_level={level}")
    first, sampler = plan.stages[0], plan.sampler.total_bytes
    needed = {"training": first.total_bytes, "resting": first.memory.model_bytes}[together] + sampler
    assert plan.shared_bytes == needed and first.total_bytes < needed
    assert memory_problems(dataclasses.replace(plan, limit_bytes=needed)) == []
    (message,) = memory_problems(dataclasses.replace(plan, limit_bytes=needed - 1))
    tells(message, "rollout.servers", fault="shared", key="cluster.gpu_memory_gib")
    for apart in ("cluster.engines=2", "rollout.servers=[http://10.0.0.1:80]"):
        plan = plan_of(*CLUSTER, apart)
        assert memory_problems(dataclasses.replace(plan, limit_bytes=needed - 1)) == [], apart


def test_each_gpu_with_an_engine_is_counted_and_the_fullest_decides(plan_of):
    """Two of four ranks make a stage; the last one holds the output head."""
    ranks = ("cluster.gpus=4", "cluster.gpu_memory_gib=1", "parallel.pipeline=2")
    for engines, stages in ((1, (0,)), (2, (0,)), (3, (0, 1)), (4, (0, 1))):
        plan = plan_of(*ranks, f"cluster.engines={engines}", f"rollout.engines={engines}", world_size=4)
        assert plan.beside == stages and plan.sampler.engines == engines
        assert plan.sampler.max_concurrent == -(-plan.batch.sequences_per_step // engines)
        fullest = max(plan.stages[stage].total_bytes for stage in stages)
        assert plan.shared_bytes == fullest + plan.sampler.total_bytes
    assert plan.stages[0].total_bytes != plan.stages[1].total_bytes


def test_a_sampler_that_does_not_fit(plan_of):
    (message,) = memory_problems(plan_of(*CLUSTER, "rollout.kv_cache_mib=1024"))
    tells(message, "rollout.kv_cache_mib", fault="sampler", key="cluster.gpu_memory_gib")
    (message,) = memory_problems(plan_of(*CLUSTER, "rollout.max_completion_tokens=20000", "rollout.kv_cache_mib=1"))
    tells(message, key="rollout.kv_cache_mib", expected=("20,010",))


def test_a_kv_cache_for_no_sequence_is_refused_without_a_cluster_if_the_run_starts_its_engine(plan_of):
    short = ("rollout.max_completion_tokens=20000", "rollout.kv_cache_mib=1")
    (message,) = memory_problems(plan_of(*short))
    tells(message, key="rollout.kv_cache_mib", got="10,922 tokens", expected=("20,010",))
    assert memory_problems(plan_of(*short, "rollout.servers=[http://10.0.0.1:80]")) == []


@pytest.mark.parametrize(
    "overrides",
    [
        [*CLUSTER, "rollout.kv_cache_mib=1024"],
        [*CLUSTER, "rollout.max_completion_tokens=20000", "rollout.kv_cache_mib=1"],
        ["rollout.max_completion_tokens=20000", "rollout.kv_cache_mib=1"],
        ["rollout.weight_transfer=cuda_ipc"],
    ],
)
def test_a_run_that_replays_another_needs_nothing_for_a_sampler(plan_of, overrides):
    for more, count in (([], 1), (["run.replays=earlier"], 0)):
        plan = plan_of(*overrides, *more)
        assert len(memory_problems(plan) + transfer_problems(plan)) == count
        assert ("KV cache" in render(plan)) == bool(count)
