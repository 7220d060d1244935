"""`moe-rl compare --bisect` on a real run: what vLLM sampled is declared otherwise, and engines start again."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from moe_rl.cli import main
from moe_rl.comparison import engine_runs, run_sides, trainer_scores
from moe_rl.comparison.bisection import Computation
from moe_rl.comparison.third_engine import PARTS
from moe_rl.comparison.trainer_scores import TrainerScores
from moe_rl.config.layout import on_one_rank
from moe_rl.config.load import dump_config, load_config
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceStore
from tests.end_to_end.conftest import Launch
from tests.support.pretend_engines import VALUE, PretendEngines
from tools.dev.runs import python_path

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that kept every version of its weights."""
    runs = tmp_path_factory.mktemp("bisected")
    sizes = ["run.steps=4", "rollout.prompts_per_step=32", "eval.prompts=64"]
    keeps = ["checkpoint.every_steps=1", "checkpoint.keep=4"]
    launch = Launch(runs, "--config", "configs/tiny_moe_cpu.yaml", f"run.runs_dir={runs}", *sizes, *keeps)
    assert launch.wait() == 0, launch.text()[-4000:]
    (folder,) = (path.parent for path in runs.glob("*/config.yaml"))
    return folder


@pytest.fixture
def bisected(trained, tmp_path, monkeypatch, capsys):
    """What is found on a copy of a run whose config declares these settings."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def bisected(*declared, options=(), alter=lambda run: None):
        run = tmp_path / "run"
        shutil.copytree(trained, run)
        alter(run)
        (run / "config.yaml").write_text(dump_config(load_config(run / "config.yaml", declared)))
        status = main(["compare", "--bisect", str(run), *options, "--json", str(tmp_path / "found.json")])
        found = json.loads((tmp_path / "found.json").read_text())
        assert found == json.loads((run / "bisection.json").read_text())
        return status, found, capsys.readouterr().out

    return bisected


def test_a_temperature_that_the_sampler_did_not_have_is_found(bisected, monkeypatch):
    """The run sampled at 1; its config, and so the trainer, says 0.9."""
    monkeypatch.setattr(trainer_scores, "_SEQUENCES", 96)
    status, found, said = bisected("rollout.temperature=0.9")
    cause, *further = found["causes"]
    (atom,) = cause["swap"]
    assert cause["verdict"] == "carries" and status == 0, said
    assert {one["cause"] for other in further for one in other["swap"]} <= set(PARTS)  # the sampler's bfloat16
    assert (atom["side"], atom["cause"], atom["value"]) == ("sampler", "temperature", 1.0)
    assert found["remaining"]["value"] < found["kl"]["value"] / 4
    assert found["fit"]["trainer"] < 1e-10  # transformers computes what Megatron does
    assert found["untested"]["prefix cache"] == "needs --engines"


def test_a_trainer_that_does_not_replay_is_found(bisected, monkeypatch):
    """The sampler is taken to have computed in float32 what the third engine does: in bfloat16 each kind of processor
    rounds otherwise."""

    def exact(settings, run, measured, *rest):
        return Computation(settings, run, None if settings["routes"] == "recorded" else measured, *rest)

    monkeypatch.setattr(run_sides, "Computation", exact)
    monkeypatch.setattr(trainer_scores, "_SEQUENCES", 64)
    status, found, said = bisected("replay.mode=off", "rollout.dtype=float32")
    (cause,) = found["causes"]
    (atom,) = cause["swap"]
    assert (atom["cause"], atom["kind"], atom["value"]) == ("routes", "matched", "recorded"), said
    assert cause["verdict"] == "carries" and status == 0, said
    assert found["remaining"]["value"] < min(1e-9, found["kl"]["value"] / 1000), said


def of_precision(found):
    """Whether the sampler's bfloat16 carries KL, or is named as what remains: some processors round as the third engine
    does, token by token, and some do not."""
    rows = [(one["verdict"], {atom["cause"] for atom in one["swap"]}) for one in [*found["causes"], *found["others"]]]
    return any(verdict in ("carries", "either", "size only") and causes & set(PARTS) for verdict, causes in rows)


def test_engines_and_ranks_that_start_again_carry_nothing(bisected):
    """Engines with one other setting, and one rank in place of two, compute the same on a CPU; but some processors
    multiply bfloat16 matrices of other sizes in another order."""
    _, found, said = bisected(options=["--engines"])
    changed = {one["swap"][0]["cause"]: one for one in found["others"] if one["swap"][0]["kind"] == "changed"}
    batched = changed.pop("batch composition")
    assert batched["verdict"] in ("nothing", "no") and batched["makes"] < found["kl"]["value"] / 10, said
    assert changed.keys() >= {"prefix cache", "engine patch", "layout"}, said
    assert {one["verdict"] for one in changed.values()} == {"nothing"} and all(
        not one["makes"] for one in changed.values()
    )
    assert {atom["cause"] for one in found["causes"] for atom in one["swap"]} <= set(PARTS) and of_precision(found), (
        said
    )


@pytest.mark.parametrize(
    "cause",
    [
        pytest.param(cause, marks=pytest.mark.nightly if number else ())
        for number, cause in enumerate(sorted(set(VALUE) - {engine_runs.DEGREE}))
    ],
)
def test_a_cause_that_only_an_engine_shows_is_named(bisected, monkeypatch, cause):
    """The kept log-probabilities of the run are those of an engine that had the cause. Pretend engines take the place
    of vLLM's; the trainer is real."""

    def alter(run):
        kept = KeptRollouts(run / "rollouts", TraceStore(run / "trace"))
        batches = {step: kept.load(step) for step in kept.steps()}
        every = [one for batch in batches.values() for one in batch.sequences]
        planted = PretendEngines([cause], {one.key: (one.token_ids, one.rollout_logprobs) for one in every})
        planted.install(monkeypatch)
        for step, batch in batches.items():
            altered = [replace(one, rollout_logprobs=planted.recorded(one.key), seal="") for one in batch.sequences]
            kept.save(step, replace(batch, sequences=altered))

    monkeypatch.setattr(engine_runs, "PIECE", 2)  # the prompts of this task are short
    monkeypatch.setattr(trainer_scores, "_SEQUENCES", 32)
    monkeypatch.setattr(run_sides, "least_ranks", lambda parallel: 1)
    status, found, said = bisected(options=["--engines"], alter=alter)
    (atom,) = found["causes"][0]["swap"]
    assert (atom["side"], atom["cause"], atom["kind"]) == ("sampler", cause, "suspected"), said
    assert status == 0 and "not tested: engine's parallel degree" in said


