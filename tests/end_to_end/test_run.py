"""The main job, shortened: it runs, proves its routes, repeats itself, and resumes bit for bit."""

import json
import os
import signal
from contextlib import suppress

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from moe_rl.report.registry import METRICS, find
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, load_prompts
from tests.end_to_end.conftest import ROOT, Launch, config, rows
from tools.dev.runs import still_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def tensors(folder, tmp_path):
    """Every tensor of a run's last checkpoint: weights, main weights, Adam's moments."""
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    dcp_to_torch_save(str(last), str(tmp_path / "whole.pt"))
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    return {k: v for k, v in loaded.items() if torch.is_tensor(v)}


def test_a_run_proves_its_routes_and_reports(short_run):
    folder = short_run.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads((folder.parent / "result.json").read_text())
    assert summary["steps"] == 4
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
    assert f"report: {folder / 'report.html'}" in short_run.text()
    assert not (folder / "sync").exists()  # weights went through shared memory


def test_groups_without_a_difference_are_sampled_again_and_counted(short_run):
    steps = [row for row in rows(short_run.folder) if row["kind"] == "train"]
    assert {row["group/sampled"] for row in steps} <= {16, 32} and max(row["group/sampled"] for row in steps) == 32
    for row in steps:
        assert row["rollout/sequences"] == 4 * row["group/sampled"]
        assert row["group/sampled"] - row["group/discarded"] == 16 - row["group/lacking"]
        # no member of a group that was chosen for its difference, unless it has just the mean
        assert row["objective/zero_advantage_fraction"] < 0.1
    ledger = [json.loads(line) for line in (short_run.folder / "prompts.jsonl").read_text().splitlines()]
    assert [len(entry["prompts"]) for entry in ledger] == [row["group/sampled"] for row in steps]
    shards = sorted(path.stem for path in (short_run.folder / "trace").glob("step*"))
    assert len(shards) == sum(row["group/sampled"] for row in steps) // 16


def test_a_run_emits_every_metric_that_is_not_of_the_step_alone(short_run):
    """The others: tests/distributed/test_step.py."""
    logged = map(json.loads, (short_run.folder / "metrics.jsonl").read_text().splitlines())
    emitted = {find(key).key for row in logged for key in row if "/" in key}
    rooms = ("reward", "rollout", "group", "time", "throughput", "trace", "sync", "eval")
    owed = {key for key in METRICS if key.split("/")[0] in rooms} - {"reward/kl_penalty", "rollout/lost_servers"}
    assert owed - emitted == set()


def test_every_step_logs_the_canary_and_its_own_weights(short_run):
    steps = [row for row in rows(short_run.folder) if row["kind"] == "train"]
    assert [row["rollout/weight_version"] for row in steps] == [0, 1, 2, 3]
    # bf16 engines differ a little, never by nothing and never by much: the sampler holds these weights
    assert all(1e-5 < row["sync/canary_abs_diff"] < 0.3 for row in steps)
    assert len({row["sync/canary_abs_diff"] for row in steps}) == 4


