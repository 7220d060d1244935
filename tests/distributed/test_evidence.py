"""What the ranks keep together when a check refuses on one of them: the same under every layout."""

import functools

import numpy as np
import pytest

from tests.distributed.jobs import canary, evidence

USUAL = ["EP2"]


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint, tmp_path_factory):
    """seen(layout) -> what each rank saw."""
    return functools.cache(
        lambda layout: on_ranks(2, evidence.run, layout, checkpoint, tmp_path_factory.mktemp("evidence"))
    )


@pytest.mark.parametrize("case", canary.LAYOUTS)
def test_all_ranks_keep_weights_and_rows_and_say_where(seen, case):
    first, second = seen(case)
    assert "planted" in first["said"] and "rank 1" in first["said"] and "planted" in second["said"]
    assert first["notes"] == second["notes"] and first["folder"] in first["notes"][0]
    assert first["fault"] == second["fault"] == "alignment" and first["about"]["request"] == "s3"
    assert first["folder"] == "step000005-alignment" and first["other tensors"] == []
    kept = first["kept"]
    assert (kept["step"], kept["version"], kept["power"], kept["staleness"]) == (5, 4, 0.75, 0)
    assert [one["key"] for one in kept["sequences"]] == ["s3", "s0", "s1", "s2", "s4"]  # the one that is named is first
    assert all(one["versions"] == [[4, 8]] for one in kept["sequences"])
    for one, rows in zip(kept["sequences"], first["rows"], strict=True):
        assert ("record" in rows) == (one["key"] != "s4") and one["intact"] == (True if "record" in rows else None)
        assert rows["chosen"].shape == (8, 4, 4) and rows["chosen"].max() < 16
        # the choice is the best one by the logits that are kept beside it
        best = np.argsort(rows["trainer_logits"], -1)[..., -4:]
        assert (np.sort(best, -1) == np.sort(rows["chosen"], -1)).all()
        assert np.isnan(rows["sampler_logprobs"]).tolist() == [True] * 4 + [False] * 4
        assert rows["sampler_logprobs"][-1] == -int(one["key"][1]) and (rows["trainer_logprobs"] < 0).all()


def test_weights_that_do_not_fit_are_left_out_and_named(on_ranks, checkpoint, tmp_path):
    first, _ = on_ranks(2, evidence.run, "EP2", checkpoint, tmp_path, 1)
    kept = first["kept"]
    assert kept["weights"] == [] and len(kept["sequences"]) == 5
    assert any("guards.evidence_mib" in what for what in kept["left_out"])
    assert sum(file.stat().st_size for file in tmp_path.glob("evidence/**/*") if file.is_file()) < 1 << 20


def test_nothing_is_kept_where_nothing_may_be(on_ranks, checkpoint, tmp_path):
    first, second = on_ranks(2, evidence.run, "EP2", checkpoint, tmp_path, 0)
    assert "planted" in first["said"] and "planted" in second["said"] and not (tmp_path / "evidence").exists()


def test_a_failure_to_write_does_not_hide_the_first_error(on_ranks, checkpoint, tmp_path):
    for rank in on_ranks(2, evidence.failing, "EP2", checkpoint, tmp_path):
        assert "planted" in rank["said"] and "could not be kept" in rank["notes"][0]
    assert list((tmp_path / "evidence").iterdir()) == []
