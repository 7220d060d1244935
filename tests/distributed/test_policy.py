"""The trained policy against an independent reference: same routes, log-probabilities and gradients in any layout."""

import pytest
import torch

LAYOUTS = [
    pytest.param(1, 1, "none", id="one-rank"),
    pytest.param(2, 2, "none", id="EP2"),
    pytest.param(2, 1, "none", id="DP2"),
    pytest.param(2, 2, "full", id="EP2-recompute"),
]


def merged(seen, key):
    out = {}
    for rank in seen:
        out.update(rank[key])
    return out


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max((got[name].float() - expected[name].float()).abs().max().item() for name in expected)


@pytest.mark.parametrize("ranks, ep, recompute", LAYOUTS)
def test_replay_equals_the_reference_with_the_same_routes(run_policy, reference, ranks, ep, recompute):
    process, seen = run_policy(ranks, ep, recompute=recompute)
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, gradients = reference(forced=True)
    assert worst(merged(seen, "logprobs"), logprobs) < 2e-5
    assert worst(merged(seen, "grads"), gradients) < 2e-5
    # the check can fail: freely routed, the same model is far away
    free_logprobs, free_gradients = reference(forced=False)
    assert worst(logprobs, free_logprobs) > 1e-2
    assert worst(gradients, free_gradients) > 1e-2
    routers = [g for name, g in gradients.items() if name.endswith("mlp.gate.weight")]
    assert all(g.abs().max() > 1e-4 for g in routers), "no gradient reaches a router"


@pytest.mark.parametrize("ranks, ep, recompute", LAYOUTS[:2])
def test_native_routing_equals_the_reference(run_policy, reference, ranks, ep, recompute):
    process, seen = run_policy(ranks, ep, recompute=recompute, mode="native")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, gradients = reference(forced=False)
    assert worst(merged(seen, "logprobs"), logprobs) < 2e-5
    assert worst(merged(seen, "grads"), gradients) < 2e-5


def test_every_layout_takes_the_same_step(run_policy):
    norms, weights = [], []
    for ranks, ep, recompute in (p.values for p in LAYOUTS):
        _, seen = run_policy(ranks, ep, recompute=recompute)
        norms.append(seen[0]["grad_norm"])
        weights.append(merged(seen, "weights"))
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
    for other in weights[1:]:
        # Adam's first step is lr * sign(g): where g is about 0 the sign is rounding, elsewhere the weights agree
        wrong = sum(int(((weights[0][n] - other[n]).abs() > 1e-5).sum()) for n in other)
        assert wrong <= 1e-4 * sum(t.numel() for t in other.values())


@pytest.mark.parametrize("recompute, times", [("none", 1), ("full", 2)])
def test_ledger_counts_each_route_once_a_pass(run_policy, checkpoint, recompute, times):
    _, seen = run_policy(2, 2, recompute=recompute)
    for rank in seen:
        forward, update = rank["tallies"]
        microbatches = forward["expected"] // 4
        assert microbatches >= 1 and forward["consumed"] == forward["expected"] == 4 * microbatches
        assert update["consumed"] == update["expected"] == times * 4 * microbatches
        assert forward["applied_mismatch"] == update["applied_mismatch"] == 0
        assert update["applied_checked"] == times * forward["applied_checked"] > 0
        # random routes are not what the router would choose, and the comparison sees it
        assert forward["native_mismatch"] > 0.9 * forward["native_positions"] > 0
        assert forward["native_token_mismatch"] == forward["native_tokens"]


def test_observing_changes_nothing_and_compares_the_same(run_policy):
    _, native = run_policy(2, 2, mode="native")
    _, observed = run_policy(2, 2, mode="observe")
    for a, b in zip(native, observed, strict=True):
        assert all(torch.equal(a["logprobs"][i], b["logprobs"][i]) for i in a["logprobs"])
        assert a["grad_norm"] == b["grad_norm"]
        assert b["tallies"][0]["native_mismatch"] > 0 and b["tallies"][0]["consumed"] == 0


@pytest.mark.parametrize(
    "fault, message",
    [
        ("swapped", "tokens were dispatched to other experts than recorded"),
        ("repeated", "routes were not taken exactly once"),
        ("missed", "routes were not taken exactly once"),
    ],
)
def test_a_planted_fault_is_refused_and_named(run_policy, fault, message):
    process, seen = run_policy(1, 1, fault=fault)
    assert process.returncode != 0 and not seen
    assert f"ReplayError: {message}" in process.stderr
    assert "rank 0" in process.stderr


def test_bfloat16_trains_near_the_reference(run_policy, reference):
    process, seen = run_policy(2, 2, dtype="bfloat16")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, _ = reference(forced=True)
    difference = torch.cat([(merged(seen, "logprobs")[i] - logprobs[i]).abs() for i in logprobs])
    assert 1e-4 < difference.mean() < 0.1