# Makes the logits of vLLM engines depend on how they run.
PLANT = """
import importlib.machinery, sys
config = None
def keep_config(module):
    begin = module.EngineCore.__init__
    def begun(self, vllm_config, *a, **k):
        global config
        config = vllm_config
        begin(self, vllm_config, *a, **k)
    module.EngineCore.__init__ = begun
def plant(module):
    forward = module.Sampler.forward
    def planted(self, logits, *a, **k):
        return forward(self, logits * (1.2 if {condition} else 1), *a, **k)
    module.Sampler.forward = planted
changed = {{"vllm.v1.engine.core": keep_config, "vllm.v1.sample.sampler": plant}}
class Finder:
    def find_spec(name, path, target=None):
        if change := changed.get(name):
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))
            return spec
sys.meta_path.insert(0, Finder)
"""
WHEN = {
    "batch composition": "len(logits) > 1",
    "prefix cache": "config.cache_config.enable_prefix_caching",
    "engine patch": "'moe_rl' in config.additional_config",
}


@pytest.mark.nightly
@pytest.mark.parametrize("cause", WHEN)
def test_a_cause_in_real_engines_is_named(tmp_path, monkeypatch, capsys, cause):
    """The run and the bisection start vLLM engines that have the fault."""
    (tmp_path / "sitecustomize.py").write_text(PLANT.format(condition=WHEN[cause]))
    sizes = ["run.steps=1", "train.optimizer.warmup_steps=0", "rollout.prompts_per_step=16", "eval.prompts=64"]
    arguments = ["--config", "configs/tiny_moe_cpu.yaml", *sizes, f"run.runs_dir={tmp_path}"]
    launch = Launch(tmp_path, *arguments, environment=python_path(tmp_path))
    assert launch.wait() == 0, launch.text()[-4000:]
    (run,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run_sides, "least_ranks", lambda parallel: 1)
    monkeypatch.setattr(trainer_scores, "_SEQUENCES", 32)
    status = main(["compare", "--bisect", str(run), "--engines"])
    said, found = capsys.readouterr().out, json.loads((run / "bisection.json").read_text())
    (atom,) = found["causes"][0]["swap"]
    assert (atom["side"], atom["cause"], atom["kind"]) == ("sampler", cause, "changed"), said
    assert status == 0


def test_a_parallel_degree_of_the_trainer_is_named(bisected, monkeypatch):
    """The ranks of the run's layout compute something else than one rank does."""
    rng = np.random.default_rng(0)

    def in_layout(config, run, step, version, trained, ranks, out):
        alone = TrainerScores(on_one_rank(config), run, step, version, trained).of(config.train.microbatch_tokens)
        return [one + rng.normal(0, 0.05, len(one)) for one in alone]

    monkeypatch.setattr(run_sides, "in_layout", in_layout)
    monkeypatch.setattr(trainer_scores, "_SEQUENCES", 32)
    monkeypatch.setattr(run_sides.EngineRuns, "_why_none", lambda self: "not here")
    status, found, said = bisected(options=["--engines"])
    (atom,) = found["causes"][0]["swap"]
    assert (atom["side"], atom["cause"], atom["value"]) == ("trainer", "layout", "one rank"), said
    assert status == 0 and "not tested: prefix cache: not here" in said
