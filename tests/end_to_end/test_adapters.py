"""Whole runs that send a sampler their adapters only."""

import pytest

from tests.end_to_end.conftest import finished, rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LORA = ["train.lora={rank: 2, alpha: 4}", "train.optimizer.lr=5e-4", "run.steps=3", "eval.every_steps=3"]


@pytest.fixture(scope="session")
def merged(tmp_path_factory):
    return finished(tmp_path_factory, "merged", *LORA)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    return finished(tmp_path_factory, "alone", *LORA, "train.lora.sync=adapter")


def trained(run, front=""):
    found = [row for row in rows(run.folder) if row["kind"] == "train"]
    return [{key: value for key, value in row.items() if key.startswith(front)} for row in found]


def test_the_run_is_the_same_bit_for_bit(merged, alone):
    """Every sample, log-probability and gradient is that of a run which sends all weights."""
    ours, theirs = (
        [{key: value for key, value in row.items() if not key.startswith("sync/")} for row in trained(run)]
        for run in (alone, merged)
    )
    assert ours == theirs and len(ours) == 3
    same = ("sync/canary_abs_diff", "sync/canary_change", "sync/canary_mismatch")
    for ours, theirs in zip(trained(alone, "sync/"), trained(merged, "sync/"), strict=True):
        assert [ours.get(key) for key in same] == [theirs.get(key) for key in same]


def test_the_canary_changes_with_every_update(alone):
    changes = [row["sync/canary_change"] for row in trained(alone)[1:]]  # nothing was scored before the first
    assert len(changes) == 2 and min(changes) > 0


def test_few_bytes_travel(merged, alone):
    ours, theirs = (sum(row["sync/bytes"] for row in trained(run)) for run in (alone, merged))
    assert 0 < ours < theirs / 4


def test_updates_come_while_requests_are_under_way(tmp_path_factory):
    ahead = ["pipeline.mode=async", "pipeline.max_staleness=2", "objective.old_logprobs=sampler"]
    ahead += ["rollout.sleep_level=0", "replay.native_every=0", "run.steps=6", "eval.every_steps=6"]
    found = trained(finished(tmp_path_factory, "in_flight", *LORA, "train.lora.sync=adapter", *ahead))
    assert len(found) == 6 and min(row["sync/canary_change"] for row in found[1:]) > 0
    assert max(row["pipeline/staleness_max"] for row in found) >= 1  # sampled before an update, trained after it
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in found)
