import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_rl.config.check import problems
from moe_rl.config.check_files import dotted_path_problem
from moe_rl.config.load import dump_config, load_config
from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES
from moe_rl.config.reward_kinds import MathVerifyReward
from moe_rl.errors import ConfigError
from moe_rl.tasks.code_files import code_of
from tests.support.refusals import refused, tells

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs/tiny_moe_cpu.yaml"
LENGTHS = "rollout.max_prompt_tokens + rollout.max_completion_tokens"


@pytest.fixture
def write_model(write_model):
    """Models that can be trained: experts in every layer."""
    return partial(write_model, mlp_only_layers=[])


@pytest.fixture
def hf_config(hf_config):
    return hf_config | {"mlp_only_layers": []}


@pytest.fixture
def model(tmp_path, write_model):
    return write_model(tmp_path / "model")


@pytest.fixture
def found(config_file):
    def check(*overrides, world_size=2):
        try:
            return problems(load_config(config_file, overrides), world_size)
        except ConfigError as error:
            return error.problems

    return check


def test_a_good_config_has_no_problems(found):
    assert found() == []
    assert found("replay.mode=off", "replay.native_every=3") == []
    assert found("replay.mode=off", "replay.plan=false") == found("replay.plan=true") == []
    assert found("replay.overlap_chunks=3", "train.recompute=moe", "replay.plan=true") == []


