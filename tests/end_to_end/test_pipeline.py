"""Whole runs that sample while they train: the same again bit for bit, also after everything was killed."""

import json
import os
import re
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from moe_rl.config.load import load_config
from moe_rl.report.registry import METRICS
from moe_rl.report.timeline import read_timeline, windows
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceStore
from tests.end_to_end.conftest import Launch, config, finished, rows
from tests.support.task import task_of
from tools.dev.runs import still_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

AHEAD = ["pipeline.mode=one_step_off", "rollout.engines=2", "rollout.sleep_level=0", "replay.native_every=0"]


@pytest.fixture(scope="session")
def ahead(tmp_path_factory):
    return finished(tmp_path_factory, "ahead", *AHEAD, "run.steps=5", "replay.keep_shards=5")


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    files = (folder / f"checkpoints/step-{step:06d}").glob("*.distcp")
    return {path.name: path.read_bytes() for path in files}


def training_rows(folder: Path) -> list[dict]:
    """What the trainer computed in each step, and what it was given."""
    found = [row for row in rows(folder) if row["kind"] == "train"]
    return [{key: value for key, value in row.items() if not key.startswith("sync/")} for row in found]


def replays(folder: Path, again: Path, last: int) -> None:
    """Assert that the run in `again` trained as the one in `folder`, and had no sampler."""
    assert training_rows(again) == training_rows(folder) != []
    assert tensors(again, last) == tensors(folder, last) != {}
    assert (again / "prompts.jsonl").read_bytes() == (folder / "prompts.jsonl").read_bytes()
    assert not any(key.startswith(("sync/", "eval/")) for row in rows(again) for key in row)
    assert not list(again.glob("*.log")) and not (again / "trace").exists()


def stands(folder: Path) -> dict[Path, tuple[int, int]]:
    """What would change if anything in a folder were written."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


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
    moved = [row["routing/alignment_moved"] for row in trained]  # two updates since
    assert moved == pytest.approx([0.0, *(2 * row["optim/lr"] for row in trained[:-1])])
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


@pytest.mark.parametrize("victim", ["everything", pytest.param("pool", marks=pytest.mark.nightly)])
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


ONE_ROUND = [*AHEAD, "rollout.dynamic_sampling_rounds=1", "checkpoint.asynchronous=false"]
HELD_VERIFIER = """
import pathlib, time
from moe_rl.tasks import rewards

def exact_match(completion, answer):
    while pathlib.Path({hold!r}).exists():
        time.sleep(0.05)
    return rewards.exact_match(completion, answer)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_batch_that_was_not_judged_yet_is_judged_again_and_the_run_goes_on_bit_for_bit(
    tmp_path_factory, tmp_path, end
):
    whole = finished(tmp_path_factory, "one_round", *ONE_ROUND, "run.steps=4").folder
    hold, kept = tmp_path / "hold", tmp_path / "verifier"
    kept.mkdir()
    (kept / "held_verifier.py").write_text(HELD_VERIFIER.format(hold=str(hold)))
    environment = {"PYTHONPATH": os.pathsep.join([str(kept), os.environ.get("PYTHONPATH", "")])}
    reward = "task.rewards.exact_match.function=held_verifier.exact_match"
    run = Launch(
        tmp_path,
        *config(f"run.runs_dir={tmp_path}", *ONE_ROUND, "run.steps=4", reward),
        environment=environment,
    )
    run.until(lambda: "\n 1/4" in run.text())  # the batch of step 2 is judged, or is about to be
    hold.touch()
    folder = run.folder
    run.until(lambda: (folder / "rollouts/step000004.sampled").exists())  # with the weights of step 2, as step 3 waits
    assert not (folder / "rollouts/step000003.rollout").exists()
    assert (folder / "rollouts/step000003.sampled").exists()
    if end == "killed":
        run.kill()
    else:
        for rank in (0, 1):
            os.kill(run.rank_pid(rank), signal.SIGTERM)
        assert run.wait() != 0 and "the run was asked to stop" in run.text()
        assert "in the middle of a call" not in run.text()
    hold.unlink()
    again = Launch(tmp_path, "--resume", folder, environment=environment)
    assert again.wait() == 0, again.text()[-4000:]
    assert re.search(r"resumed after step 2; steps repeated: 2. Step 3 judges the \d+ seq", again.text())
    assert [versions(folder, step) for step in (3, 4)] == [{1}, {2}]
    assert rows(folder) == rows(whole) != []
    assert tensors(folder, 4) == tensors(whole, 4) != {}
    assert (folder / "prompts.jsonl").read_bytes() == (whole / "prompts.jsonl").read_bytes()
    assert not list((folder / "rollouts").glob("*.sampled"))


@pytest.mark.nightly
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


def test_a_stop_does_not_wait_for_a_batch_that_is_not_sampled_in_time(tmp_path):
    """Its engines are stopped while it is sampled. The step that was trained meanwhile is saved."""
    settings = [*AHEAD, "run.steps=5", "checkpoint.every_steps=5", "checkpoint.grace_seconds=20"]
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *settings, "run.peer_timeout_seconds=120"))
    run.until(lambda: "\n 2/5" in run.text())
    for pid in run.processes():
        if b"moe_rl.vllm.child" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(10)  # step 3 is trained, and waits for the batch of step 4
    for rank in (0, 1):
        os.kill(run.rank_pid(rank), signal.SIGTERM)
    assert run.wait() != 0 and "the run was asked to stop" in run.text(), run.text()[-4000:]
    assert "did after step 3, with a checkpoint" in run.text()
    assert [row["step"] for row in rows(run.folder) if row["kind"] == "train" and "sync/bytes" not in row] == [3]
    again = Launch(tmp_path, "--resume", run.folder)
    assert again.wait() == 0, again.text()[-4000:]
    assert "resumed after step 3" in again.text() and len(proven(run.folder)) == 5


