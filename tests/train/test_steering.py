"""Tests what a run may change on its way: its time, its length, its learning rate, its batch."""

import json

import pytest

from moe_rl.config.load import load_config
from moe_rl.report.history import read_history
from moe_rl.report.lines import read_run
from moe_rl.report.run_page import write_report
from moe_rl.train.peers import STOPPED
from tests.train.stand_in_run import begin, resume

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    """A run whose time is used after a step, that goes on to its end with other settings, and then further."""
    runs = tmp_path_factory.mktemp("runs")
    falling = ("train.optimizer.schedule=linear", "train.optimizer.min_lr=2e-5", "train.optimizer.decay_steps=3")
    first, run = begin(runs, "run.steps=4", "run.max_hours=1e-5", *falling)
    again = ("run.max_hours=null", "run.steps=2", "eval.prompts=3", "rollout.prompts_per_step=4")
    second = resume(run, *again)
    assert second.returncode == 0, second.stderr[-3000:]
    ended = (run / "summary.json").exists()
    third = resume(run, "run.steps=4", "train.optimizer.lr=2e-4")
    assert third.returncode == 0, third.stderr[-3000:]
    return run, first, ended


@LONG
@pytest.mark.timeout(600)
def test_used_time_ends_a_run_behind_a_step_with_a_checkpoint(steered):
    run, first, _ = steered
    assert first.returncode == STOPPED, first.stderr[-3000:]
    assert "run.max_hours = 1e-05 and did after step 1, with a checkpoint" in first.stderr
    assert f"go on after step 1 with --resume {run}" in first.stderr


@LONG
def test_a_resumed_run_goes_on_with_what_was_changed(steered):
    run, _, ended = steered
    lines = read_run(run)
    assert ended and lines.series("optim/updates") == ([1, 2, 3, 4], [1, 2, 3, 4])
    # Without other settings: warm-up to 1e-4, then down over updates 2 and 3 to 2e-5, and no further.
    falls = [1e-4, 1e-4 - 8e-5 / 3, 2e-4 - 18e-5 * 2 / 3, 2e-5]
    assert lines.series("optim/lr")[1] == pytest.approx(falls)
    assert lines.series("rollout/sequences")[1] == [4, 8, 8, 8]
    steps = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    assert [step["cursors"] for step in steps] == [[[0, 2]], [[2, 4]], [[6, 4]], [[10, 4]]]


@LONG
def test_the_history_and_the_report_say_what_was_changed(steered):
    run, _, _ = steered
    began, second, third = read_history(run)
    assert (began.after, began.ranks, began.device, began.changed) == (0, 1, "CPU", {})
    assert (second.after, third.after) == (1, 2)
    assert second.changed == {
        "run.steps": (4, 2),
        "run.max_hours": (1e-5, None),
        "rollout.prompts_per_step": (2, 4),
        "eval.prompts": (2, 3),
    }
    assert third.changed == {"run.steps": (2, 4), "train.optimizer.lr": (1e-4, 2e-4)}
    page = write_report(run).read_text()
    assert "<code>rollout.prompts_per_step</code> from <code>2</code> to <code>4</code>" in page


@LONG
@pytest.mark.timeout(300)
def test_a_new_run_starts_from_the_newest_checkpoint_of_another(steered, tmp_path):
    """A rate of almost 0 shows whose weights and moments it has: Adam's count goes on, the run's own begins."""
    run, _, _ = steered
    start = (f"model.from_run={run}", "model.from_optimizer=true", "run.seed=7")
    process, begun = begin(tmp_path, "run.steps=1", "train.optimizer.lr=1e-30", *start)
    assert process.returncode == 0, process.stderr[-3000:]
    assert f"version 0: the weights and optimizer of {run / 'checkpoints/step-000004'}" in process.stdout
    assert load_config(begun / "config.yaml").model.from_step == 4
    states = [json.loads((one / "state.json").read_text()) for one in (*begun.glob("checkpoints/*"),)]
    assert [(state["updates"], state["optimizer_step"]) for state in states] == [(1, 5)]
    assert [start.after for start in read_history(begun)] == [0]