def test_two_segments_of_a_completion_fit_into_a_microbatch(found):
    aborted = ["pipeline.mode=async", "pipeline.kv=recompute"]
    lengths = ["rollout.max_prompt_tokens=24", "rollout.max_completion_tokens=12", "train.microbatch_tokens=71"]

    def told(*overrides):
        return [one for one in found(*aborted, *lengths, *overrides) if "segments of one" in str(one)]

    (problem,) = told()
    tells(problem, key="train.microbatch_tokens", got=71, expected=("72",))
    for other in ("train.microbatch_tokens=72", "pipeline.segments=first", "pipeline.kv=keep",
                  "pipeline.max_staleness=0", "rollout.stop=[x]"):  # fmt: skip
        assert told(other) == [], other


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["report.trackers=[wandb, wandb]"], ["report.trackers", "wandb, wandb"]),
        (["export.keep_last=2"], ["export.keep_last", "export.every_steps is null"]),
        (["pipeline.kv=recompute"], ["pipeline.kv", "pipeline.mode is sync", "got recompute"]),
        (["pipeline.mode=one_step_off", "pipeline.max_staleness=2"], ["pipeline.max_staleness", "one_step_off"]),
        (
            ["pipeline.mode=async", "pipeline.max_staleness=0", "pipeline.late=drop"],
            ["pipeline.late", "pipeline.max_staleness is 0"],
        ),
        (["rollout.cuda_graphs=true", "rollout.router_logits_fraction=0.1"], ["rollout.cuda_graphs", "got true"]),
        (["pipeline.mode=one_step_off", "rollout.sleep_level=1"], ["rollout.sleep_level", "got 1", "expected 0"]),
        (
            ["pipeline.mode=one_step_off", "cluster={gpus: 2, gpu_memory_gib: 79}"],
            ["pipeline.mode", "rollout.servers is empty", "got one_step_off", "expected sync"],
        ),
        (
            ["cluster={gpus: 2, gpu_memory_gib: 79, gpus_per_engine: 3}"],
            ["cluster.gpus_per_engine", "got 3", "4 heads", "2 key-value heads"],
        ),
        (
            ["rollout.capture=native", "rollout.router_logits_fraction=0.5"],
            ["rollout.router_logits_fraction", "rollout.capture is native", "got 0.5"],
        ),
        (
            ["rollout.capture=native", "rollout.vllm={enable_prefix_caching: false}"],
            ["rollout.vllm.enable_prefix_caching", "rollout.capture is native", "got False"],
        ),
        *(
            (
                ["replay.overlap_chunks=1", f"train.megatron={{{name}: true}}"],
                [f"train.megatron.{name}", "replay.overlap_chunks is 1", "got True"],
            )
            for name in ("moe_shared_expert_overlap", "overlap_dispatch_backward_with_experts_wgrad")
        ),
        (["pipeline.mode=async", "rollout.capture=native"], ["rollout.capture", "pipeline.max_staleness is 1"]),
        (
            ["pipeline.mode=async", "pipeline.kv=recompute", "rollout.stop=['##']"],
            ["pipeline.kv", "rollout.stop is", "expected keep"],
        ),
        (["pipeline.mode=later"], ["pipeline.mode", "later"]),
        (["model.path=/nowhere"], ["model.path", "/nowhere"]),
        (["task.train.0.data=/nowhere"], ["task.train.0.data", "/nowhere"]),
        (["task.heldout.0.data=/nowhere"], ["task.heldout.0.data", "/nowhere"]),
        (
            ["rollout.max_completion_tokens=55", "train.microbatch_tokens=99"],
            [LENGTHS, "65", "expected at most 64, by max_position_embeddings"],
        ),
        (["train.microbatch_tokens=15"], ["train.microbatch_tokens", "got 15", "= 16"]),
        (["replay.plan=false", "replay.max_rows=9"], ["replay.max_rows", "replay.plan is false", "got 9"]),
        (
            ["replay.missing=native", "replay.max_fallback_fraction=0.1", "replay.max_rows=9"],
            ["replay.max_rows", "replay.missing is native"],
        ),
        (["replay.mode=off", "replay.plan=true"], ["replay.plan", "replay.mode is off", "got True"]),
        (["replay.overlap_chunks=2", "replay.mode=off"], ["replay.mode", "replay.overlap_chunks is 2", "r3 or r2"]),
        (["replay.overlap_chunks=1", "replay.plan=false"], ["replay.plan", "replay.overlap_chunks is 1", "got False"]),
        (
            ["replay.overlap_chunks=2", "parallel.expert=1"],
            ["parallel.expert", "replay.overlap_chunks is 2", "at least 2"],
        ),
        (
            ["replay.overlap_chunks=1", "train.overlap_expert_parallel_comm=true"],
            ["train.overlap_expert_parallel_comm", "replay.overlap_chunks is 1", "got True"],
        ),
        *(
            (["placement.copies=2", f"{key}={value}"], [key, "placement.copies is 2", told])
            for key, value, told in (
                ("parallel.expert", 1, "at least 2"),
                ("replay.mode", "off", "r3 or r2"),
                ("replay.plan", "false", "got False"),
                ("train.overlap_expert_parallel_comm", "true", "got True"),
            )
        ),
        *(
            ([f"{key}=2"], [key, "placement.copies is 0", "got 2"])
            for key in ("placement.node_ranks", "placement.least_copied_rows")
        ),
        (["train.updates_per_step=3"], ["train.updates_per_step", "got 3", "= 4"]),
        (["train.updates_per_step=8"], ["train.updates_per_step", "got 8", "= 4"]),
        (["rollout.prompts_per_step=10"], ["rollout.prompts_per_step", "at most 8"]),
        (["eval.prompts=6"], ["eval.prompts", "at most 5"]),
        (["task.pass_reward=exakt"], ["task.pass_reward", "got exakt", "exact"]),
        (["task.rewards.exact.function=moe_rl.nothing.f"], ["task.rewards.exact.function", "moe_rl.nothing"]),
        (["task.rewards.exact.weight=0"], ["task.rewards"]),
        (["task.overlong.cache_tokens=6"], ["task.overlong.cache_tokens", "below rollout.max_completion_tokens = 6"]),
        (["objective.clip_low=1.0"], ["objective.clip_low", "got 1.0"]),
        (["objective.name=grpo", "objective.clip_low=0.2"], ["objective.clip_high"]),
        (["train.optimizer.betas=[0.9, 1.0]"], ["train.optimizer.betas.1", "got 1.0"]),
        (["train.optimizer.warmup_steps=13"], ["train.optimizer.warmup_steps", "= 12"]),
        (["train.optimizer.min_lr=1e-9"], ["train.optimizer.min_lr", "linear or cosine"]),
        (["train.optimizer.decay_steps=9"], ["train.optimizer.decay_steps", "linear or cosine"]),
        (
            ["train.optimizer.schedule=linear", "train.optimizer.min_lr=1e-3"],
            ["train.optimizer.min_lr", "train.optimizer.lr = 1e-06"],
        ),
        (
            [
                "train.optimizer.schedule=linear",
                "train.optimizer.decay_steps=2",
                "train.optimizer.warmup_steps=3",
                "train.optimizer.min_lr=1e-7",
            ],
            ["train.optimizer.decay_steps", "train.optimizer.warmup_steps = 3"],
        ),
        (
            ["train.optimizer.schedule=cosine", "train.optimizer.decay_steps=11"],
            ["train.optimizer.min_lr", "got 0.0", "12 updates"],
        ),
        (["run.peer_timeout_seconds=1e-300"], ["run.peer_timeout_seconds", "to 1"]),
        (["checkpoint.grace_seconds=1e-300"], ["checkpoint.grace_seconds", "0.01"]),
        (["rollout.group_size=18446744073709551616"], ["rollout.group_size", "65536"]),
        (["task.verifier_workers=2147483647"], ["task.verifier_workers", "65536"]),
        (["parallel.tensor=true"], ["parallel.tensor", "got true"]),
        (["rollout.sleep_level=false"], ["rollout.sleep_level", "got false"]),
        (['model.path="\\0"'], ["model.path"]),
        ([f"task.train.0.data={'a' * 256}"], ["task.train.0.data", "255"]),
        ([f"run.runs_dir={'a/' * 2001}"], ["run.runs_dir"]),
        ([f"run.name={'a' * 101}"], ["run.name", "100"]),
        (["run.seed=-5"], ["run.seed", "got -5", "to 0"]),
        (["run.seed=4294967296"], ["run.seed", "than 4294967296"]),
        (["run.steps=9223372036854775808"], ["run.steps", "2147483647"]),
        (["rollout.temperature=0.009"], ["rollout.temperature", "0.01"]),
        (["rollout.temperature=2.1"], ["rollout.temperature", "to 2"]),
        (["run.peer_timeout_seconds=1e300"], ["run.peer_timeout_seconds", "2000000"]),
        (["train.optimizer.lr=1"], ["train.optimizer.lr", "got 1", "to 0.1", "would replace the model"]),
        (
            ["train.optimizer.eps=1e-46"],
            ["train.optimizer.eps", "0.000000000000000000000000000001"],
        ),
        (["task.rewards.exact.weight=1e308"], ["task.rewards.exact.weight", "1000000000000"]),
        (["parallel.expert=1", "train.updates_per_step=4", "rollout.group_size=1"], ["rollout.group_size", "got 1"]),
    ],
)
def test_each_problem_is_one_message(found, overrides, parts):
    (message,) = found(*overrides)
    key, *pieces = parts
    tells(message, *pieces, key=key)


