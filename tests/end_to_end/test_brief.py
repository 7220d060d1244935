"""The main job, as brief as can be, with an engine beside each of two ranks: it runs, proves its routes, and resumes
bit for bit after kill -9."""

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.report.registry import METRICS, find
from moe_rl.report.timeline import read_timeline, windows
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.trace import TraceStore
from tests.distributed.ranks import torchrun
from tests.end_to_end.conftest import BRIEF, Launch, config, rows, tensors
from tests.support.task import source_of
from tools.dev.runs import still_running

pytestmark = pytest.mark.timeout(900)


def test_a_run_proves_its_routes_and_reports(brief_run):
    folder = brief_run.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads((folder.parent / "result.json").read_text())
    assert summary["steps"] == 2
    assert summary["routes_applied_mismatch"] == 0
    assert summary["routes_coverage"] == 1.0
    assert summary["routes_exact_every_step"] is True
    # 8 layers x microbatches, in the old-logprob pass and in the updates
    assert summary["routes_consumed"] == summary["routes_expected"] > 0
    # 32 ids a token, 8 layers x 4 of 32 experts: less than a byte each, all that the store adds included
    assert 8 < summary["trace_bytes_per_token"] < 30
    assert summary["policy_kl_k3_replay"] < summary["policy_kl_k3_native"]
    assert summary["routing_shadow_mismatch"] < summary["routing_native_mismatch"]
    assert 0 < summary["heldout_pass_rate_first"] < 1 and summary["heldout_pass_rate_last"] is not None
    assert summary["vllm_version"].startswith("0.32") and summary["megatron_core_version"].startswith("0.19")
    assert 0 < summary["weight_sync_seconds_median"] < summary["step_seconds_median"]
    report = (folder / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "") and "<svg" in report
    assert f"report: {folder / 'report.html'}" in brief_run.text()
    assert not (folder / "sync").exists()  # weights went through shared memory


def test_a_run_emits_every_metric_that_is_not_of_the_step_alone(brief_run):
    """The others: tests/distributed/test_step.py."""
    logged = map(json.loads, (brief_run.folder / "metrics.jsonl").read_text().splitlines())
    emitted = {find(key).key for row in logged for key in row if "/" in key}
    rooms = ("reward", "rollout", "group", "time", "throughput", "trace", "sync", "eval")
    owed = {key for key in METRICS if key.split("/")[0] in rooms} - {"reward/kl_penalty", "rollout/lost_servers"}
    owed |= {f"routing/alignment_{name}" for name in ("power", "evidence", "moved")} | {"routing/proven/<name>"}
    owed -= {"eval/source/<name>"}  # only with several held-out sources
    owed -= {"time/wait"}  # only where samples are taken beside training, see test_pipeline.py
    owed -= {"throughput/mfu"}  # nobody knows what a CPU can do
    owed -= {"rollout/draft_acceptance"}  # only with a draft, see tests/rollout/test_recording.py
    assert owed - emitted == set() and "throughput/mfu" not in emitted
    assert (
        "No MFU: the peak of this device in this precision is not known."
        in (brief_run.folder / "report.html").read_text()
    )


def test_every_step_logs_the_canary_and_its_own_weights(brief_run):
    steps = [row for row in rows(brief_run.folder) if row["kind"] == "train"]
    assert [row["rollout/weight_version"] for row in steps] == [0, 1]
    # bf16 engines differ a little, never by nothing and never by much: the sampler holds these weights
    assert all(1e-5 < row["sync/canary_abs_diff"] < 0.3 for row in steps)
    assert len({row["sync/canary_abs_diff"] for row in steps}) == 2


