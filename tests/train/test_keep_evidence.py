"""A whole run that a check ends keeps evidence, and `moe-rl explain` says who was right."""

import json

import pytest

from moe_rl.cli import main
from moe_rl.report import evidence_folder
from moe_rl.train.canary import Canary
from moe_rl.train.keep_evidence import _cut, of_canary
from moe_rl.types import ScoredTokens
from tests.train.stand_in_run import begin


@pytest.mark.timeout(300)
def test_a_run_that_is_ended_by_a_check_leaves_what_settles_it(tmp_path, capsys):
    """The stand-in sampler makes up its routes and log-probabilities: it computes with no weights of this run."""
    process, run = begin(tmp_path, "guards.alignment=true", "run.steps=2", "rollout.prompts_per_step=16")
    assert process.returncode == 2, process.stderr[-4000:]
    (told,) = [line for line in process.stderr.splitlines() if "ReplayError" in line]
    (folder,) = evidence_folder.folders(run)
    assert folder.name == "step000001-alignment" and str(folder) in told and "staleness 0, power" in told
    kept = evidence_folder.read(folder)
    assert (kept.version, kept.lr, kept.staleness) == (0, None, 0) and kept.power is not None
    assert [one.path for one in kept.weights] == ["weights/step-000000"] and len(kept.sequences) == 32
    # What the trainer was to replay is the record.
    for rows in evidence_folder.read_rows(folder, kept):
        assert rows["applied"].tolist() == rows["record"].tolist()
    assert main(["show", str(run)]) == 0 and str(folder) in capsys.readouterr().out
    assert main(["explain", str(run), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["verdict"] == "weights" and found["replayed_others"] == 0
    assert found["trainer"]["differ"] == 0 and found["sampler"][0]["differ"] > 0


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
    assert of_canary(canary, 3, "other")[0].record is None
    assert [(span.weight_version, span.tokens) for span in of_canary(canary, 3)[0].versions] == [(3, 2)]
