"""A whole run that a check ends keeps evidence, and `moe-rl explain` says who was right."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_rl.cli import main
from moe_rl.report import evidence_folder
from moe_rl.train.canary import Canary
from moe_rl.train.keep_evidence import _cut, _Keeping, of_canary
from moe_rl.train.run_folder import RunFolder
from moe_rl.types import ScoredTokens
from tests.support.one_rank import alone
from tests.train.stand_in_run import OVERRIDES


@pytest.mark.timeout(300)
def test_a_run_that_is_ended_by_a_check_leaves_what_settles_it(tmp_path, capsys):
    """The stand-in sampler makes up its routes and log-probabilities: it computes with no weights of this run."""
    config = ["--config", "configs/tiny_moe_cpu.yaml", *OVERRIDES, f"run.runs_dir={tmp_path}", "rollout.dtype=float32"]
    process = alone("tests/train/refused_run.py", *config)
    assert process.returncode == 2, process.stderr[-4000:]
    (run,) = tmp_path.glob("tiny-moe-*")
    (told,) = [line for line in process.stderr.splitlines() if "ReplayError" in line]
    (folder,) = evidence_folder.folders(run)
    assert folder.name == "step000001-checksum" and str(folder) in told
    kept = evidence_folder.read(folder)
    assert (kept.step, kept.version, kept.lr, kept.staleness) == (1, 0, None, 0)
    assert [one.path for one in kept.weights] == ["weights/step-000000"] and len(kept.sequences) == 4
    assert all("record" in rows for rows in evidence_folder.read_rows(folder, kept))
    assert main(["show", str(run)]) == 0 and str(folder) in capsys.readouterr().out
    assert main(["explain", str(run), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] == "recorder" and len(found["damaged"]) == 4
    assert found["trainer"]["differ"] == 0 and found["sampler"][0]["differ"] > 0


def test_a_version_is_kept_beside_what_some_updates_made_of_it(tmp_path):
    """A check refuses the second update of step 3: its rows were sampled by version 2, and the trainer has moved on."""
    own, sampled = tmp_path / "evidence/.x.tmp/weights/step-000002", tmp_path / "checkpoints/step-000002"
    for folder, text in ((own, "updated"), (sampled, "sampled")):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(text)
    keeping = _Keeping.__new__(_Keeping)
    keeping.folder, keeping.limit = RunFolder(tmp_path), 1 << 20
    keeping.config = SimpleNamespace(model=SimpleNamespace(from_run=None, path="model"))
    keeping.evidence = SimpleNamespace(left_out=[])
    hidden = own.parents[1]
    (kept,) = keeping._older(hidden, 0, {2})
    assert (kept.version, kept.updates, kept.published) == (2, 0, False) and keeping.evidence.left_out == []
    assert (hidden / kept.path / "state.json").read_text() == "sampled"
    assert (own / "state.json").read_text() == "updated"


def test_weights_that_do_not_fit_are_named_where_a_moved_run_still_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/mine")  # run.runs_dir may be relative
    hidden, saved = run / "evidence/.x.tmp", run / "checkpoints/step-000002"
    for folder in (hidden, saved):
        folder.mkdir(parents=True)
    (saved / "state.json").write_text("sampled")
    keeping = _Keeping.__new__(_Keeping)
    keeping.folder, keeping.limit = RunFolder(run), 0
    (kept,) = keeping._older(hidden, 0, {2})
    shutil.move(run, tmp_path / "moved")
    assert (tmp_path / "moved/evidence/.x.tmp" / kept.path / "state.json").read_text() == "sampled"


@pytest.mark.parametrize(
    "spans, rows, ahead, kept",
    [
        (((1, 4), (1, 3)), 7, False, ((1, 7),)),
        (((1, 4), (2, 3)), 5, False, ((1, 4), (2, 1))),
        (((1, 4), (2, 3)), 4, False, ((1, 4),)),
        (((1, 2), (3, 2)), 9, True, ((1, 7), (3, 2))),  # the sampled tokens alone: five rows lie before them
        ((), 3, True, ()),
    ],
)
def test_the_versions_of_the_first_rows(spans, rows, ahead, kept):
    assert _cut(spans, rows, ahead=ahead) == kept


def test_the_canary_of_the_sampler_that_was_refused_is_kept():
    canary = Canary([(1, 2, 3), (4, 5)], None, None)
    canary.scored = [ScoredTokens([[0.0, 0.0], [0.0]], [], by) for by in ("one", "other")]
    assert [one.key for one in of_canary(canary, 3)] == ["canary/0", "canary/1"]
    assert of_canary(canary, 3, "other")[0].record is None and of_canary(canary, 3)[0].plain
    assert [(span.weight_version, span.tokens) for span in of_canary(canary, 3)[0].versions] == [(3, 2)]
