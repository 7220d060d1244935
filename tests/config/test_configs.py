"""Tests the shipped configs: each can be planned on a laptop, and fits the GPUs that its first lines name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.cli import main
from moe_rl.config import check
from moe_rl.config.check import config_problems
from moe_rl.config.check_files import file_problems
from moe_rl.config.load import load_config
from moe_rl.models.hf import parameter_count, read_published
from moe_rl.planning.cluster_plan import make_plan, memory_problems
from moe_rl.planning.plan_table import render
from tests.support.refusals import tells

ROOT = Path(__file__).resolve().parents[2]
REAL = sorted(path.stem for path in (ROOT / "configs/models").glob("*.json"))
SOLD = {79: 80, 140: 141}
BILLIONS = {
    "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235.1, "deepseek_v3": 671.0, "gpt_oss_120b": 116.8,
    "glm_4_5_air": 106.9, "moonlight_16b_a3b": 16.0,
}  # fmt: skip
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SCRIPT = """
import argparse, sys, time
from moe_rl.commands import train
parser = argparse.ArgumentParser()
train.add_arguments(parser)
status = train.run(parser.parse_args())
print("HEAVY", sorted({"torch", "transformers", "renderers", "vllm", "megatron"} & set(sys.modules)))
print("CPU_SECONDS", time.process_time())
sys.exit(status)
"""


@pytest.fixture(scope="session")
def most_seconds():
    """Processor time that a plan may take: 2 s, or more on a machine that is slow or busy: 15 times what it takes to
    import what every plan does. On a quiet machine a plan takes five times that."""
    base = "import numpy, pydantic, yaml, time; print(time.process_time())"
    run = subprocess.run([sys.executable, "-c", base], capture_output=True, text=True, timeout=60, check=True)
    return max(2.0, 15 * float(run.stdout))


def planned(name, overrides=()):
    config = load_config(ROOT / f"configs/{name}.yaml", overrides)
    facts = read_published(config.model.published)
    plan = make_plan(config, facts, config.cluster.gpus)
    return config, plan, config_problems(config, facts, config.cluster.gpus) + memory_problems(plan)


def test_every_model_has_configs_and_its_published_size():
    assert sorted(BILLIONS) == REAL
    others = [
        "qwen3_30b_a3b_8gpu",
        "qwen3_30b_a3b_8gpu_141gb",
        "reasoning_gym_cpu",
        "stability_study",
        "tiny_moe_cpu",
        "tool_use_cpu",
        "lora_cpu",
        "qwen3_30b_a3b_lora_1gpu",
        "qwen3_30b_a3b_lora_2gpu",
    ]
    assert sorted([*REAL, *(f"{name}_141gb" for name in REAL), *others]) == SHIPPED
    for name, billions in BILLIONS.items():
        assert round(parameter_count(read_published(ROOT / f"configs/models/{name}.json")).total / 1e9, 1) == billions


@pytest.mark.parametrize(("gib", "suffix"), [(79, ""), (140, "_141gb")])
@pytest.mark.parametrize("name", REAL)
def test_it_fits_the_gpus_that_it_names(name, gib, suffix):
    needs = " ".join((ROOT / f"configs/{name}{suffix}.yaml").read_text().replace("#", "").split())
    config, plan, problems = planned(name + suffix)
    assert problems == []
    assert config.cluster.gpu_memory_gib == gib
    training, sampling = config.cluster.gpus, config.cluster.engines * config.cluster.gpus_per_engine
    assert re.search(rf"\b{training} GPUs of {SOLD[gib]} GB that train and {sampling} that sample\b", needs), needs
    assert 0.4 * plan.limit_bytes < plan.fullest.total_bytes <= plan.limit_bytes, "the layout wastes the GPUs"
    assert plan.sampler.total_bytes <= plan.limit_bytes and plan.sampler.fitting >= 1


@pytest.mark.parametrize(("suffix", "gib", "host_gib"), [("", 79, 124), ("_141gb", 140, 0)])
def test_one_node_of_eight_gpus_is_enough_for_30b(suffix, gib, host_gib):
    config, plan, problems = planned(f"qwen3_30b_a3b_8gpu{suffix}")
    cluster, memory = config.cluster, plan.fullest.memory
    assert problems == [] and cluster.gpu_memory_gib == gib
    assert cluster.gpus + cluster.engines * cluster.gpus_per_engine == cluster.gpus_per_node == 8
    assert not plan.beside and plan.fullest.total_bytes < plan.limit_bytes > plan.sampler.total_bytes
    assert round(memory.host_bytes / 2**30) == host_gib and memory.main_grad_bytes == memory.parameter_bytes
    # without servers the engine is on rank 0's GPU, where each side would fit alone
    both = ["cluster={gpus: 8, gpu_memory_gib: 79}", "rollout.kv_cache_mib=8192", "rollout.prompts_per_step=64"]
    _, plan, problems = planned("qwen3_30b_a3b", both)
    (problem,) = problems
    assert problem.fault == "shared" and max(plan.sampler.total_bytes, plan.fullest.total_bytes) < plan.limit_bytes


def test_one_gpu_is_enough_for_30b_with_adapters():
    """Weights have neither gradients nor optimizer state, on both sides of the GPU; with either it would not fit."""
    config, plan, problems = planned("qwen3_30b_a3b_lora_1gpu")
    of_experts, of_attention = 128 * 3 * (2048 + 768), 2 * (2048 + 4096) + 2 * (2048 + 512)
    memory, adapters = plan.fullest.memory, 48 * config.train.lora.rank * (of_experts + of_attention)
    assert problems == [] and plan.beside and plan.sleeps and config.cluster.gpus == 1
    assert memory.parameter_bytes == 2 * plan.model.parameters == plan.sampler.weight_bytes
    assert 2 * adapters <= memory.adapter_bytes < 2.01 * adapters
    assert memory.main_grad_bytes == 2 * memory.adapter_bytes and memory.reference_bytes == 0
    assert 5.9 * memory.adapter_bytes < memory.optimizer_bytes <= 6 * memory.adapter_bytes
    assert 0.9 * plan.limit_bytes < plan.shared_bytes < plan.limit_bytes
    # A product with A of each row, B of queries, keys and values side by side, and the experts' stacks and gradients.
    rows, stacks = 8192, 128 * (16 * (2048 + 2 * 768) + 8 * (768 + 2048))
    dense, experts = rows * (24 + 8) + (4096 + 2 * 512) * 24, 8 * rows * (16 + 8) + 2 * stacks
    assert plan.fullest.activations.adapter_bytes == 2 * (dense + experts)
    assert "adapters" in render(plan) and "of one layer" in render(plan)
    _, plan, problems = planned("qwen3_30b_a3b_lora_1gpu", ["train.lora=null"])
    assert (
        problems
        and plan.fullest.memory.adapter_bytes == plan.fullest.activations.adapter_bytes == 0
        and "adapters" not in render(plan)
    )


def test_two_gpus_of_80_gb_are_enough_for_30b_with_adapters():
    """Each holds the weights once, and a sleeping sampler on one of them would not fit."""
    config, plan, problems = planned("qwen3_30b_a3b_lora_2gpu")
    assert problems == [] and not plan.beside and not plan.sleeps and plan.transfer.way == "broadcast"
    assert (config.cluster.gpus, config.cluster.gpus_per_node, config.cluster.gpu_memory_gib) == (1, 2, 79)
    assert 0.97 * plan.limit_bytes < min(plan.fullest.total_bytes, plan.sampler.total_bytes) < plan.limit_bytes
    assert max(plan.fullest.total_bytes, plan.sampler.total_bytes) < plan.limit_bytes and plan.sampler.fitting >= 8
    _, small, problems = planned("qwen3_30b_a3b_lora_1gpu", ["cluster.gpu_memory_gib=79"])
    assert problems and small.shared_bytes > small.limit_bytes


def test_adapters_alone_are_a_seventieth_of_the_weights():
    """All weights are sent in bfloat16, and so are the adapters, which the trainer holds in it."""
    _, whole, _ = planned("qwen3_30b_a3b_lora_2gpu")
    _, alone, problems = planned("qwen3_30b_a3b_lora_2gpu", ["train.lora.sync=adapter"])
    assert problems == [] and alone.sampler == whole.sampler
    assert whole.storage.weight_sync_bytes == whole.sampler.weight_bytes
    assert 72 < whole.storage.weight_sync_bytes / alone.storage.weight_sync_bytes < 73
    assert alone.storage.sync_seconds["network"] < whole.storage.sync_seconds["network"] / 70


@pytest.mark.parametrize("name", REAL)
def test_half_of_its_gpus_are_not_enough_memory(name):
    """With GPUs of half the size the plan refuses, and says what to change."""
    _, _, problems = planned(name, ["cluster.gpu_memory_gib=40"])
    assert any(problem.fault == "trainer" and problem.about["key"] == "cluster.gpu_memory_gib" for problem in problems)


@pytest.mark.parametrize(
    "name",
    # Its chat template needs transformers, and its prompts reasoning-gym: tests/tasks/test_gym_policy.py plans it.
    [
        pytest.param(name, marks=() if name in ("qwen3_30b_a3b", "tool_use_cpu") else pytest.mark.long)
        for name in SHIPPED
        if name != "reasoning_gym_cpu"
    ],
)
def test_it_is_planned_on_a_laptop_quickly_and_without_torch(name, tmp_path, most_seconds):
    """Those imports were what took most of its time."""
    file, environment = tmp_path / "plan.json", {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--config", name, "--plan", "--json", str(file)],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "HEAVY []" in run.stdout and "no problems" in run.stdout
    assert float(run.stdout.rpartition("CPU_SECONDS")[2]) < most_seconds
    written = json.loads(file.read_text())
    elsewhere = name not in ("lora_cpu", "stability_study", "tiny_moe_cpu", "tool_use_cpu")
    assert bool(written["absent"]) == elsewhere == ("not on this machine: model.path" in run.stdout)
    assert len(written["plan"]["stages"]) == written["plan"]["layout"]["pipeline"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_trial_of_a_config_with_a_best_policy_is_allowed(steps):
    ours = (f"run.steps={steps}", "eval.best=eval/pass_rate", "eval.patience=3", "train.optimizer.warmup_steps=0")
    config = load_config("tiny_moe_cpu", ours)
    assert check.problems(config, 2) == []


def test_a_shipped_config_is_planned_from_any_folder_by_its_name(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--config", "qwen3_30b_a3b_141gb", "--plan"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0 and "no problems" in run.stdout, run.stdout + run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", REAL)
def test_the_documented_memory_is_the_planned_one(name):
    (smaller, plan, _), (larger, other, _) = planned(name), planned(f"{name}_141gb")
    cells = (name, smaller.cluster.gpus, f"{plan.fullest.total_bytes / 2**30:.1f}")
    cells += (larger.cluster.gpus, f"{other.fullest.total_bytes / 2**30:.1f}")
    assert f"| {' | '.join(map(str, cells))} |" in (ROOT / "docs/howto/plan.md").read_text()


def test_a_checkpoint_must_be_the_published_model(config_file, model, tmp_path):
    from moe_rl.config.check import problems

    figures = json.loads((model / "config.json").read_text())
    (tmp_path / "figures.json").write_text(json.dumps(figures | {"torch_dtype": "bfloat16"}))
    assert problems(load_config(config_file, [f"model.published={tmp_path}/figures.json"]), 2) == []
    (tmp_path / "figures.json").write_text(json.dumps(figures | {"rope_theta": 7.0}))
    (message,) = problems(load_config(config_file, [f"model.published={tmp_path}/figures.json"]), 2)
    tells(message, "model.published", "7.0", key="model.path", field="rope_theta")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen3_30b_a3b", {"max_position_embeddings": 32768, "eos_token_id": 151643}),  # the base model
        ("qwen3_30b_a3b", {"max_position_embeddings": 262144, "rope_theta": 1e7}),  # Instruct and Thinking 2507
        ("qwen3_235b_a22b", {"max_position_embeddings": 262144, "rope_theta": 5e6}),
        ("gpt_oss_120b", {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None}),  # the 20b
        ("glm_4_5_air", {"num_hidden_layers": 92, "n_routed_experts": 160, "use_qk_norm": True}),  # the larger one
        ("moonlight_16b_a3b", {"num_hidden_layers": 28}),
        ("deepseek_v3", {"n_routed_experts": 384, "n_group": 1, "topk_group": 1}),
    ],
)
@pytest.mark.parametrize("suffix", ["", "_141gb"])
def test_another_model_of_the_family_is_told_how_to_run_it(name, suffix, other, tmp_path):
    figures = json.loads((ROOT / f"configs/models/{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(figures | other))
    for file in ("tokenizer.json", "model.safetensors"):
        (tmp_path / file).touch()

    def about_published(*overrides):
        config = load_config(ROOT / f"configs/{name}{suffix}.yaml", [f"model.path={tmp_path}", *overrides])
        facts = read_published(tmp_path / "config.json")
        return [one for one in file_problems(config, facts) if "figures" in one]

    (problem,) = about_published()
    tells(problem, "model.published=null", f"configs/models/{name}.json", key="model.path")
    assert about_published("model.published=null") == []


def test_a_plan_tells_what_is_not_here_from_what_is_wrong(tmp_path):
    """The checkpoint is on another machine; the prompt file is here, but too short for a step."""
    (tmp_path / "one.jsonl").write_text("{}\n")
    files = [
        f"task.train.0.data={tmp_path}/one.jsonl",
        f"task.heldout.0.data={tmp_path}/nowhere.jsonl",
        f"run.runs_dir={tmp_path}",
    ]
    file = tmp_path / "plan.json"
    arguments = ["--config", str(ROOT / "configs/qwen3_30b_a3b.yaml"), *files, "--json", str(file)]
    assert main(["plan", *arguments]) == 2
    written = json.loads(file.read_text())
    (wrong,) = written["problems"]
    assert wrong.startswith("rollout.prompts_per_step: ") and "task.train" in wrong
    assert [message.partition(":")[0] for message in written["absent"][:2]] == ["model.path", "task.heldout.0.data"]


def test_the_number_of_prompts_is_held_to_the_file(config_file):
    from moe_rl.config.check import problems

    assert problems(load_config(config_file, ["task.train_prompts=8"]), 2) == []
    (message,) = problems(load_config(config_file, ["task.train_prompts=9"]), 2)
    tells(message, key="task.train_prompts", got=("8",))
