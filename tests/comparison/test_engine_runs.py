"""Tests which causes engines can swap for a run, and why others cannot, and that planted ones are found, without
starting an engine."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.comparison import engine_runs
from moe_rl.comparison.bisection import Computation, bisect, text
from moe_rl.comparison.engine_runs import DEGREE, EngineRuns, _known
from moe_rl.comparison.run_sides import Added
from moe_rl.config.load import load_config
from moe_rl.models.hf import read_model
from moe_rl.types import Sequence, sampled_by
from tests.support.pretend_engines import VALUE, PretendEngines

CONFIG = Path("configs/tiny_moe_cpu.yaml")
CLUSTER = ["cluster={gpus: 1, gpu_memory_gib: 79, gpus_per_engine: 2}"]


def runs(folder, *overrides, prompt=20, count=1, sampled=2):
    config = load_config(CONFIG, list(overrides))
    tokens, none = tuple(range(5, 5 + sampled)), np.zeros(sampled, np.float32)
    sequences = [
        Sequence(f"s1/p{at}/c0", tuple(range(3, 3 + prompt)), tokens, none, 0.0, sampled_by(0, sampled), None)
        for at in range(count)
    ]
    return EngineRuns(config, read_model(config.model.path), config.model.path, sequences, folder)


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


@pytest.mark.parametrize(
    ("causes", "kind"),
    [
        *(([cause], "suspected") for cause in VALUE if cause != DEGREE),
        *(([cause], "changed") for cause in VALUE if cause not in ("prefix cache", DEGREE)),
        (["prefix cache", "batch composition"], "suspected"),
        ([DEGREE], "other degree"),
    ],
)
def test_a_cause_that_only_an_engine_shows_is_found(tmp_path, monkeypatch, causes, kind):
    """suspected: the run's engine was in a state that a fresh one with its settings is not in. changed: each engine
    with the run's settings has the fault, and none without them. other degree: the run's engines had two devices."""
    rng, count, length = np.random.default_rng(0), 12, 10
    base, noise = rng.normal(-1, 0.3, (count, length)), rng.normal(0, 1e-4, (count, length))
    keys = [f"s1/p{at}/c0" for at in range(count)]
    completions = {key: (range(5, 5 + length), one) for key, one in zip(keys, base, strict=True)}
    planted = PretendEngines(causes, completions, kind)
    planted.install(monkeypatch)
    monkeypatch.setattr(engine_runs.patches, "inspect", lambda: SimpleNamespace(summary="patched"))
    engines = runs(tmp_path, *CLUSTER * (kind == "other degree"), count=count, sampled=length)
    run, recorded = Added(lambda _: list(base + 1e-3)), [*map(planted.recorded, keys)]
    run.add_engines(engines, recorded)
    found = bisect(
        Computation(run.settings, run, recorded, engines.suspects, engines.changes),
        Computation({}, lambda _: list(base), list(base + noise)),
        untested=engines.untested,
    )
    assert {(atom.cause, atom.kind, atom.value) for one in found.causes for atom in one.swap} == {
        (cause, "changed" if cause == DEGREE else kind, VALUE[cause]) for cause in causes
    }, text(found)
    assert {one.verdict for one in found.causes} == {"carries"} and found.explained
    assert planted.started == 1 + sum(map(len, engines.suspects.values()))
    assert kind == "other degree" or f"not tested: {DEGREE}: the run's engines have one device" in text(found)