def test_a_sampler_that_cannot_sleep_is_said_to_be_awake_once(short_run):
    """The calls are made all the same: after level 2 nothing could have been sampled without an update."""
    assert short_run.text().count("vLLM cannot sleep on a CPU, so the sampler keeps its memory") == 1
    logged = map(json.loads, (short_run.folder / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in logged if row["kind"] == "train"]
    assert all(0 < row["time/sleep"] < row["time/step"] for row in steps)
    log = (short_run.folder / "engine.log").read_text()
    assert log.count("sleep mode is not supported on CPU") == 3 * len(steps)


def test_the_ledger_holds_every_prompt_once(short_run):
    tokenizer = ROOT / "assets/tiny_moe/policy/tokenizer.json"
    prompts = load_prompts(ROOT / "assets/tiny_moe/task/train.jsonl", tokenizer, max_prompt_tokens=24)
    PromptLedger(short_run.folder / "prompts.jsonl").verify(PromptSource(prompts, 1), steps=4)


@pytest.fixture
def launches(tmp_path):
    """The launches of a run, of which a test that fails leaves none behind."""
    started = [Launch(tmp_path, *config(f"run.runs_dir={tmp_path}"))]
    yield started
    for launch in started:
        launch.kill()


def test_kill_9_and_sigterm_change_nothing(short_run, tmp_path, launches):
    """One run that is ended three times, and in the end is the one that nobody touched."""

    def until(phase, part, step):
        def there():
            sign = launches[-1].sign()
            return (sign.get("phase"), sign.get("part"), sign.get("step")) == (phase, part, step)

        launches[-1].until(there)

    def end(blow, pids, expected):
        everyone = launches[-1].processes()
        for pid in pids or everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, blow)
        assert launches[-1].wait(60) != 0
        assert not still_running(everyone, 5)
        assert expected in launches[-1].text()
        launches.append(Launch(tmp_path, "--resume", launches[-1].folder))

    # A training step is ended first. A rank that is signalled alone tells the others.
    until("train", "logprobs", 1)
    end(signal.SIGTERM, [launches[0].rank_pid(1)], "asked to stop and did after step 1, with a checkpoint; go on")
    folder = launches[0].folder
    assert "exitcode  : 5" in launches[0].text() and [row["step"] for row in rows(folder)] == [0, 1]

    # Nobody is asked. Step 2 was sampled to its end, and is not sampled again.
    until("train", "train", 2)
    pid, before = launches[1].rank_pid(0), shard(folder, 2)
    end(signal.SIGKILL, [pid], f"rank 0 (pid {pid} on ")
    assert "in phase train of step 2, died" in launches[1].text()

    # Sampling is left there and then, the checkpoint of the step before ended. torchrun, engine and verifiers are
    # signalled too, as by SLURM.
    until("rollout", "sample", 3)
    assert "after step 1; 1 steps are repeated. Step 2 is trained on the" in launches[2].text()
    assert shard(folder, 2) == before
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name[0] == "."] == [".step-000002.tmp"]
    end(signal.SIGTERM, None, "asked to stop and did after step 2, with a checkpoint; go on")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]

    assert launches[3].wait() == 0, launches[3].text()[-4000:]
    assert "resumed after step 2; " in launches[3].text()
    assert rows(folder) == rows(short_run.folder)
    ours, theirs = tensors(folder, tmp_path), tensors(short_run.folder, tmp_path)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (folder / "prompts.jsonl").read_text() == (short_run.folder / "prompts.jsonl").read_text()


def shard(folder, step):
    """When the routes of a step were written, and what they are."""
    path = folder / "trace" / f"step{step:06d}.safetensors"
    return path.stat().st_mtime_ns, path.read_bytes()


