"""Whole runs that sample while they train: the same again bit for bit, also after everything was killed."""

import json
import os
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from moe_rl.report.timeline import read_timeline, windows
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceStore
from tests.end_to_end.conftest import Launch, config, finished, rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

AHEAD = ["pipeline.mode=one_step_off", "rollout.sleep_level=0", "replay.native_every=0"]


@pytest.fixture(scope="session")
def ahead(tmp_path_factory):
    return finished(tmp_path_factory, "ahead", *AHEAD, "run.steps=5")


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    files = (folder / f"checkpoints/step-{step:06d}").glob("*.distcp")
    return {path.name: path.read_bytes() for path in files}


def batches(folder: Path) -> KeptRollouts:
    return KeptRollouts(folder / "rollouts", TraceStore(folder / "trace"))


def versions(folder: Path, step: int) -> set[int]:
    return {span.weight_version for one in batches(folder).load(step).sequences for span in one.versions}


def test_a_batch_is_sampled_with_the_weights_from_before_the_last_update(ahead):
    trained = [row for row in rows(ahead.folder) if row["kind"] == "train"]
    assert [row["rollout/weight_version"] for row in trained] == [0, 0, 1, 2, 3]
    assert [versions(ahead.folder, step) for step in (4, 5)] == [{2}, {3}]
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in trained)
    stale = [row["routing/stale_tokens"] for row in trained]
    assert stale[0] == 0 and min(stale[1:]) > 0
    ledger = [json.loads(line) for line in (ahead.folder / "prompts.jsonl").read_text().splitlines()]
    assert len(ledger) == 5


def test_the_time_line_shows_both_sides_at_work_at_once(ahead):
    found = read_timeline(ahead.folder)
    sampled, worked = (
        [one for one in found if one.side == side and one.what in ("sample", "routes", "logprobs", "train")]
        for side in ("sampler", "trainer")
    )
    together = {a.step for a in sampled for b in worked if a.begin < b.end and b.begin < a.end}
    assert together == {1, 2, 3, 4}  # beside the last step there is nothing to sample
    assert [step.step for step in windows(found)] == [1, 2, 3, 4, 5]
    for side in ("sampler", "trainer"):
        own = sorted((one for one in found if one.side == side), key=lambda one: one.begin)
        assert all(one.end <= after.begin for one, after in pairwise(own)), side


@pytest.mark.parametrize("victim", ["everything", "pool"])
def test_a_killed_run_goes_on_bit_for_bit(ahead, tmp_path, victim):
    """Struck in step 4, while its successor is sampled; the checkpoint is of step 2."""
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *AHEAD, "run.steps=5"))
    run.until(lambda: "\n 3/5" in run.text())
    if victim == "pool":
        command = re.compile(rb"moe_rl\.rollout\.pool")
        (pid,) = [p for p in run.processes() if command.search(Path(f"/proc/{p}/cmdline").read_bytes())]
        os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1
        assert "The pool died" in run.text() and "signal SIGKILL" in run.text() and "--resume" in run.text()
    else:
        run.kill()
    folder = run.folder
    again = Launch(tmp_path, "--resume", folder)
    assert again.wait() == 0, again.text()[-4000:]
    assert rows(folder) == rows(ahead.folder)
    assert tensors(folder, 5) == tensors(ahead.folder, 5) != {}
    assert (folder / "prompts.jsonl").read_bytes() == (ahead.folder / "prompts.jsonl").read_bytes()


def test_a_batch_that_is_lost_is_sampled_again_and_told(ahead, tmp_path):
    """Its old weights are gone, so it is sampled with those of the checkpoint."""
    folder = tmp_path / ahead.folder.name
    shutil.copytree(ahead.folder, folder)
    kept = folder / "rollouts/step000005.rollout"
    kept.write_bytes(kept.read_bytes()[:-1])
    run = Launch(tmp_path, "--resume", folder, "--step", 4)
    assert run.wait() == 0, run.text()[-4000:]
    assert "Step 5 is sampled again" in run.text() and "damaged" in run.text()
    assert versions(folder, 5) == {4}
