"""Every mistake is told in one message, before anything is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny_moe_cpu.yaml"


def launch(*arguments, ranks=2, rank=0, watch="torch"):
    """Run the command as torchrun would start one rank; also says whether `watch` was imported."""
    code = (
        "import sys; from moe_rl.train.launch import main; status = main(sys.argv[1:]); "
        f"print('IMPORTED' if {watch!r} in sys.modules else 'NOT IMPORTED'); sys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("WORLD_SIZE", None)
    if ranks:
        environment |= {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config", "no/such.yaml"], ["no/such.yaml"]),
        (["--config", CONFIG, "rollout.temprature=1"], ["rollout.temprature", "temperature"]),
        (["--config", CONFIG, "train.updates_per_step=5"], ["train.updates_per_step"]),
        (["--config", CONFIG, "model.path=assets/nothing"], ["model.path", "assets/nothing"]),
        (["--config", CONFIG, "task.train=missing.jsonl"], ["task.train", "missing.jsonl"]),
        (["--config", CONFIG, "task.pass_reward=nonsense"], ["task.pass_reward", "nonsense"]),
        (["--config", CONFIG, "parallel.expert=3"], ["parallel.expert"]),
        (["--resume", "moe_rl"], ["--resume", "config.yaml"]),
    ],
)
def test_one_message_and_nothing_started(arguments, words):
    result = launch(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("moe_rl: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert "NOT IMPORTED" in result.stdout
    # the other ranks find the same and leave the telling to the first
    assert launch(*arguments, rank=1).stderr == ""


def test_a_dense_model_is_refused(tmp_path):
    source = ROOT / "assets/tiny_moe/policy"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if "expert" not in k} | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    result = launch("--config", CONFIG, f"model.path={tmp_path}")
    assert result.returncode == 2 and "Qwen3ForCausalLM" in result.stderr


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    source = ROOT / "assets/tiny_moe/policy"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_experts": raw["num_experts"] + 2}))
    result = launch("--config", CONFIG, f"model.path={tmp_path}")
    assert result.returncode == 2 and f"experts.{raw['num_experts']}." in result.stderr


def test_without_torchrun_it_says_how_to_start():
    result = launch("--config", CONFIG, ranks=0)
    assert result.returncode == 2 and "torchrun --nproc-per-node 2" in result.stderr


def test_plan_prints_numbers_and_problems_without_torch(tmp_path):
    file = tmp_path / "plan.json"
    result = launch("--config", CONFIG, "--plan", "--json", file, ranks=0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOT IMPORTED" in result.stdout and "no problems" in result.stdout
    assert json.loads(file.read_text())["plan"]["layout"]["experts_per_rank"] == 16
    broken = launch("--config", CONFIG, "--plan", "train.microbatch_tokens=8", "parallel.expert=3", ranks=0)
    assert broken.returncode == 2
    assert "train.microbatch_tokens" in broken.stdout and "parallel.expert" in broken.stdout


def test_a_run_is_resumed_with_other_ranks_and_nothing_else(tmp_path):
    (tmp_path / "config.yaml").write_text((ROOT / CONFIG).read_text())
    file = tmp_path / "plan.json"
    planned = launch("--resume", tmp_path, "--plan", "--json", file, "parallel.expert=4", ranks=4)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert json.loads(file.read_text())["plan"]["layout"]["experts_per_rank"] == 8
    refused = launch("--resume", tmp_path, "parallel.expert=4", "run.steps=9", "parallelism=2", ranks=4)
    assert refused.returncode == 2
    assert "got run.steps=9 parallelism=2, expected overrides of parallel.*" in refused.stderr
    unfit = launch("--resume", tmp_path, "parallel.expert=3", ranks=3)
    assert unfit.returncode == 2 and "parallel.expert" in unfit.stderr


def test_an_unpatched_vllm_is_refused(monkeypatch, capsys):
    from moe_rl.rollout import patches
    from moe_rl.train import launch as launch_module

    monkeypatch.setenv("WORLD_SIZE", "2")
    fault = "vLLM is not patched: run tools/apply_patches.py --apply"
    monkeypatch.setattr(patches, "problems", lambda capture: [fault])
    monkeypatch.chdir(ROOT)
    assert launch_module.main(["--config", CONFIG]) == 2
    assert "vLLM is not patched" in capsys.readouterr().err