def test_without_replay_the_mismatch_is_larger_and_a_limit_to_it_ends_the_run(short_run, tmp_path):
    limit = ["guards.max_policy_kl=1e-9", "guards.collapse_steps=2"]
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", "replay.mode=off", "run.steps=9", *limit))
    assert run.wait() != 0
    text = run.text()
    assert "CollapseError: the run has collapsed (step 2): got since step 1: policy_kl/k3 = " in text
    assert "exitcode  : 4" in text
    # what there is has been kept: both steps, the last one's checkpoint, the report
    assert [row["step"] for row in rows(run.folder) if row["kind"] == "train"] == [1, 2]
    state = json.loads((run.folder / "checkpoints/step-000002/state.json").read_text())
    assert {name: state["guards"][name] for name in ("skipped", "lost")} == {"skipped": 0, "lost": 2}
    assert (run.folder / "report.html").exists()
    assert "policy_kl/k3" in json.loads((run.folder / "summary.json").read_text())["collapse"]
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["routes_applied_mismatch"] is None and summary["policy_kl_k3_replay"] is None
    # Before the first update both runs hold the same tokens, weights and sampler logprobs. What one run reports as it
    # trains is then exactly what the other measures natively, beside its own, smaller number under replay.
    off, replayed = (next(row for row in rows(r.folder) if row["kind"] == "train") for r in (run, short_run))
    for key in ("k1", "k3"):
        assert off[f"policy_kl/{key}"] == replayed[f"policy_kl/{key}_native"]
    assert off["routing/native_mismatch"] == replayed["routing/native_mismatch"]
    assert off["policy_kl/k3"] > replayed["policy_kl/k3"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.tensor=2"], id="TP2-EP2"),
        pytest.param(
            ["parallel.context=2", "train.overlap_expert_parallel_comm=true", "objective.kl_in=reward"],
            id="CP2-EP2-overlap",
        ),
    ],
)
def test_ranks_that_share_sequences(short_run, tmp_path, layout):
    """The ranks share matrices and tokens: the same batch and weights, and every sum counts each once."""
    run = Launch(tmp_path, *config(f"run.runs_dir={tmp_path}", *layout, "objective.kl_coef=0.01", "run.steps=2"))
    assert run.wait() == 0, run.text()[-4000:]
    ours, theirs = ([row for row in rows(r.folder) if row["kind"] == "train"] for r in (run, short_run))
    # each of the two ranks routes its part of the tokens, and counts how many had routes
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in ours)
    assert all(row["routing/consumed"] == row["routing/expected"] > 0 for row in ours)
    # Before the first update both runs hold the same weights and tokens. In bf16 the partial sums of two ranks round
    # otherwise than whole ones, and so does attention over gathered keys; in float32 nothing of it is left, see
    # tests/distributed.
    assert ours[0]["policy/perplexity_rollout"] == pytest.approx(theirs[0]["policy/perplexity_rollout"], rel=1e-12)
    assert ours[0]["policy/perplexity_train"] == pytest.approx(theirs[0]["policy/perplexity_train"], rel=2e-3)
    for name in ("routing/native_mismatch", "routing/native_token_mismatch"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=0.2), name
    for name in ("policy_kl/k3", "policy_kl/k3_native"):
        assert ours[0][name] < 4 * theirs[0][name], name
    assert ours[0]["optim/grad_norm"] == pytest.approx(theirs[0]["optim/grad_norm"], rel=0.2)
    # the sampler holds the collected weights
    assert all(1e-5 < row["sync/canary_abs_diff"] < 0.3 for row in ours)
    assert 0 < ours[0]["objective/kl_ref"] < ours[1]["objective/kl_ref"]


def test_grpo_from_the_samplers_logprobs_with_a_reference_in_float32(short_run, tmp_path):
    """The other side of every switch, in one run, and its layers in turns on two pipeline stages."""
    run = Launch(
        tmp_path,
        *config(
            f"run.runs_dir={tmp_path}",
            "objective.name=grpo",
            "objective.old_logprobs=sampler",
            "objective.kl_coef=0.01",
            "train.dtype=float32",
            "rollout.weights=fp8_e4m3",
            "train.recompute=uniform",
            "train.router_aux_loss=0.01",
            "objective.entropy_coef=0.001",
            "rollout.top_p=0.9",
            "rollout.min_p=0.01",
            "rollout.keep_sampling_mask=true",
            "objective.advantage=batch_std",
            "parallel.expert=1",
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "run.steps=2",
        ),
    )
    assert run.wait() == 0, run.text()[-4000:]
    steps = [row for row in rows(run.folder) if row["kind"] == "train"]
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in steps)
    # the reference routes natively: other than the policy, which takes the routes of a sampler with rounded weights
    assert steps[0]["objective/kl_ref"] > 0
    # over the layers of both stages: about balanced
    assert 0.95 < steps[0]["objective/aux_loss"] < 2
    # sampler and trainer mean the same distributions, though a tenth of each was removed and the rest scaled up
    assert all(row["policy_kl/k3"] < 1e-3 and row["policy/extreme_fraction"] < 1e-2 for row in steps)
    assert all(0.05 < row["policy/entropy"] < 1 for row in steps)
    # old logprobs are the sampler's: the ratio is not exactly 1 on average
    assert steps[0]["objective/ratio_mean"] != 1.0
    # rounded weights sampled from the first step on
    exact = next(row for row in rows(short_run.folder) if row["kind"] == "train")
    assert steps[0]["policy_kl/k3"] > 3 * exact["policy_kl/k3"]
    # recomputation takes each route twice a training pass: 2 updates x 8 layers, of either stage 4, x 2
    assert steps[0]["routing/consumed"] == steps[0]["routing/expected"] > 0
    assert steps[0]["routing/consumed"] % (2 * 8 * 2) == 0