def test_nodes_do_not_divide_the_ranks_of_an_expert(found):
    _, told = found("placement.copies=2", "placement.node_ranks=3", "parallel.expert_tensor=2")
    for part in ("placement.node_ranks", "got 3", "multiple of parallel.expert_tensor, 2"):
        assert part in told


def settings(name):
    """Overrides that choose a loss with its published parameters, and what else its method asks for."""
    others = {
        "dr_grpo": ["advantage=group_mean"],
        "minirl": ["advantage=group_mean"],
        "dppo_tv": ["old_logprobs=sampler"],
        "topr": ["old_logprobs=sampler"],
    }
    parameters = [f"{key}={value}" for key, value in LOSS_PARAMETERS[name].items()]
    return [f"objective.{item}" for item in [f"name={name}", *parameters, *others.get(name, [])]]


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_every_loss_with_its_own_parameters_is_fine(found, name):
    assert found(*settings(name)) == []


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_a_parameter_that_the_loss_does_not_take_is_refused(found, name):
    """A key of another loss is refused even with its value there. null overrides a config that sets it."""
    for key in {key for keys in LOSS_PARAMETERS.values() for key in keys} - set(LOSS_PARAMETERS[name]):
        (message,) = found(
            *settings(name), f"objective.{key}=1.5" if key in ("weight_cap", "dual_clip") else f"objective.{key}=0.5"
        )
        tells(message, "null", key=f"objective.{key}", given=f"objective.name is {name}")
        assert found(*settings(name), f"objective.{key}=0.5", f"objective.{key}=null") == []


