"""Tests `moe-rl report`: of a run that goes on, and of several runs."""

import pytest

from moe_rl import cli
from moe_rl.report.lines import FILE, encode
from moe_rl.report.run_config import differing
from moe_rl.report.runs_page import MOST

CONFIG = "run: {{name: a, steps: 40, seed: {seed}}}\ntrain: {{optimizer: {{lr: {lr}}}}}\n"


@pytest.fixture
def write_run(tmp_path):
    """Return write_run(name, seed, lr, rewards), which makes the folder of a run that has made so many steps."""

    def run(name, seed, lr, rewards):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG.format(seed=seed, lr=lr))
        rows = [encode(0, "eval", {"eval/pass_rate": 0.25})]
        rows += [encode(step, "train", {"reward/mean": one, "optim/lr": lr}) for step, one in enumerate(rewards, 1)]
        rows.append(encode(len(rewards), "eval", {"eval/pass_rate": rewards[-1]}))
        (folder / FILE).write_text("".join(rows))
        return folder

    return run


def test_a_run_that_goes_on_has_a_report(write_run, capsys):
    run = write_run("first", 1, 1e-4, [0.5, 0.75])
    with (run / FILE).open("a") as file:
        file.write('{"step": 3, "ki')  # the run is writing it
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    assert "2 of 40 steps" in page and "it is still running" in page and "75.0%" in page


def test_several_runs_are_put_side_by_side(write_run, tmp_path, capsys):
    first, second = write_run("first", 1, 1e-4, [0.5, 0.75]), write_run("second", 2, 1e-4, [0.4, 0.35, 0.3])
    out = tmp_path / "both.html"
    assert cli.main(["report", str(first), str(second), "--out", str(out)]) == 0
    page = out.read_text()
    assert f"run 1: {first}" in page and f"run 2: {second}" in page
    assert "<code>run.seed</code>" in page and "train.optimizer.lr" not in page
    steps = page[page.index("<td>Steps</td>") :]
    assert [cell.partition("<")[0] for cell in steps.split('<td class="n">')[1:3]] == ["2", "3"]
    assert "run 1, after step 2; the lowest is 30.0%" in page
    assert "Last values: run 1 0.75, run 2 0.3." in page and "Last values: run 1 75.0%, run 2 30.0%." in page
    assert page.count("<svg") == 3  # held-out pass rate, reward, learning rate
    assert not list(first.glob("*.html")), "the runs stay as they are"


def test_keys_that_one_config_lacks_differ():
    assert differing([{"a": 1, "b": 2}, {"a": 1, "c": [3]}]) == [("b", [2, None]), ("c", [None, [3]])]


@pytest.mark.parametrize("arguments", [["{run}/no"], ["{run}", "--out", "x.html"], ["{run}"] * (MOST + 1)])
def test_what_cannot_be_reported_is_refused(write_run, capsys, arguments):
    run = write_run("first", 1, 1e-4, [0.5])
    assert cli.main(["report", *(one.format(run=run) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert "RUN" in told or "--out" in told
    assert not list(run.glob("*.html"))
