"""Healthy runs that a check refused once go on; where it refuses them again, `explain` says that the check is wrong."""

import json
import shutil

import pytest

from moe_rl.cli import main
from tests.chaos.chain import Control
from tests.chaos.plants import ALARMS, arm, witnesses
from tests.support.families import write_checkpoint
from tools.dev.runs import rows

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]
TOKENIZER = "assets/tiny_moe/policy/tokenizer.json"
# The widths that vLLM's kernels for latent attention accept on a CPU.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
FEW = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
OLDER = ["pipeline.mode=async", "pipeline.max_staleness=2", "objective.old_logprobs=sampler"]


@pytest.mark.parametrize(
    "alarm, family, sizes, settings",
    [(ALARMS[0], "deepseek", LATENT | FEW, []), (ALARMS[1], "qwen-mixed", {"head_dim": 32}, OLDER)],
    ids=ALARMS,
)
def test_a_healthy_run_goes_on_and_its_false_alarm_is_one(tmp_path, alarm, family, sizes, settings):
    write_checkpoint(family, tmp_path / "model", vocab_size=320, **sizes)
    shutil.copy(TOKENIZER, tmp_path / "model")
    control = Control(tmp_path / "runs")
    run = control.launch(
        "--config", "configs/tiny_moe_cpu.yaml", f"run.runs_dir={control.folder}", f"model.path={tmp_path / 'model'}",
        "run.steps=90", "train.optimizer.lr=1e-3", "train.optimizer.warmup_steps=0", "rollout.prompts_per_step=16",
        "rollout.group_size=4", "rollout.kv_cache_mib=64", "eval.prompts=8", "eval.every_steps=1000",
        "checkpoint.every_steps=1", "checkpoint.keep=4", "guards.collapse_steps=0",
        "objective.entropy_coef=0.1", *settings,  # a random model gets no reward
    )  # fmt: skip
    metrics = "metrics.jsonl"
    run.until(lambda: run.folder and (run.folder / metrics).exists() and steps(run.folder) >= 3, 900)
    assert all(row["optim/grad_norm"] > 0 for row in rows(run.folder) if row["kind"] == "train")
    arm(control.path, alarm)
    assert run.wait() != 0 and witnesses(control.path, alarm), run.text()[-4000:]
    assert main(["explain", str(run.folder), "--json", str(tmp_path / "found.json")]) == 0, run.text()[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["verdict"], found["lr"]) == ("check", 1e-3)
    assert all(side["choices"] > side["differ"] == 0 for side in [*found["sampler"], found["trainer"]])


def steps(folder):
    return sum(row["kind"] == "train" for row in rows(folder))
