from __future__ import annotations

import json

import pytest

from moe_rl.report.lines import encode
from moe_rl.report.summary import summarize
from tests.support.refusals import refused


def write(run_dir, step_metrics, steps, evals=(), replay=True):
    """steps: overrides of the made-up metrics by step. evals: (step, pass rate, greedy)."""
    lines = [encode(step, "train", step_metrics(step, replay) | values) for step, values in steps.items()]
    lines += [
        encode(step, "eval", {"eval/pass_rate": rate, "eval/pass_rate_greedy": greedy}) for step, rate, greedy in evals
    ]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def test_numbers_by_hand(tmp_path, step_metrics, facts):
    write(
        tmp_path,
        step_metrics,
        {
            1: {
                "policy_kl/k3": 0.002,
                "policy_kl/k3_native": 0.010,
                "routing/native_mismatch": 0.10,
                "routing/shadow_mismatch": 0.04,
                "routing/consumed": 100,
                "routing/expected": 100,
                "time/step": 9.0,
                "time/sync": 0.3,
                "trace/bytes": 1000,
                "trace/bytes_per_token": 10.0,
                "rollout/sequences": 4,
                "rollout/completion_tokens_mean": 2.5,
            },
            2: {
                "policy_kl/k3": 0.900,
                "routing/shadow_mismatch": 0.10,
                "routing/consumed": 50,
                "routing/expected": 50,
                "time/step": 1.0,
                "time/sync": 0.1,
                "trace/bytes": 3000,
                "trace/bytes_per_token": 20.0,
                "rollout/sequences": 4,
                "rollout/completion_tokens_mean": 5.0,
            },
            3: {
                "policy_kl/k3": 0.004,
                "policy_kl/k3_native": 0.030,
                "routing/native_mismatch": 0.20,
                "routing/shadow_mismatch": 0.06,
                "routing/consumed": 100,
                "routing/expected": 100,
                "time/step": 2.0,
                "time/sync": 0.2,
                "trace/bytes": 0,
                "trace/bytes_per_token": 0.0,
                "rollout/sequences": 0,
                "rollout/completion_tokens_mean": 0.0,
            },
        },
        evals=[(3, 0.75, 0.8), (0, 0.25, 0.3), (2, 0.9, 0.9)],
    )
    s = summarize(tmp_path, facts)
    assert s == json.loads((tmp_path / "summary.json").read_text())
    assert s["steps"] == 3
    assert (s["heldout_pass_rate_first"], s["heldout_pass_rate_last"]) == (0.25, 0.75)
    assert (s["heldout_pass_rate_greedy_first"], s["heldout_pass_rate_greedy_last"]) == (0.3, 0.8)
    assert s["policy_kl_k3"] == pytest.approx((0.002 + 0.9 + 0.004) / 3)
    assert s["policy_kl_k3_native"] == pytest.approx(0.02)
    assert s["policy_kl_k3_replay"] == pytest.approx(0.003)  # the same two steps; the 0.9 of step 2 has no partner
    assert s["policy_kl_k3_native_steps"] == 2
    assert s["routing_native_mismatch"] == pytest.approx(0.15)
    assert s["routing_shadow_mismatch"] == pytest.approx(0.2 / 3)
    assert s["routing_shadow_mismatch_paired"] == pytest.approx(0.05)
    assert (s["routes_applied_mismatch"], s["routes_coverage"]) == (0, 1.0)
    assert (s["routes_consumed"], s["routes_expected"], s["routes_exact_every_step"]) == (250, 250, True)
    assert s["trace_bytes_per_token"] == pytest.approx(4000 / (100 + 150))  # tokens: 1000/10 + 3000/20
    assert s["sampled_tokens"] == 4 * 2.5 + 4 * 5
    assert (s["step_seconds_median"], s["weight_sync_seconds_median"]) == (2.0, 0.2)
    assert (s["vllm_version"], s["megatron_core_version"], s["seed"]) == ("0.32.0", "0.19.2", 1)


@pytest.mark.parametrize(
    ("fault", "key", "value"),
    [
        ({"routing/applied_mismatch": 3}, "routes_applied_mismatch", 3),
        ({"routing/coverage": 0.5}, "routes_coverage", 0.5),
        ({"routing/coverage": float("nan")}, "routes_coverage", None),
        ({"routing/consumed": 1535}, "routes_consumed", 1536 + 1535),
    ],
)
def test_one_bad_step_is_not_averaged_away(tmp_path, step_metrics, facts, fault, key, value):
    write(tmp_path, step_metrics, {1: {}, 2: fault})
    s = summarize(tmp_path, facts)
    assert s[key] == value
    assert s["routes_exact_every_step"] is False


def test_faults_that_cancel_in_the_sum_are_seen(tmp_path, step_metrics, facts):
    write(tmp_path, step_metrics, {1: {"routing/consumed": 1535}, 2: {"routing/consumed": 1537}})
    s = summarize(tmp_path, facts)
    assert s["routes_consumed"] == s["routes_expected"]
    assert s["routes_exact_every_step"] is False


def test_the_steps_in_which_a_claim_was_weak_are_counted(tmp_path, step_metrics, facts):
    shares = {1: (1, 0.5), 2: (1, 0), 3: (1, 1)}
    steps = {step: {"routing/proven/layer": a, "routing/proven/single_ids": b} for step, (a, b) in shares.items()}
    write(tmp_path, step_metrics, steps)
    assert summarize(tmp_path, facts)["routes_weak_claims"] == {"single_ids": 2}


def test_replay_off(tmp_path, step_metrics, facts):
    write(tmp_path, step_metrics, {1: {"policy_kl/k3": 0.002}, 2: {"policy_kl/k3": 0.004}}, replay=False)
    s = summarize(tmp_path, facts | {"replay_mode": "off"})
    assert s["policy_kl_k3_replay"] is None and s["routes_coverage"] is None and s["routes_exact_every_step"] is None
    assert s["routes_applied_mismatch"] is None and s["routing_shadow_mismatch"] is None
    # The trainer routes natively as it trains: that is the native value.
    assert s["policy_kl_k3_native"] == s["policy_kl_k3"] == pytest.approx(0.003)


def test_nonfinite_values_are_left_out_and_counted(tmp_path, step_metrics, facts):
    write(tmp_path, step_metrics, {1: {"policy_kl/k3": 0.5}, 2: {"policy_kl/k3": float("nan")}})
    s = summarize(tmp_path, facts)
    assert s["policy_kl_k3"] == 0.5
    assert s["nonfinite_values"] == {"policy_kl/k3": 1}


def test_a_fact_may_not_overwrite_a_measurement(tmp_path, step_metrics, facts):
    write(tmp_path, step_metrics, {1: {}})
    with refused(ValueError, got="routes_coverage"):
        summarize(tmp_path, facts | {"routes_coverage": 1.0})
    assert not (tmp_path / "summary.json").exists()


def test_a_replay_mode_that_the_lines_contradict_is_refused(tmp_path, step_metrics, facts):
    write(tmp_path, step_metrics, {1: {}})
    with refused(ValueError, fault="replay mode", got="off"):
        summarize(tmp_path, facts | {"replay_mode": "off"})


def test_a_run_without_steps_has_no_numbers(tmp_path, facts):
    s = summarize(tmp_path, facts)
    assert s["steps"] == 0
    assert s["policy_kl_k3"] is None and s["heldout_pass_rate_first"] is None and s["step_seconds_median"] is None