@pytest.mark.parametrize("name", [name for name in LOSS_PARAMETERS if not name.startswith("gspo")])
def test_a_parameter_that_the_loss_needs_is_asked_for_with_its_published_value(found, name):
    needed = [item for item in settings(name) if item.split("=")[0].partition(".")[2] not in LOSS_PARAMETERS[name]]
    asked = {k: value for k, value in LOSS_PARAMETERS[name].items() if LOSSES[name].model_fields[k].is_required()}
    for message, (key, value) in zip(found(*needed), asked.items(), strict=True):
        tells(message, f"{key} {value}", key=f"objective.{key}", given=f"objective.name is {name}")


@pytest.mark.parametrize(
    ("name", "override", "expected"),
    [
        ("dr_grpo", "objective.advantage=group_std", "group_mean"),
        ("minirl", "objective.advantage=leave_one_out", "group_mean"),
        ("dppo_tv", "objective.old_logprobs=trainer", "sampler"),
        ("topr", "objective.old_logprobs=trainer", "sampler"),
        ("cispo", "objective.old_logprobs=interpolated", "sampler"),
        ("minirl", "objective.old_logprobs=sampler", "trainer"),
        ("decoupled", "objective.old_logprobs=sampler", "trainer"),
    ],
)
def test_what_a_method_asks_of_the_other_keys(found, name, override, expected):
    (message,) = found(*settings(name), override)
    key = override.partition("=")[0]
    tells(message, key=key, given=f"objective.name is {name}", expected=(f"'{expected}'",))


KEPT = "rollout.keep_sampling_mask=true"


@pytest.mark.parametrize("removing", ["top_k=5", "top_p=0.9", "min_p=0.05"])
def test_tokens_are_removed_only_where_the_trainer_knows_which(found, removing):
    assert found(f"rollout.{removing}", KEPT) == found(f"rollout.{removing}", KEPT, "rollout.capture=worker") == []
    (message,) = found(f"rollout.{removing}")
    given = f"rollout.{removing.replace('=', ' ')}"
    tells(message, key="rollout.keep_sampling_mask", given=given, got="false", expected="true")


def test_a_gateway_may_keep_the_masks_of_grammars(found):
    assert found(KEPT, "gateway.renderer={name: qwen3}") == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([KEPT], ["rollout.keep_sampling_mask", "got true", "rollout.top_p", "a gateway"]),
        ([KEPT, "rollout.min_p=0.1", "rollout.capture=native"], [KEPT.partition("=")[0], "rollout.capture is native"]),
        ([KEPT, "rollout.top_k=1"], ["rollout.top_k", "got 1", "at least 2"]),
        ([KEPT, "rollout.top_k=24"], ["rollout.top_k", "got 24", "vocab_size = 24"]),
    ],
)
def test_a_sampling_mask_that_cannot_be_kept_or_used(found, overrides, parts):
    (message,) = found(*overrides)
    key, *pieces = parts
    tells(message, *pieces, key=key)


def test_gspos_range_stands_in_the_resolved_config(config_file, tmp_path):
    """A resumed run checks the resolved config, which must contain every value used and no other."""
    for name in ("gspo", "sapo"):
        (tmp_path / name).write_text(dump_config(load_config(config_file, settings(name))))
        assert problems(load_config(tmp_path / name), 2) == []
    config = load_config(config_file, ["objective.clip_high=0.5", "objective.clip_low=null"])
    assert config.objective.parameters == {"clip_low": 3e-4, "clip_high": 0.5}
    assert "clip_low: 0.0003" in dump_config(config)
    with refused(ConfigError, key="objective.kl_coef"):
        load_config(config_file, ["objective.kl_coef=null"])


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        ([], 3, ["parallel", "parallel.expert = 2", "3 ranks", "multiple of 2"]),
        (["parallel.expert=3"], 3, ["parallel.expert", "num_experts", "divisor of 4"]),
        (["parallel.expert=1"], 5, ["rollout", "4 sequences", "5 ranks"]),
        (
            ["parallel.tensor=2", "parallel.expert_tensor=3"],
            4,
            ["parallel", "expert = 2", "expert_tensor = 3", "multiple of 6"],
        ),
        (["parallel.tensor=4"], 4, ["parallel.tensor", "num_key_value_heads", "divisor of 2"]),
        (
            ["parallel.tensor=2", "parallel.expert_tensor=4"],
            8,
            ["parallel.expert_tensor", "moe_intermediate_size", "a divisor of 6"],
        ),
        (["parallel.tensor=2", "parallel.context=2"], 6, ["parallel", "tensor = 2", "context = 2", "multiple of 4"]),
        (["parallel.context=3"], 3, ["parallel", "context = 3", "expert = 2", "multiple of 6"]),
    ],
)
def test_ranks_that_do_not_fit(found, overrides, world_size, parts):
    (message,) = found(*overrides, world_size=world_size)
    key, *pieces = parts
    tells(message, *pieces, key=key)


