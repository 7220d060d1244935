"""The main job with other switches, and ended wherever it can be. The plain one: test_brief.py."""

import json
import os
import re
import signal
from contextlib import suppress

import pytest
import torch

from tests.end_to_end.conftest import Launch, config, rows, tensors
from tools.dev.runs import still_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


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


def test_kill_9_and_sigterm_change_nothing(short_run, tmp_path, launches):
    """One run that is ended three times, and in the end is the one that nobody touched."""
    launches.append(Launch(tmp_path, *config(f"run.runs_dir={tmp_path}")))

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
    assert re.search(r"in phase train of step 2(, microbatch \d+)?(, layer \d+)?, died", launches[1].text())

    # Sampling is left there and then, the checkpoint of the step before ended. torchrun, engine and verifiers are
    # signalled too, as by SLURM.
    until("rollout", "sample", 3)
    assert "after step 1; steps repeated: 1. Step 2 is trained on the" in launches[2].text()
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
    assert "CollapseError: the run has collapsed (step 2, lr 0.0001): got since step 1: policy_kl/k3 = " in text
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.tensor=2"], id="TP2-EP2"),
        pytest.param(
            [
                "parallel.context=2",
                "train.overlap_expert_parallel_comm=true",
                "train.dtype=bfloat16",
                "objective.kl_in=reward",
            ],
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
    # Before the first update both runs hold the same weights and tokens. bfloat16 has 8 bits; in float32 only the order
    # of sums differs, see tests/distributed.
    near = 2**-8 if "train.dtype=bfloat16" in layout else 2e-3
    assert ours[0]["policy/perplexity_rollout"] == pytest.approx(theirs[0]["policy/perplexity_rollout"], rel=1e-12)
    assert ours[0]["policy/perplexity_train"] == pytest.approx(theirs[0]["policy/perplexity_train"], rel=near)
    for name in ("routing/native_mismatch", "routing/native_token_mismatch"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=0.2), name
    for name in ("policy_kl/k3", "policy_kl/k3_native"):
        assert ours[0][name] < 4 * theirs[0][name], name
    assert ours[0]["optim/grad_norm"] == pytest.approx(theirs[0]["optim/grad_norm"], rel=0.2)
    # the sampler holds the collected weights
    assert all(1e-5 < row["sync/canary_abs_diff"] < 0.3 for row in ours)
    assert 0 < ours[0]["objective/kl_ref"] < ours[1]["objective/kl_ref"]


@pytest.mark.nightly
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
