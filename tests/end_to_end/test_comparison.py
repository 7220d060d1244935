"""The comparison on a real run: its numbers are those of the run, faults are found, ranks do not change it."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from moe_rl.rollout.kept import shard_step
from tests.end_to_end.conftest import ROOT, config, rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def compare(out, *arguments, ranks=1):
    """(exit status, result, what was printed)."""
    out.mkdir()
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))}
    done = subprocess.run(
        [*start, "tools/compare_routing_kl.py", *map(str, arguments), "--out", out, "--json", out / "copy.json"],
        cwd=ROOT, capture_output=True, text=True, timeout=800,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (out / "routing_kl.json").exists(), done.stderr[-3000:]
    assert (out / "copy.json").read_text() == (out / "routing_kl.json").read_text()
    return done.returncode, json.loads((out / "copy.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def compared(short_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "one"
    return out, *compare(out, "--run", short_run.folder, "--budget-tokens", 2000)


def test_the_numbers_are_those_the_run_logged(short_run, compared):
    """Step 3 was sampled from the checkpoint after step 2, and measured both ways by the two ranks that trained."""
    _, _, result, _ = compared
    logged = next(row for row in rows(short_run.folder) if row["kind"] == "train" and row["step"] == 3)
    assert result["weights"]["version"] == 2 and result["setup"]["rollouts"].startswith("step 3 of ")
    policy, routing = result["quantities"]["completion"]["policy"], result["quantities"]["all"]["routing"]
    for name, key in (("k1", "policy_kl/k1"), ("k3", "policy_kl/k3")):
        # k1 is a mean of signed numbers, each rounded to about 1e-7: microbatches of other shapes round otherwise
        close = partial(pytest.approx, rel=1e-4, abs=1e-7 if name == "k1" else 0)
        assert policy[name]["before"]["value"] == close(logged[f"{key}_native"])
        assert policy[name]["after"]["value"] == close(logged[key])
    for name in ("perplexity_train", "log_perplexity_abs_diff", "chi2_token", "chi2_sequence_product"):
        assert policy[name]["after"] == pytest.approx(logged[f"policy/{name}"], rel=1e-3), name
    assert routing["set_mismatch"]["before"]["value"] == pytest.approx(logged["routing/native_mismatch"], rel=1e-4)
    assert routing["set_mismatch"]["after"]["value"] == pytest.approx(logged["routing/shadow_mismatch"], rel=1e-4)
    for entry in result["layers"]:
        shadow = logged[f"routing/shadow_mismatch_layer/{entry['layer']:03d}"]
        assert entry["all"]["set_mismatch"]["after"] == pytest.approx(shadow, rel=1e-4)


def test_every_setting_has_its_three_lines(compared):
    _, status, result, said = compared
    rows = [(row["staleness_updates"], row["routing"]) for row in result["rows"]]
    # two updates a step, and the checkpoint after step 4 scores what was sampled after step 2
    assert rows == [(age, routing) for age in (0, 4) for routing in ("native", "R2", "R3")]
    native, own, sampled, _, stale_own, stale = result["rows"]
    assert own["policy"] == native["policy"] and own["applied"]["mismatch"] == 0
    assert sampled["policy"] != native["policy"] and stale_own["policy"] != stale["policy"]
    assert stale["policy"]["k3"]["value"] > 10 * sampled["policy"]["k3"]["value"]
    for row in result["rows"]:
        applied = row["applied"]
        assert (applied is None) == (row["routing"] == "native")
        assert applied is None or applied["mismatch"] == 0 < applied["checked"]
        assert applied is None or applied["consumed"] == applied["expected"] > 0
        assert row["router_kl"] is None  # its logits were not recorded, and nothing stands in for them
    assert result["noise"]["repeated"]["bitwise_equal"]
    assert result["noise"]["repacked"]["abs_logprob_change_max"] < 0.1
    assert status == result["verdict"]["exit_code"] and "unavailable" in said


def test_it_samples_on_with_the_same_weights_until_it_is_decided(compared):
    out, status, result, said = compared
    decision = result["decision"]
    looks, last = decision["looks"], decision["looks"][-1]
    assert looks[0]["tokens"] == result["setup"]["completion_tokens"] and decision["planned"][-1] == 2000
    assert decision["confidence"] == pytest.approx(1 - 0.05 / len(decision["planned"]))
    tokens, prompts = ([look[name] for look in looks] for name in ("tokens", "prompts"))
    assert tokens == sorted(set(tokens)) and prompts == sorted(prompts)
    assert len(looks) == len(decision["planned"]) or decision["outcome"] != "undecided"
    for look, planned in zip(looks, decision["planned"], strict=False):
        assert look["tokens"] == pytest.approx(planned, rel=0.3)
    interval = last["difference"]["low"], last["difference"]["high"]
    assert (decision["outcome"] == "lower") == (interval[0] > 0) == (status == 0), said
    assert said.count("sampling about") == len(looks) - 1 == (out / "routing_kl-more").is_dir() * (len(looks) - 1)


def test_rollouts_were_kept_with_their_routes(short_run):
    kept = sorted(path.name for path in (short_run.folder / "rollouts").iterdir())
    assert kept == [f"step{step:06d}.rollout" for step in range(1, 5)]
    shards = [path.stem for path in (short_run.folder / "trace").glob("*.safetensors")]
    assert {shard_step(shard) for shard in shards} == {1, 2, 3, 4}


def test_every_planted_fault_is_found(compared):
    _, _, result, _ = compared
    found = result["self_test"]
    assert found["problems"] == [] and len(found["refusals"]) == 7 and len(found["forced"]) == 3
    assert all(one["message"] for one in found["refusals"])
    for one in found["refusals"]:
        if one["where"].startswith("exchanged in the trainer"):
            assert "tokens were dispatched to other experts than recorded" in one["message"]
    for one in found["forced"]:
        assert one["k3"]["planted"] > 100 * one["k3"]["honest"] and one["k3"]["worse_by"]["low"] > 0
        assert one["set_mismatch"]["worse_by"]["low"] > 0.1


def test_the_page_needs_nothing_and_says_everything(compared):
    out, _, result, _ = compared
    page = (out / "routing_kl.html").read_text()
    assert page.count("<svg") == 6 and "http" not in page.replace("http://www.w3.org", "")
    assert result["weights"]["digest"] in page and "unavailable" in page and "nan" not in page.lower().split("<svg")[0]


def test_ranks_and_their_layout_change_nothing(short_run, compared, tmp_path):
    """Two ranks, other shares and a sliced store: the same weights, values and choices up to the order of sums."""
    _, _, alone, _ = compared
    _, shared, said = compare(
        tmp_path / "two", "--run", short_run.folder, "--budget-tokens", 0, "parallel.expert=2", ranks=2
    )
    assert str(tmp_path / "two/routing_kl.html") in said  # no rank ended rank 0 before it had written
    assert shared["weights"]["digest"] == alone["weights"]["digest"] and shared["setup"]["ranks"] == 2
    for ours, theirs in zip(shared["rows"], alone["rows"], strict=True):
        assert ours["policy"]["k3"]["value"] == pytest.approx(theirs["policy"]["k3"]["value"], rel=1e-3)
        mismatch = [row["router_choice"]["set_mismatch"]["value"] for row in (ours, theirs)]
        assert mismatch[0] == pytest.approx(mismatch[1], rel=0.02)
    assert shared["self_test"]["problems"] == []


def test_a_sampler_with_float8_weights_is_far_and_replay_brings_it_near(tmp_path):
    """Sampled from a config, with router logits; on so few tokens the status may be either, but never another one."""
    overrides = ["train.dtype=float32", "rollout.router_logits_fraction=0.2", "rollout.prompts_per_step=48"]
    status, result, said = compare(
        tmp_path / "out", *config(f"run.runs_dir={tmp_path}"), "--sampler-dtype", "fp8", "float32", *overrides
    )
    rows = {(row["sampler"], row["routing"]): row for row in result["rows"]}
    far, near = rows["fp8 weights, bfloat16", "native"], rows["fp8 weights, bfloat16", "R3"]
    assert near["policy"]["k3"]["value"] < far["policy"]["k3"]["value"]
    assert far["router_kl"]["value"] > near["router_kl"]["value"] > 0
    # in float32 on both sides the engines choose the same experts
    same = rows["float32", "native"]
    assert same["router_choice"]["set_mismatch"]["value"] < 1e-3 and same["policy"]["k3"]["value"] < 1e-8
    assert same["router_kl"]["value"] < 1e-6
    lower = result["decision"]["outcome"] == "lower"
    assert (status, "passed: every route was applied" in said) == ((0, True) if lower else (3, False))
    assert result["self_test"]["problems"] == [] and len(result["verdict"]["reasons"]) == (status == 3)