def test_a_sampler_that_cannot_sleep_is_said_to_be_awake_once(brief_run):
    """The calls are made all the same: after level 2 nothing could have been sampled without an update."""
    assert brief_run.text().count("vLLM cannot sleep on a CPU, so the sampler keeps its memory") == 1
    logged = map(json.loads, (brief_run.folder / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in logged if row["kind"] == "train"]
    assert all(0 < row["time/sleep"] < row["time/step"] for row in steps)
    for name in ("engine0.log", "engine1.log"):
        log = (brief_run.folder / name).read_text()
        assert log.count("sleep mode is not supported on CPU") == 3 * len(steps), name


def test_both_engines_sample_every_step_and_hold_its_weights(brief_run):
    """Each prompt's completions come from one of them; each scores the canary after every update."""
    folder = brief_run.folder
    shards = {path.name.removesuffix(".safetensors") for path in (folder / "trace").iterdir()}
    step = {f"step{step:06d}-engine{engine}" for step in (1, 2) for engine in (0, 1)}
    assert step <= {name for name in shards if name.startswith("step")} and "engine.log" not in os.listdir(folder)
    kept = KeptRollouts(folder / "rollouts", TraceStore(folder / "trace"))
    for number in (1, 2):
        places = [(one.prompt_token_ids, one.routes.parts[0].shard) for one in kept.load(number).sequences]
        assert len(set(places)) == len({prompt for prompt, _ in places}) > 1
        assert {shard.rpartition("-")[2] for _, shard in places} == {"engine0", "engine1"}


def timeline_of(folder):
    """Return the time line of a whole run. No side does two things at once, and no step is in it twice."""
    found = read_timeline(folder)
    for side in ("sampler", "trainer"):
        own = sorted((one for one in found if one.side == side), key=lambda one: one.begin)
        assert all(one.end <= next_one.begin for one, next_one in pairwise(own)), side
        assert [one.step for one in own if one.what == "sync"] == [1, 2], side
    assert [one.step for one in found if one.what == "train"] == [1, 2]
    return found


def test_in_a_synchronous_run_each_side_waits_while_the_other_works(brief_run):
    found = timeline_of(brief_run.folder)
    work = {side: [one for one in found if one.side == side and one.what != "sync"] for side in ("sampler", "trainer")}
    for one in work["sampler"]:
        assert all(one.end <= other.begin or other.end <= one.begin for other in work["trainer"])
    assert all(step.idle(side) > 0.05 for step in windows(found) for side in work)
    assert "Who worked when" in (brief_run.folder / "report.html").read_text()


def test_the_ledger_holds_every_prompt_once(brief_run):
    source = source_of(load_config(brief_run.folder / "config.yaml"))
    PromptLedger(brief_run.folder / "prompts.jsonl").verify(source, steps=2)


def test_the_newest_weights_are_exported_with_their_tokenizer(brief_run):
    (kept,) = (brief_run.folder / "export").iterdir()
    names = {path.name for path in kept.iterdir()}
    assert kept.name == "step-000002" and {"config.json", "tokenizer.json", "model.safetensors.index.json"} < names
    assert [f"exported: {kept.parent}/step-00000{step} (" in brief_run.text() for step in (1, 2)] == [True] * 2


@pytest.mark.long
def test_exported_weights_are_those_of_the_command_and_transformers_loads_them(brief_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, theirs = brief_run.folder / "export/step-000002", tmp_path / "out"
    done = torchrun(2, "tools/export_hf.py", "--run", brief_run.folder, "--out", theirs)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name: path.read_bytes() for path in ours.iterdir()} == {
        path.name: path.read_bytes() for path in theirs.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16)
    prompt = AutoTokenizer.from_pretrained(ours)("1 + 1 =", return_tensors="pt")
    assert torch.isfinite(model(**prompt).logits).all()


def on_tensorboard(folder):
    """Pairs (step, value) of a few metrics, as TensorBoard shows them."""
    found = EventAccumulator(str(folder / "trackers/tensorboard")).Reload()
    return {
        key: [(one.step, one.value) for one in found.Scalars(key)]
        for key in ("reward/mean", "policy_kl/k3", "eval/pass_rate")
    }


def test_the_tracker_gets_what_the_run_logs(brief_run):
    shown = on_tensorboard(brief_run.folder)
    for key, points in shown.items():
        logged = [row for row in rows(brief_run.folder) if key in row]
        assert [step for step, _ in points] == [row["step"] for row in logged]
        assert len(points) == (3 if key.startswith("eval/") else 2)
        assert [value for _, value in points] == pytest.approx([row[key] for row in logged], rel=1e-6)  # float32
    state = json.loads((brief_run.folder / "trackers/tensorboard.json").read_text())
    assert (state["metrics"], state["samples"], state["reported"], state["failures"]) == (5, 16, True, 0)
    assert "5 of 5" in (brief_run.folder / "report.html").read_text()


def evaluated(folder):
    """Return what the newest checkpoint knows of the evaluations, and which checkpoint is linked as the best."""
    state = json.loads((checkpoints.find(folder / "checkpoints") / "state.json").read_text())
    best = folder / "checkpoints/best"
    return state["evaluations"], best.readlink() if best.is_symlink() else None


def test_several_samples_of_a_prompt_give_pass_at_k(brief_run):
    found, best = evaluated(brief_run.folder)
    rates = [(step, one["eval/pass_rate"], one["eval/pass_at/sums/2"]) for step, one in found]
    assert [step for step, _, _ in rates] == [0, 1, 2]
    assert all(rate < twice < 2 * rate for _, rate, twice in rates)  # some prompts pass once in two samples
    first_best = max(rates, key=lambda one: (one[1], -one[0]))[0]
    assert best == (Path(f"step-{first_best:06d}") if first_best else None)


@pytest.mark.long
def test_kill_9_and_resume_change_nothing(brief_run, tmp_path, launches):
    """Rank 0 dies in the second of two steps, both engines with it. Ended in other phases and by SIGTERM:
    test_run.py."""
    # In the background the first checkpoint may still be unfinished when the second step trains.
    launches.append(Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *BRIEF, "checkpoint.asynchronous=false")))
    (killed,) = launches

    def in_the_second_update():
        sign = killed.sign()
        return (sign.get("phase"), sign.get("part"), sign.get("step")) == ("train", "train", 2)

    killed.until(in_the_second_update)
    everyone, pid, folder = killed.processes(), killed.rank_pid(0), killed.folder
    os.kill(pid, signal.SIGKILL)
    assert killed.wait(60) != 0 and not still_running(everyone, 5)
    said = killed.text()
    # It may die after it said which layer it is in.
    place = r"in phase train of step 2(, microbatch \d+)?(, layer \d+)?, died"
    assert f"rank 0 (pid {pid} on " in said and re.search(place, said), said

    launches.append(Launch(tmp_path, "--resume", folder))
    assert launches[1].wait() == 0, launches[1].text()[-4000:]
    assert "Step 2 is trained on the" in launches[1].text()
    assert rows(folder) == rows(brief_run.folder)
    ours, theirs = tensors(folder, tmp_path), tensors(brief_run.folder, tmp_path)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert on_tensorboard(folder) == on_tensorboard(brief_run.folder)
    assert evaluated(folder) == evaluated(brief_run.folder)
    assert [one.step for one in windows(timeline_of(folder))] == [1, 2]
    assert (folder / "prompts.jsonl").read_text() == (brief_run.folder / "prompts.jsonl").read_text()