def test_ranks_that_share_their_sequences_need_fewer_of_them(found):
    assert found("parallel.tensor=2", world_size=8) == []  # 4 data-parallel ranks, 4 sequences an update
    (message,) = found("parallel.tensor=2", world_size=10)
    tells(message, key="rollout", got=("4 sequences", "5 ranks"))
    assert found("parallel.tensor=2", "parallel.context=2", world_size=16) == []
    (message,) = found("parallel.tensor=2", "parallel.context=2", world_size=20)
    tells(message, key="rollout", got=("4 sequences", "5 ranks"))


def test_a_vocabulary_that_cannot_be_cut_is_refused(found, write_model, tmp_path):
    write_model(tmp_path / "odd", vocab_size=25)
    (message,) = found(f"model.path={tmp_path}/odd", "parallel.tensor=2")
    tells(message, "vocab_size", "25", key="parallel.tensor", got=2)


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        (["parallel.pipeline=2"], 4, ["parallel.pipeline", "num_hidden_layers", "divisor of 3"]),
        (["parallel.virtual_pipeline=3"], 2, ["parallel.virtual_pipeline", "got 3"]),
        (["parallel.pipeline=3", "parallel.virtual_pipeline=2"], 6, ["parallel.virtual_pipeline", "divisor of 1"]),
        (["parallel.pipeline=3", "parallel.expert=4"], 6, ["parallel", "pipeline = 3", "expert = 4", "multiple of 12"]),
        (
            ["parallel.pipeline=2", "parallel.layers_per_run=[2, 2]"],
            4,
            ["parallel.layers_per_run", "got 2 + 2 = 4", "expected 3"],
        ),
        (["parallel.pipeline=2", "parallel.layers_per_run=[3]"], 4, ["parallel.layers_per_run", "got 1", "expected 2"]),
        (["parallel.layers_per_run=[3]"], 2, ["parallel.layers_per_run", "got [3]"]),
        (
            ["parallel.pipeline=2", "parallel.layers_per_run=[2, 1]", "parallel.expert=4"],
            4,
            ["parallel", "pipeline = 2", "layers_per_run = (2, 1)", "multiple of 8"],
        ),
    ],
)
def test_stages_that_do_not_fit(found, overrides, world_size, parts):
    (message,) = found(*overrides, world_size=world_size)
    key, *pieces = parts
    tells(message, *pieces, key=key)


def test_stages_may_be_uneven(found):
    assert found("parallel.pipeline=2", "parallel.layers_per_run=[2, 1]", world_size=4) == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        (["recompute=uniform", "recompute_layers=4"], 2, ["train.recompute_layers", "got 4", "at most 3"]),
        (["recompute=block", "recompute_layers=2", "parallel.pipeline=3"], 6, ["train.recompute_layers", "at most 1"]),
        (
            ["recompute=uniform", "recompute_layers=2", "parallel.pipeline=2", "parallel.layers_per_run=[2, 1]"],
            4,
            ["train.recompute_layers", "at most 1"],
        ),
        (["recompute_layers=2"], 2, ["train.recompute_layers", "train.recompute is none"]),
        (["recompute=moe", "recompute_layers=2"], 2, ["train.recompute_layers", "train.recompute is moe"]),
        (["packing=load", "parallel.expert=1"], 2, ["train.packing", "parallel.expert is 1", "expected length"]),
        (["overlap_expert_parallel_comm=true", "parallel.expert=1"], 2, ["parallel.expert", "at least 2"]),
        (["overlap_expert_parallel_comm=true", "dtype=float32"], 2, ["train.dtype", "expected bfloat16"]),
        (["overlap_expert_parallel_comm=true", "recompute=block"], 2, ["train.recompute", "got block"]),
        (["overlap_expert_parallel_comm=true", "recompute=moe"], 2, ["train.recompute", "got moe"]),
        (["overlap_expert_parallel_comm=true", "parallel.pipeline=3"], 6, ["parallel.virtual_pipeline", "at least 2"]),
        (["delay_wgrad_compute=true"], 2, ["train.delay_wgrad_compute", "overlap_expert_parallel_comm is off"]),
    ],
)
def test_schedules_that_do_not_fit(found, overrides, world_size, parts):
    (message,) = found(*(o if o.startswith("parallel") else f"train.{o}" for o in overrides), world_size=world_size)
    key, *pieces = parts
    tells(message, *pieces, key=key)


