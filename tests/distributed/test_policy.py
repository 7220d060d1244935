"""The trained policy against an independent reference: same routes, log-probabilities and gradients in any layout."""

import pytest
import torch

from moe_rl.config.schema import ParallelConfig
from tests.distributed.policy_worker import LENGTHS


def layout(name, ranks, recompute="none", **parallel):
    marks = [pytest.mark.slow] if ranks > 2 else []
    return pytest.param(ranks, ParallelConfig(**parallel), recompute, id=name, marks=marks)


EP2, TP2_EP2 = ParallelConfig(expert=2), ParallelConfig(tensor=2, expert=2)
VPP2 = ParallelConfig(pipeline=2, virtual_pipeline=2)
LAYOUTS = [
    layout("one-rank", 1),
    layout("EP2", 2, expert=2),
    layout("DP2", 2),
    layout("EP2-recompute", 2, "full", expert=2),
    layout("TP2-EP2", 2, tensor=2, expert=2),
    layout("TP2-EP2-recompute", 2, "full", tensor=2, expert=2),
    layout("TP2-ETP2", 2, tensor=2, expert_tensor=2),
    # the experts are whole on both ranks of a tensor-parallel group, each of which sends them other tokens
    layout("TP2", 2, tensor=2),
    # the ranks that share an expert's matrices come with microbatches of different lengths
    layout("ETP2", 2, expert_tensor=2),
    layout("PP2", 2, pipeline=2),
    layout("PP2-VPP2-recompute", 2, "full", pipeline=2, virtual_pipeline=2),
    layout("TP2-EP2-ETP2", 4, tensor=2, expert=2, expert_tensor=2),
    layout("TP2-EP4", 4, tensor=2, expert=4),
    layout("TP2-EP2-DP2-recompute", 4, "full", tensor=2, expert=2),
    layout("PP2-EP2-recompute", 4, "full", pipeline=2, expert=2),
    layout("PP2-VPP2-EP2", 4, pipeline=2, virtual_pipeline=2, expert=2),
    layout("PP2-TP2-EP2", 4, pipeline=2, tensor=2, expert=2),
    layout("PP4", 4, pipeline=4),
]


def merged(seen, key):
    """What all ranks saw together. What more than one rank saw must be the same, bit for bit."""
    out = {}
    for rank in seen:
        assert all(torch.equal(value, out.get(name, value)) for name, value in rank[key].items())
        out.update(rank[key])
    return out


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max((got[name].float() - expected[name].float()).abs().max().item() for name in expected)


@pytest.mark.parametrize("ranks, parallel, recompute", LAYOUTS)
def test_replay_equals_the_reference_with_the_same_routes(run_policy, reference, ranks, parallel, recompute):
    process, seen = run_policy(ranks, parallel, recompute=recompute)
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


@pytest.mark.parametrize("ranks, parallel", [(1, ParallelConfig()), (2, EP2), (2, TP2_EP2), (2, VPP2)])
def test_native_routing_equals_the_reference(run_policy, reference, ranks, parallel):
    process, seen = run_policy(ranks, parallel, mode="native")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, gradients = reference(forced=False)
    assert worst(merged(seen, "logprobs"), logprobs) < 2e-5
    assert worst(merged(seen, "grads"), gradients) < 2e-5
    # and is no replay: without it the comparison above fails
    forced_logprobs, forced_gradients = reference(forced=True)
    assert worst(merged(seen, "logprobs"), forced_logprobs) > 1e-2
    assert worst(merged(seen, "grads"), forced_gradients) > 1e-2


def test_every_layout_takes_the_same_step(run_policy):
    norms, weights = [], []
    for ranks, parallel, recompute in (p.values for p in LAYOUTS if not p.marks):
        _, seen = run_policy(ranks, parallel, recompute=recompute)
        norms += [rank["grad_norm"] for rank in seen]
        weights.append(merged(seen, "weights"))
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
    for other in weights[1:]:
        # Adam's first step is lr * sign(g): where g is about 0 the sign is rounding, elsewhere the weights agree
        wrong = sum(int(((weights[0][n] - other[n]).abs() > 1e-5).sum()) for n in other)
        assert wrong <= 1e-4 * sum(t.numel() for t in other.values())


@pytest.mark.parametrize("parallel", [EP2, TP2_EP2])
@pytest.mark.parametrize("recompute, times", [("none", 1), ("full", 2)])
def test_ledger_counts_each_route_once_a_pass(run_policy, parallel, recompute, times):
    _, seen = run_policy(2, parallel, recompute=recompute)
    # over all ranks every forwarded token once in each of the 4 layers, however the ranks share them
    forwarded = sum(prompt + completion - 1 for prompt, completion in LENGTHS)
    assert sum(rank["tallies"][0]["native_positions"] for rank in seen) == 4 * forwarded
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
    _, native = run_policy(2, EP2, mode="native")
    _, observed = run_policy(2, EP2, mode="observe")
    for a, b in zip(native, observed, strict=True):
        assert all(torch.equal(a["logprobs"][i], b["logprobs"][i]) for i in a["logprobs"])
        assert a["grad_norm"] == b["grad_norm"]
        assert b["tallies"][0]["native_mismatch"] > 0 and b["tallies"][0]["consumed"] == 0


def test_ledger_of_a_pipeline(run_policy):
    _, seen = run_policy(2, VPP2, recompute="full")
    forwarded = sum(prompt + completion - 1 for prompt, completion in LENGTHS)
    for rank in seen:
        forward, update = rank["tallies"]
        # the 2 layers of this stage, in 3 microbatches; the filler that the schedule needs as a fourth is not counted
        assert forward["consumed"] == forward["expected"] == 2 * 3
        assert update["consumed"] == update["expected"] == 2 * 2 * 3
        assert forward["applied_mismatch"] == update["applied_mismatch"] == 0
        assert forward["native_positions"] == 2 * forwarded and forward["native_tokens"] == forwarded


@pytest.mark.parametrize(
    "parallel, fault, message",
    [
        (TP2_EP2, "swapped", "tokens were dispatched to other experts than recorded"),
        (TP2_EP2, "repeated", "routes were not taken exactly once"),
        (TP2_EP2, "missed", "routes were not taken exactly once"),
        (VPP2, "swapped", "tokens were dispatched to other experts than recorded"),
    ],
)
def test_a_planted_fault_is_refused_and_named(run_policy, parallel, fault, message):
    process, seen = run_policy(2, parallel, fault=fault)
    assert process.returncode != 0 and not seen
    assert f"ReplayError: {message} (logprobs, rank 1)" in process.stderr
    assert "(logprobs, rank 0)" not in process.stderr


def test_bfloat16_trains_near_the_reference(run_policy, reference):
    process, seen = run_policy(2, TP2_EP2, dtype="bfloat16")
    assert process.returncode == 0, process.stderr[-3000:]
    logprobs, _ = reference(forced=True)
    difference = torch.cat([(merged(seen, "logprobs")[i] - logprobs[i]).abs() for i in logprobs])
    assert 1e-4 < difference.mean() < 0.1
