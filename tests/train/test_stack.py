"""Tests how many functions a reader passes from the command to the loss."""

import json
from pathlib import Path

import pytest

from tests.support.one_rank import alone

ROOT = Path(__file__).parents[2]
DOOR = "tools/train_moe_rl.py"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_from_the_command_to_the_loss_there_are_at_most_seven_frames(tmp_path):
    overrides = [
        "run.steps=1", f"run.runs_dir={tmp_path}", "run.peer_timeout_seconds=60", "parallel.expert=1",
        "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.dynamic_sampling_rounds=1", "eval.prompts=2",
        "train.updates_per_step=1", "train.optimizer.warmup_steps=1", "guards.max_canary_difference=1e9",
    ]  # fmt: skip
    run = alone(
        "tests/train/one_step.py",
        tmp_path,
        DOOR,
        "--config",
        "configs/tiny_moe_cpu.yaml",
        "guards.alignment=false",  # the stand-in sampler makes random routes
        *overrides,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    stack = [(Path(file), name) for file, name in json.loads((tmp_path / "stack.json").read_text())]
    door, below = stack.index((Path(DOOR), "<module>")), []
    for file, name in stack[door + 1 :]:
        parts = (ROOT / file).relative_to(ROOT).parts if (ROOT / file).is_relative_to(ROOT) else ("",)
        if parts[0] in ("moe_rl", "tools", "tests"):
            below.append(f"{'/'.join(parts)}:{name}")
    # The last frame stands for the policy loss itself, `objectives.sequence_ratio.gspo`.
    assert below[0] == "moe_rl/commands/train.py:run" and below[-1] == "tests/train/one_step.py:gspo"
    assert len(below) <= 7, below
    assert "moe_rl/train/loop.py:train" in below and "moe_rl/megatron/policy.py:update" in below
