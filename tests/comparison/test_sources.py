"""Tests which rollouts can be compared on-policy, which weights score them later, and which a sampler gets."""

from types import SimpleNamespace

import pytest

from moe_rl.comparison import sources
from moe_rl.comparison.sources import LiveSampler, Weights, in_precision, initial, of_run, precision_of
from moe_rl.config.load import load_config
from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.errors import CheckpointError, DataError
from moe_rl.train.run_folder import RunFolder
from tests.support.refusals import refused

DEMO = load_config("tiny_moe_cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return make(steps with rollouts, steps with checkpoints), which makes such a run folder."""

    def make(steps, checkpoints):
        for done in checkpoints:
            (tmp_path / f"checkpoints/step-{done:06d}").mkdir(parents=True)
        (tmp_path / "trace").mkdir()
        monkeypatch.setattr(sources.KeptRollouts, "steps", lambda self: steps)
        return RunFolder(tmp_path)

    return make


@pytest.mark.parametrize(
    ("steps", "checkpoints", "step", "versions"),
    [
        ([1], [], 1, [0]),
        ([1, 2], [2], 1, [0, 2]),
        ([1, 21, 31, 37, 38, 39, 40], [20, 30, 40], 31, [30, 40]),
        ([1, 3, 4], [2, 4], 3, [2, 4]),
        ([1, 5], [1, 3], 1, [0, 1, 3]),
    ],
)
def test_the_newest_step_whose_own_weights_are_kept(folder, steps, checkpoints, step, versions):
    run = folder(steps, checkpoints)
    got, weights = of_run(run, DEMO)
    assert got == step and [w.version for w in weights] == versions
    assert weights[0] == Weights(step - 1, run.checkpoints / f"step-{step - 1:06d}" if step > 1 else None)


def test_the_first_weights_are_those_of_the_run_that_it_started_from(folder):
    run = folder([1], [2, 4])
    start = DEMO.model.model_copy(update={"from_run": run.path, "from_step": 2})
    begun = DEMO.model_copy(update={"model": start})
    assert initial(begun) == Weights(0, run.checkpoints / "step-000002") and initial(DEMO) == Weights(0, None)
    assert of_run(run, begun)[1][0] == initial(begun)
    begun = DEMO.model_copy(update={"model": start.model_copy(update={"from_step": 3})})
    with refused(CheckpointError, folder=run.checkpoints):
        initial(begun)


@pytest.mark.parametrize(("steps", "checkpoints"), [([], [2]), ([4, 5], [2]), ([], [])])
def test_without_such_a_step_there_is_nothing_to_compare(folder, steps, checkpoints):
    run = folder(steps, checkpoints)
    with refused(DataError, folder=run.path, got=(f"steps {steps}", f"steps {checkpoints}")):
        of_run(run, DEMO)


def test_a_precision_is_what_the_sampler_holds_and_computes_in():
    rollout = RolloutConfig(prompts_per_step=1, group_size=2, max_prompt_tokens=4, max_completion_tokens=4)
    named = {name: in_precision(rollout, name) for name in ("bfloat16", "float32", "fp8")}
    assert [(r.dtype, r.weights) for r in named.values()] == [
        ("bfloat16", "exact"), ("float32", "exact"), ("bfloat16", "fp8_e4m3")
    ]  # fmt: skip
    assert [precision_of(r) for r in named.values()] == ["bfloat16", "float32", "fp8 weights, bfloat16"]
    assert in_precision(named["fp8"], "bfloat16") == rollout


ADAPTERS = "train.lora={rank: 8, alpha: 16%s}"


@pytest.mark.parametrize(
    ("override", "version", "precision", "sent"),
    [
        ("run.seed=1", 0, "bfloat16", []),
        (ADAPTERS % "", 0, "bfloat16", []),
        (ADAPTERS % ", start: adapters", 0, "bfloat16", [0]),
        ("model.from_run=other", 0, "bfloat16", [0]),
        ("run.seed=1", 0, "fp8", [0]),
        ("run.seed=1", 3, "bfloat16", [3]),
    ],
)
def test_a_sampler_gets_the_weights_that_it_has_not_loaded(monkeypatch, tmp_path, override, version, precision, sent):
    got = []
    sender = SimpleNamespace(send=lambda engine, version: got.append(version))
    for name, stand_in in {
        "dist": SimpleNamespace(get_rank=lambda: 0),
        "world": SimpleNamespace(broadcast=lambda value, kind: value),
        "VllmEngine": lambda settings: settings,
        "Blocking": lambda settings: SimpleNamespace(close=lambda: None),
        "engine_settings": lambda config, facts, folder: None,
        "WeightSender": lambda *about: sender,
    }.items():
        monkeypatch.setattr(sources, name, stand_in)
    config = load_config("tiny_moe_cpu", [override])
    LiveSampler(config, None, None, version=version, precision=precision, folder=tmp_path / "out").close()
    assert got == sent
    assert config.starts_from_model == (sent == [] or override == "run.seed=1")
