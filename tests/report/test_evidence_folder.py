"""Evidence of a run: what is written is read, nothing is half there, it is bounded, and `moe-rl show` lists it."""

import dataclasses

import numpy as np
import pytest

from moe_rl.cli import main
from moe_rl.errors import DataError
from moe_rl.report import evidence_folder
from moe_rl.report.evidence_folder import KeptRows, KeptWeights
from tests.commands.test_explain import FACTS, Evidence
from tests.support.refusals import refused

KEPT = Evidence(**FACTS, weights=[KeptWeights(1, "weights/step-000001", True)], sequences=[KeptRows("s0", ((1, 3),))])


def keep(run, step, *, size=0, limit=1 << 20, time=0.0):
    """Keep evidence of a step with arrays of about `size` bytes."""
    hidden = evidence_folder.begin(run, evidence_folder.name_of(step, "Equal layers!"))
    rows = {"0/tokens": np.arange(4, dtype=np.int32), "0/trainer_logits": np.zeros((3, size // 12, 1), np.float32)}
    evidence_folder.write(hidden, dataclasses.replace(KEPT, step=step, time=time), rows)
    return evidence_folder.publish(hidden, limit)


def test_what_is_written_is_read(tmp_path):
    folder = keep(tmp_path, 3, size=48)
    assert folder == tmp_path / "evidence/step000003-equal-layers"
    assert evidence_folder.read(folder) == dataclasses.replace(KEPT, step=3)
    (rows,) = evidence_folder.read_rows(folder, KEPT)
    assert rows["tokens"].tolist() == [0, 1, 2, 3] and rows["trainer_logits"].shape == (3, 4, 1)


def test_an_unfinished_folder_is_none_and_the_next_one_takes_its_place(tmp_path):
    hidden = evidence_folder.begin(tmp_path, "step000001-canary")
    (hidden / "evidence.json").write_text("{")
    assert evidence_folder.folders(tmp_path) == []
    other = evidence_folder.begin(tmp_path, "step000002-alignment")
    assert not hidden.exists()  # a killed process left it
    evidence_folder.abandon(other)
    assert list(evidence_folder.begin(tmp_path, "step000001-canary").iterdir()) == []
    evidence_folder.abandon(hidden)
    assert list((tmp_path / "evidence").iterdir()) == []


def test_a_step_that_ends_again_keeps_both(tmp_path):
    assert [keep(tmp_path, 3).name for _ in range(2)] == ["step000003-equal-layers", "step000003-equal-layers-2"]


def test_the_oldest_evidence_makes_room(tmp_path):
    sizes = [evidence_folder.size_of(keep(tmp_path, step, size=4000, limit=10_000)) for step in (1, 2, 3)]
    kept = evidence_folder.folders(tmp_path)
    assert [folder.name[:10] for folder in kept] == ["step000002", "step000003"]
    assert sum(sizes[1:]) <= 10_000 < sum(sizes)


def test_the_newest_is_the_same_in_a_copy_of_the_run(tmp_path):
    made = [keep(tmp_path, step, time=time) for step, time in ((1, 30.0), (2, 10.0), (3, 20.0))]
    assert evidence_folder.folders(tmp_path) == [made[1], made[2], made[0]]


def test_arrays_that_do_not_fit_each_other_are_named(tmp_path):
    folder = keep(tmp_path, 1, size=48)
    longer = dataclasses.replace(KEPT, sequences=[*KEPT.sequences, KeptRows("s1", ((1, 3),))])
    with refused(DataError, "no arrays", file=str(folder / "rows.safetensors"), request="s1"):
        evidence_folder.read_rows(folder, longer)
    rows = {"0/tokens": np.arange(5, dtype=np.int32), "0/record": np.zeros((3, 1, 2), np.uint16)}
    evidence_folder.write(folder, KEPT, rows)
    with refused(DataError, "tokens (5,), record (3, 1, 2)", request="s0"):
        evidence_folder.read_rows(folder, KEPT)


def test_show_goes_on_where_one_is_damaged(tmp_path, capsys):
    folders = [keep(tmp_path, step) for step in (1, 2)]
    (folders[0] / "evidence.json").write_text("{")
    assert main(["show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "evidence cannot be read" in printed and str(folders[1]) in printed


def test_damaged_files_are_named(tmp_path):
    folder = keep(tmp_path, 1)
    (folder / "rows.safetensors").write_bytes(b"\0" * 20)
    with refused(DataError, file=str(folder / "rows.safetensors")):
        evidence_folder.read_rows(folder, KEPT)
    (folder / "evidence.json").write_text('{"step": "one"}')
    with refused(DataError, file=str(folder / "evidence.json")):
        evidence_folder.read(folder)


@pytest.mark.parametrize("steps", [[1], [1, 2]])
def test_show_lists_it_even_where_no_step_has_ended(tmp_path, capsys, steps):
    folders = [keep(tmp_path, step) for step in steps]
    assert main(["show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(str(folder) in printed for folder in folders) and "moe-rl explain" in printed
