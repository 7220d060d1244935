"""Tests which causes engines can swap for a run, and why others cannot, without starting one."""

from pathlib import Path

import numpy as np
import pytest

from moe_rl.comparison.engine_runs import EngineRuns, _known
from moe_rl.config.load import load_config
from moe_rl.models.hf import read_model
from moe_rl.types import Sequence, sampled_by

CONFIG = Path("configs/tiny_moe_cpu.yaml")


def runs(folder, *overrides, prompt=20):
    config = load_config(CONFIG, list(overrides))
    one = Sequence(
        "s1/p0/c0", tuple(range(3, 3 + prompt)), (5, 6), np.zeros(2, np.float32), 0.0, sampled_by(0, 2), None
    )
    return EngineRuns(config, read_model(config.model.path), config.model.path, [one], folder)


def test_each_cause_can_be_tried_or_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = runs(tmp_path)
    assert set(found.changes) | set(found.untested) == set(EngineRuns.CAUSES)
    assert (
        found.changes["prefix cache"] == ["off"] and found.untested["eager or graph"] == "vLLM has no graphs on a CPU"
    )
    assert "prompt" in runs(tmp_path, prompt=8).untested["chunked prefill"]
    assert runs(tmp_path, "rollout.vllm.enable_prefix_caching=false").changes["prefix cache"] == ["on"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert runs(tmp_path).changes["eager or graph"] == ["graph"]
    assert runs(tmp_path, "rollout.cuda_graphs=true").changes["eager or graph"] == ["eager"]


@pytest.mark.parametrize(
    ("override", "why"), [("rollout.request_seeds=false", "request_seeds"), ("rollout.weights=fp8_e4m3", "fp8")]
)
def test_a_run_that_cannot_be_sampled_again_says_why(tmp_path, override, why):
    found = runs(tmp_path, override)
    assert found.changes == {} and all(why in found.untested[cause] for cause in EngineRuns.CAUSES)


def test_a_completion_is_known_up_to_the_first_other_token():
    logprobs = np.array([-0.5, -1.0, -2.0], np.float32)
    assert _known((5, 6, 7, 8), (5, 6, 9), logprobs) == pytest.approx([-0.5, -1.0, np.nan, np.nan], nan_ok=True)
    assert _known((5, 6), (5, 6, 9), logprobs) == pytest.approx([-0.5, -1.0])
    assert np.isnan(_known((5,), (), logprobs[:0])).all()