def test_a_run_is_replayed_bit_for_bit_also_after_a_kill(ahead, tmp_path):
    before = stands(ahead.folder)
    run = Launch(tmp_path, "--replay", ahead.folder, f"run.runs_dir={tmp_path}", "run.name=again")
    run.until(lambda: "\n 3/5" in run.text())
    run.kill()
    assert Launch(tmp_path, "--resume", run.folder).wait() == 0
    replays(ahead.folder, run.folder, 5)
    assert stands(ahead.folder) == before


ASYNC = [
    "pipeline.mode=async",
    "rollout.sleep_level=0",
    "replay.native_every=0",
    "rollout.dynamic_sampling_rounds=2",
    "objective.old_logprobs=sampler",
]


def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(tmp_path_factory):
    settings = ["run.steps=3", "checkpoint.every_steps=3"]
    sync, asynchronous = (
        finished(tmp_path_factory, name, *ASYNC, *settings, *mode).folder
        for name, mode in (("as_sync", ["pipeline.mode=sync"]), ("without_lag", ["pipeline.max_staleness=0"]))
    )
    assert rows(sync) == rows(asynchronous) != []
    assert tensors(sync, 3) == tensors(asynchronous, 3) != {}


def proven(folder: Path) -> list[dict]:
    """The lines of the ledger of a finished run, after the proof that every prompt ended exactly once."""
    config = load_config(folder / "config.yaml")
    ledger = PromptLedger.of_run(folder, config.pipeline)
    ledger.verify(PromptSource(task_of(config).train, config.run.seed), steps=config.run.steps)
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


@pytest.mark.parametrize("kv", ["keep", pytest.param("recompute", marks=pytest.mark.nightly)])
def test_groups_are_never_too_old_and_each_prompt_ends_once_also_after_a_kill(tmp_path, kv):
    run = Launch(
        tmp_path,
        *config(f"run.runs_dir={tmp_path}", *ASYNC, "pipeline.max_staleness=2", f"pipeline.kv={kv}", "run.steps=6"),
        "replay.keep_shards=6",
    )
    run.until(lambda: "\n 3/6" in run.text())
    run.kill()
    folder = run.folder
    again = Launch(tmp_path, "--resume", folder)
    assert again.wait() == 0, again.text()[-4000:]
    trained = [row for row in rows(folder) if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert max(row["pipeline/staleness_max"] for row in trained) in (1, 2)
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in trained)
    emitted = {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {key for key in METRICS if key.startswith("pipeline/") and "<" not in key} | {"time/wait"} <= emitted
    lines = proven(folder)
    assert all(len(line["prompts"]) == 16 for line in lines)
    # a step's batch is what its line says
    kept = batches(folder)
    for step in kept.steps():
        cursors = [at for first, count in lines[step - 1]["cursors"] for at in range(first, first + count)]
        assert list(dict.fromkeys(kept.load(step).group_ids)) == cursors
    # and so it can be trained again
    (tmp_path / "again").mkdir()
    replay = Launch(tmp_path / "again", "--replay", folder, f"run.runs_dir={tmp_path / 'again'}")
    assert replay.wait() == 0, replay.text()[-4000:]
    replays(folder, replay.folder, 6)


@pytest.mark.nightly
def test_a_stopped_run_goes_on_with_the_groups_that_it_had_begun(tmp_path):
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *ASYNC, "pipeline.max_staleness=2", "run.steps=5"))
    run.until(lambda: "\n 2/5" in run.text())
    for rank in (0, 1):
        os.kill(run.rank_pid(rank), signal.SIGTERM)
    assert run.wait() != 0 and "the run was asked to stop" in run.text()
    assert "in the middle of a call" not in run.text()
    folder = run.folder
    left = {path.name for path in (folder / "groups").glob("*.group")}
    again = Launch(tmp_path, "--resume", folder)
    assert again.wait() == 0, again.text()[-4000:]
    assert left and not list((folder / "groups").glob("*.group"))
    assert len(proven(folder)) == 5


STRIKES = {
    "the pool is stopped": ("moe_rl.rollout.pool", signal.SIGSTOP, "The pool hangs"),
    "the engine is killed": ("moe_rl.vllm.child", signal.SIGKILL, "The vLLM engine died"),
    "the engine is stopped": ("moe_rl.vllm.child", signal.SIGSTOP, "The vLLM engine hangs"),
    "a rank is killed": ("", signal.SIGKILL, "rank 1"),
    "a verifier is killed": ("moe_rl.tasks.verifier_worker", signal.SIGKILL, ""),
}


@pytest.mark.nightly
@pytest.mark.parametrize("strike", STRIKES)
def test_whoever_is_struck_while_groups_are_sampled_is_named(tmp_path, strike):
    """A verifier is replaced. Every other loss ends the run by name, and the resumed run ends each prompt once."""
    module, number, told = STRIKES[strike]
    settings = ["pipeline.max_staleness=2", "run.steps=5", "run.peer_timeout_seconds=15"]
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *ASYNC, *settings))
    run.until(lambda: "\n 3/5" in run.text())
    everyone = run.processes()
    if module:
        command = module.encode()
        pid = next(p for p in everyone if command in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0"))
    else:
        pid = run.rank_pid(1)
    os.kill(pid, number)
    status = run.wait()
    assert still_running(everyone, within=20) == []
    if told:
        assert status != 0 and told in run.text(), run.text()[-4000:]
        again = Launch(tmp_path, "--resume", run.folder)
        assert again.wait() == 0, again.text()[-4000:]
    else:
        assert status == 0, run.text()[-4000:]
    assert len(proven(run.folder)) == 5
