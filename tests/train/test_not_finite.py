"""Tests what a whole run reports about one number that is not finite: a logprob, a gradient, a weight."""

import json
from pathlib import Path

import pytest

from moe_rl.report.lines import read_run
from tests.support.one_rank import alone

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_each_is_shown_where_it_is_nothing_moves_and_the_run_ends(tmp_path):
    overrides = [
        f"run.runs_dir={tmp_path}", "run.steps=6", "run.peer_timeout_seconds=100", "parallel.expert=1",
        "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.dynamic_sampling_rounds=1", "eval.prompts=2",
        "eval.every_steps=100", "checkpoint.every_steps=100", "train.updates_per_step=1",
        "train.optimizer.warmup_steps=1", "guards.max_skipped_updates=2", "guards.collapse_steps=0",
        "guards.alignment=false", "guards.max_canary_difference=1e9",  # the stand-in sampler makes random routes
    ]  # fmt: skip
    run = alone("tests/train/not_finite_run.py", tmp_path, "--config", "configs/tiny_moe_cpu.yaml", *overrides)
    assert run.returncode == 2, run.stderr[-4000:]
    # The updates with a bad gradient or weight were skipped and changed no bit; other updates did change bits.
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [(one["step"], one["same"]) for one in steps] == [(1, False), (2, False), (3, True), (4, True)]
    (folder,) = tmp_path.glob("tiny-moe-*")
    sound, logprob, gradient = read_run(folder).train  # a step that ends the run has no line in the log
    assert "nonfinite" not in sound and sound["optim/skipped"] == logprob["optim/skipped"] == 0
    of_sampler = [key for key in logprob if key.startswith(("policy_kl/", "policy/")) and not key.endswith("_native")]
    apart = {"policy/entropy", "policy/perplexity_train"}  # these metrics come from the trainer alone
    assert len(of_sampler) > 12 and {key for key in of_sampler if logprob[key] is not None} == apart
    assert gradient["optim/skipped"] == 1 and gradient["nonfinite"] == ["optim/grad_norm"]
    (told,) = [line for line in run.stderr.splitlines() if "NonFiniteError" in line]
    assert "step 4, update 0" in told
    assert "not finite: loss on rank 0, gradient on rank 0, gradient norm nan, weight on rank 0" in told
