"""Whole runs of configs/reasoning_gym_cpu.yaml: generators, a chat template, a trainer in float32."""

import json

import pytest

from tools.dev.runs import Launch, rows

pytestmark = pytest.mark.long


def test_three_generators_and_a_chat_template(tmp_path):
    pytest.importorskip("reasoning_gym")
    overrides = ["run.steps=2", "rollout.prompts_per_step=12", "eval.prompts=8", "rollout.kv_cache_mib=64"]
    overrides += [f"run.runs_dir={tmp_path}", "report.samples_per_step=96"]
    run = Launch(tmp_path, "--config", "configs/reasoning_gym_cpu.yaml", *overrides)
    assert run.wait() == 0, run.text()[-4000:]
    steps = [row for row in rows(run.folder) if row["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["routing/applied_mismatch"] == 0 and step["routing/coverage"] == 1
        assert step["reward/failed_verdicts"] == 0
        assert 0 < step["reward/part/gym"] < 1
        # The sampler computes in bfloat16, so its routers sometimes choose otherwise.
        assert step["routing/shadow_mismatch"] > 0
    evaluations = [row for row in rows(run.folder) if row["kind"] == "eval"]
    for source in ("sums", "backward", "letters"):
        assert all(f"eval/source/{source}" in row for row in evaluations)
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert all(one["prompt"].startswith("<|user|>") and one["prompt"].endswith("<|assistant|>") for one in samples)
    assert any("</answer>" in one["completion"] for one in samples)
