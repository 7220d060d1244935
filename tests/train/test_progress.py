"""Tests which evaluation is the best one, and when a run has trained enough: alone, and in a run that is resumed."""

import json
import shutil
from pathlib import Path

import pytest

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.schema import EvalConfig
from moe_rl.report.lines import read_run
from moe_rl.train.keeping import Progress
from tests.train.stand_in_run import begin, resume

KEY = "eval/pass_rate"


def progress(values, **settings):
    found = Progress(EvalConfig(best=KEY, **settings), [KEY])
    for step, value in enumerate(values):
        found.add(10 * step, {KEY: value, "eval/low/pass_rate": 0.0})
    return found


@pytest.mark.parametrize(
    ("values", "min_gain", "best", "ends_with_patience"),
    [
        ([0.1], 0, 0, 0),
        ([0.1, 0.2, 0.3], 0, 20, 0),  # every one gains
        ([0.3, 0.2, 0.1], 0, 0, 2),  # the policy that the run began with is the best
        ([0.1, 0.3, 0.3, 0.3], 0, 10, 2),  # an equal one is no gain, and the first of equal ones is the best
        ([0.1, 0.2, 0.1, 0.3], 0, 30, 0),  # the last one gains: the count begins anew
        ([0.5, 0.54, 0.58, 0.62], 0.1, 30, 0),  # small gains add up
        ([0.5, 0.54, 0.58], 0.1, 20, 2),  # not enough yet, but the best all the same
        ([0.5, 0.75, 0.7, None, float("nan"), 0.7], 0.25, 10, 2),  # what was not measured is neither
    ],
)
def test_patience_counts_evaluations_since_the_last_gain(values, min_gain, best, ends_with_patience):
    assert progress(values, patience=1, min_gain=min_gain).best_step == best
    for patience in range(1, 5):
        found = progress(values, patience=patience, min_gain=min_gain)
        assert bool(found.why_end()) == (patience <= ends_with_patience)
        again = progress([], patience=patience, min_gain=min_gain)
        again.restore(json.loads(json.dumps(found.state(), allow_nan=False)))
        assert (again.best, again.why_end()) == (found.best, found.why_end())
    assert progress(values).why_end() == ""


def test_another_metric_counts_from_its_first_evaluation():
    found = Progress(EvalConfig(best="eval/source/a", patience=1), [KEY, "eval/source/a"])
    for step, metrics in enumerate([{KEY: 0.9}, {KEY: 0.5, "eval/source/a": 0.1}, {KEY: 0.4, "eval/source/a": 0.1}]):
        found.add(step, metrics)
    assert found.best == (1, 0.1) and found.why_end()
    assert Progress(EvalConfig(), [KEY]).best is None


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of at most 9 steps with patience. The stand-in sampler's answers change with the version of its weights."""
    ours = (f"eval.best={KEY}", "eval.patience=3", "eval.every_steps=1", "eval.prompts=16", "task.heldout.0.samples=2")
    runs = tmp_path_factory.mktemp("runs")
    process, run = begin(runs, "run.steps=9", *ours, "checkpoint.every_steps=2", "checkpoint.keep=2")
    assert process.returncode == 0, process.stderr[-3000:]
    return process, run


def evaluations(run):
    return dict(zip(*read_run(run).series(KEY, "eval"), strict=True))


def kept(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_has_trained_enough_ends_and_names_its_best_checkpoint(ended):
    process, run = ended
    found = evaluations(run)
    last, best = max(found), max(found, key=lambda step: (found[step], -step))
    assert 3 < last < 9 and 0 < best == last - 3  # a later gain than the first, and not the newest checkpoint
    assert kept(run)[0] == "best" and checkpoints.find(run / "checkpoints", "best").name == f"step-{best:06d}"
    assert f"ended after step {last}: {KEY} did not rise in 3 evaluations" in process.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["heldout_best_step"], summary["heldout_best"]) == (best, found[best])
    low, rate, high = summary["heldout_rates_last"]["pass_rate"]
    assert low < rate == found[last] < high
    assert summary["ended_early"] and f"ended early: {KEY}" in (run / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_decides_as_the_run_without_the_kill(ended, tmp_path):
    """What a kill after the last evaluation leaves: its line, but not its checkpoint."""
    run = Path(shutil.copytree(ended[1], tmp_path / "killed", symlinks=True))
    shutil.rmtree(checkpoints.find(run / "checkpoints"))
    (run / "checkpoints/best").unlink()
    again = resume(run)
    assert again.returncode == 0, again.stderr[-3000:]
    assert evaluations(run) == evaluations(ended[1]) and kept(run) == kept(ended[1])
    state, expected = (
        json.loads((checkpoints.find(one / "checkpoints") / "state.json").read_text()) for one in (run, ended[1])
    )
    assert state["evaluations"] == expected["evaluations"]
    assert [step for step, _ in state["evaluations"]] == list(evaluations(run))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_more_patience_goes_on_and_the_best_one_can_be_gone_back_to(ended, tmp_path):
    run = Path(shutil.copytree(ended[1], tmp_path / "patient", symlinks=True))
    last, best = max(evaluations(run)), checkpoints.step_of(checkpoints.find(run / "checkpoints", "best"))
    same = resume(run)
    assert same.returncode == 0 and f"ended after step {last}" in same.stdout and max(evaluations(run)) == last
    more = resume(run, "eval.patience=4", f"run.steps={last + 1}")
    assert more.returncode == 0 and max(evaluations(run)) == last + 1, more.stderr[-3000:]
    back = resume(run, "--step", "best")
    assert back.returncode == 0 and f"resumed after step {best};" in back.stdout, back.stderr[-3000:]
    assert f"step-{last + 1:06d}.abandoned" in kept(run)