def test_experts_are_placed_on_several_ranks(found):
    assert found("placement.experts=traced") == []
    (message,) = found("placement.experts=traced", "parallel.expert=1")
    tells(message, key="placement.experts", given="parallel.expert is 1", got="traced", expected="natural")


@pytest.mark.parametrize(
    "overrides",
    [
        ["recompute=uniform", "recompute_layers=2"],  # of 3 layers: runs of two and of one
        ["recompute=block", "recompute_layers=3"],
        ["recompute=moe"],
        ["packing=load"],
        ["overlap_expert_parallel_comm=true"],
        ["overlap_expert_parallel_comm=true", "delay_wgrad_compute=true"],
        ["distributed_optimizer=false"],
    ],
)
def test_schedules_that_fit(found, overrides):
    assert found(*(f"train.{o}" for o in overrides)) == []


def test_a_tied_embedding_may_lie_on_two_stages(found, write_model, tmp_path):
    write_model(tmp_path / "tied", tie_word_embeddings=True)
    assert found(f"model.path={tmp_path}/tied") == []
    assert found(f"model.path={tmp_path}/tied", "parallel.pipeline=3", world_size=6) == []


def test_a_tied_output_matrix_in_the_files_is_a_copy_of_the_embedding(found, write_model, tmp_path):
    folder = write_model(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors

    def with_head(head):
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        return found(f"model.path={folder}")

    assert with_head(embedding) == []
    embedding[-1, -1] = np.nan  # equal bits, though no equal numbers
    assert with_head(embedding) == []
    other = np.zeros_like(embedding)
    for head in (other, other[:, 1:].copy()):
        (message,) = with_head(head)
        tells(message, "tie_word_embeddings", "to train both", key="model.path", folder=folder, got=True)
    write_model(tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    assert with_head(other) == []
    save_file(tensors, folder / "model.safetensors")
    (message,) = found(f"model.path={folder}")
    tells(message, "lacks tensors", "lm_head.weight", key="model.path")


def test_tokens_are_cut_into_even_parts_only(config_file):
    with refused(ConfigError, key="parallel.tensor", got=3):
        load_config(config_file, ["parallel.tensor=3"])


def test_the_same_file_twice_is_refused_also_through_a_link(found, tmp_path):
    os.symlink(tmp_path / "train.jsonl", tmp_path / "link.jsonl")
    (message,) = found(f"task.heldout.0.data={tmp_path}/link.jsonl")
    tells(message, "task.train", key="task.heldout.0", got=tmp_path / "link.jsonl")


def test_an_empty_prompt_file(found, tmp_path):
    (tmp_path / "heldout.jsonl").write_text("\n \n")
    (message,) = found()
    tells(message, key="task.heldout.0", file=tmp_path / "heldout.jsonl")


def test_a_model_with_a_dense_layer(found, tmp_path, write_model):
    write_model(tmp_path / "model", mlp_only_layers=[1])
    assert found() == []
    # the stages are of one layer each
    (message,) = found("parallel.pipeline=3", "parallel.expert=1", world_size=3)
    tells(message, key="parallel.pipeline", got=("[1]",))


def test_an_expert_bias_rate_needs_an_expert_bias(found, tmp_path, write_glm):
    (message,) = found("train.expert_bias_rate=1e-3")
    tells(message, key="train.expert_bias_rate", got=0.001)
    write_glm(tmp_path / "model")
    assert found("train.expert_bias_rate=1e-3") == []


def test_multi_token_prediction_layers_may_lie_in_the_checkpoint(found, tmp_path, write_glm):
    model = write_glm(tmp_path / "model", num_nextn_predict_layers=1)
    assert found() == []
    tensors = load_file(model / "model.safetensors")
    behind = {"model.layers.3.eh_proj.weight": np.zeros((8, 16), np.float32)}
    save_file(tensors | behind, model / "model.safetensors")
    assert found() == []
    save_file(tensors | {"model.layers.4.eh_proj.weight": behind.popitem()[1]}, model / "model.safetensors")
    (message,) = found()
    tells(message, key="model.path", folder=model, got=("model.layers.4.eh_proj.weight",))


def test_a_packed_checkpoint_is_for_reading_only(found, tmp_path, write_gpt_oss):
    model = write_gpt_oss(tmp_path / "model", hidden_size=32, intermediate_size=32)
    assert found() == []
    tensors, name = load_file(model / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    assert tensors.pop(name).shape == (4, 32, 64)
    tensors |= {f"{name}_blocks": np.zeros((4, 64, 1, 16), np.uint8), f"{name}_scales": np.zeros((4, 64, 1), np.uint8)}
    save_file(tensors, model / "model.safetensors")
    (message,) = found()
    tells(message, "moe-rl export --model", key="model.path", folder=model, got=("1 ", "mxfp4"))


def test_weights_that_are_no_matrices_are_not_rounded(found, tmp_path, write_gpt_oss):
    write_gpt_oss(tmp_path / "model")
    (message,) = found("rollout.weights=fp8_e4m3")
    tells(message, key="rollout.weights", got="fp8_e4m3")


def test_experts_with_biases_are_not_copied(found, tmp_path, write_gpt_oss):
    write_gpt_oss(tmp_path / "model")
    (message,) = found("placement.copies=2")
    tells(message, key="placement.copies", got="2", expected="0")


def test_an_engine_divides_the_heads_among_its_gpus(found, tmp_path, write_model, write_deepseek):
    """Several GPUs may have the same key-value head. A latent is whole on each."""

    def told(gpus, *more):
        cluster = f"cluster={{gpus: 2, gpus_per_node: 16, gpu_memory_gib: 79, gpus_per_engine: {gpus}}}"
        return [one for one in found(cluster, *more) if one.about.get("key") == "cluster.gpus_per_engine"]

    write_model(tmp_path / "model", num_attention_heads=12, num_key_value_heads=4)
    assert told(1) == told(2) == told(4) == told(12) == told(6, "run.replays=earlier") == []
    for gpus in (3, 5, 6):  # 6 of 12 heads are fine, but not with 4 key-value heads
        (message,) = told(gpus)
        tells(message, "12 heads", "4 key-value heads", folder=tmp_path / "model", got=gpus)
    write_deepseek(tmp_path / "model", hidden_size=24, num_attention_heads=12, num_key_value_heads=12)
    assert told(6) == [] and len(told(8)) == 1


def test_a_sampler_works_beside_the_trainer_only_on_gpus_of_its_own(found):
    def told(*more):
        ahead = ("pipeline.mode=one_step_off", "cluster={gpus: 2, gpu_memory_gib: 79}")
        return [one for one in found(*ahead, *more) if one.about.get("key") == "pipeline.mode"]

    assert len(told()) == len(told("cluster.engines=2", "rollout.engines=2")) == 1
    for other in ("cluster.engines=2", "rollout.servers=[http://a:1]", "run.replays=earlier", "cluster=null"):
        assert told(other) == [], other


def test_a_dense_model(found, model, hf_config):
    (model / "config.json").write_text(
        json.dumps(hf_config | {"architectures": ["Qwen3ForCausalLM"], "num_experts": None})
    )
    assert any(message.got == "Qwen3ForCausalLM" for message in found())


def test_a_checkpoint_of_another_shape(found, model, hf_config):
    (model / "config.json").write_text(json.dumps(hf_config | {"moe_intermediate_size": 7}))
    (message,) = found()
    tells(message, key="model.path", folder=model, got=("experts.0.gate_proj.weight [6, 8]", "[7, 8]"))


def test_a_tokenizer_of_another_model(found, model):
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["added_tokens"].append({"id": 24, "content": "<x>"})
    (model / "tokenizer.json").write_text(json.dumps(raw))
    (message,) = found()
    tells(message, key="model.path", folder=model, got=("25",), expected=("vocab_size = 24",))


@pytest.mark.parametrize("eos", [None, 24, [1, -1]])
def test_an_end_of_sequence_the_model_does_not_have(found, model, eos, hf_config):
    (model / "config.json").write_text(json.dumps(hf_config | {"eos_token_id": eos}))
    (message,) = found()
    tells(message, "eos_token_id", key="model.path")


def test_a_runs_dir_below_a_file(found, tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = found(f"run.runs_dir={tmp_path}/file/runs")
    tells(message, key="run.runs_dir", folder=tmp_path / "file/runs", got=tmp_path / "file")


def test_a_runs_dir_without_permission(found, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((Path(path), mode)))
    (message,) = found()
    tells(message, key="run.runs_dir", got=tmp_path)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_a_reward_whose_library_is_not_installed(found, monkeypatch):
    override = "task.rewards.exact={kind: math_verify}"
    monkeypatch.setattr(MathVerifyReward, "library", ("no_such_library", "math"))
    (message,) = found(override)
    tells(message, "no_such_library", "'.[math]'", key="task.rewards.exact.kind", fault="no library")


def test_all_problems_at_once(found):
    messages = found(
        "model.path=/nowhere", "task.train.0.data=/nowhere", "task.pass_reward=x", "train.microbatch_tokens=1",
        "objective.kl_estimator=k2", "eval.prompts=99", world_size=3,
    )  # fmt: skip
    assert len(messages) == 7


@pytest.mark.parametrize(
    ("dotted", "reason"),
    [
        ("moe_rl.errors.describe", None),
        ("moe_rl.config.check.problems", None),
        ("json.loads", None),
        ("math.isclose", None),
        ("describe", "not a dotted path"),
        ("moe_rl..describe", "not a dotted path"),
        ("os; import x.f", "not a dotted path"),
        ("no_such_package.f", "no module no_such_package"),
        ("moe_rl.errors.deeper.f", "no module moe_rl.errors.deeper"),
        ("moe_rl.errors.descibe", "did you mean describe?"),
        ("__main__.f", "__main__ is the running command"),
    ],
)
def test_dotted_paths(dotted, reason):
    found = dotted_path_problem(dotted)
    assert found is None if reason is None else reason in found


def test_looking_up_a_dotted_path_runs_nothing(tmp_path, monkeypatch):
    package = tmp_path / "trap"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (package / "inner.py").write_text("raise SystemExit\ndef reward(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert dotted_path_problem("trap.inner.reward") is None
    assert "has no other" in dotted_path_problem("trap.inner.other")


def test_a_path_may_lead_through_folders_that_are_no_packages(tmp_path, monkeypatch):
    (tmp_path / "outermost/inner").mkdir(parents=True)
    (tmp_path / "outermost/inner/place.py").write_text("def run(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert dotted_path_problem("outermost.inner.place.run") is None
    assert "has no walk" in dotted_path_problem("outermost.inner.place.walk")
    assert code_of("outermost.inner.place.run")[0].keys() == {"outermost.inner.place"}
    assert not (tmp_path / "ran").exists() and "trap" not in sys.modules


SCRIPT = """
import sys, time
from moe_rl.config.load import load_config
from moe_rl.planning.cluster_plan import make_plan
from moe_rl.planning.plan_table import render
from moe_rl.config.check import problems
from moe_rl.models.hf import read_model
config = load_config(sys.argv[1])
print(render(make_plan(config, read_model(config.model.path), 2)))
print("PROBLEMS", problems(config, 2))
print("HEAVY", sorted({"torch", "transformers", "vllm", "megatron"} & set(sys.modules)))
print("CPU_SECONDS", time.process_time())
"""


def test_the_demo_is_planned_and_checked_quickly_without_torch():
    """The time includes imports. It is processor time, because other tests may run on this machine."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(DEMO)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "PROBLEMS []" in run.stdout and "HEAVY []" in run.stdout, run.stdout
    assert "optimizer updates" in run.stdout
    assert float(run.stdout.split("CPU_SECONDS")[1]) < 2.0


@pytest.mark.parametrize(
    "override",
    [
        "train.microbatch_tokens=16",
        "train.optimizer.warmup_steps=12",
        "train.optimizer={lr: 1e-6, schedule: cosine, decay_steps: 12, warmup_steps: 12}",
        "train.optimizer={lr: 1e-6, schedule: linear, decay_steps: 11, min_lr: 1e-6}",
        "rollout.prompts_per_step=8",
        "eval.prompts=5",
        "task.overlong.cache_tokens=5",
        "rollout.top_k=0",
    ],
)
def test_what_just_fits_is_no_problem(found, override):
    assert found(override) == []
