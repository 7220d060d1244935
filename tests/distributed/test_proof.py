"""The trained policy against an independent reference: same routes, same gradients, in any layout and schedule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config.hf import read_model
from moe_rl.planning.budgets import budget, microbatch_counts, most
from moe_rl.planning.dispatch import count
from moe_rl.planning.packing import pack
from moe_rl.proof.batch import LENGTHS, batch
from moe_rl.proof.cases import LAYOUTS, MICROBATCH_TOKENS, RECORDED, Case
from moe_rl.proof.matrix import merged
from moe_rl.train.peaks import dispatching_shares

# The first case of a world size waits for all of them.
pytestmark = pytest.mark.timeout(900)

EP2, CP2, PP2 = {"expert": 2}, {"context": 2}, {"pipeline": 2}
TP2_EP2, VPP2 = {"tensor": 2, "expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}
OVERLAP = {"overlap_expert_parallel_comm": True}
AFTER_FAILURE = [Case(2, EP2, OVERLAP, after_failure=True), Case(2, CP2, after_failure=True)]
BFLOAT16 = [{}, OVERLAP, {"recompute": "moe"}, {"distributed_optimizer": False}]
UNPLANNED = [
    Case(2, EP2, plan=False),
    Case(2, TP2_EP2, plan=False),
    Case(2, {"tensor": 2, "expert_tensor": 2}, plan=False),
    Case(2, {"expert_tensor": 2}, plan=False),
    Case(2, TP2_EP2, {"recompute": "moe"}, plan=False),
    Case(2, EP2, OVERLAP, plan=False),
]
LAYERS = 4


def name(case: Case) -> str:
    return f"{case.ranks}: {case.name}"


def forwarded() -> int:
    return sum(prompt + completion - 1 for prompt, completion in LENGTHS)


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_replay_equals_the_reference_with_the_same_routes(proven, case):
    outcome = proven.outcome(case)
    assert outcome.gradients < 1e-6 and outcome.logprobs < 2e-6
    assert outcome.free_gradients > 1e-2, "the random routes are no test: freely routed, the model learns the same"
    # seen at the dispatchers themselves: every map, and every count of rows that arrived
    assert (outcome.wrong_maps, outcome.wrong_received) == (0, 0) and 0 < outcome.maps_with_grad < outcome.maps
    assert outcome.consumed == outcome.expected > 0


@pytest.mark.parametrize("case", [replace(case, mode="observe") for case in LAYOUTS], ids=name)
def test_with_replay_off_the_same_checks_fail(proven, case):
    outcome = proven.outcome(case)
    assert outcome.gradients > 1e-2 and outcome.logprobs > 1e-2
    assert outcome.wrong_maps == outcome.maps > 0 and outcome.wrong_received > 0.9 * outcome.maps
    # and the model itself is right: it is the one that routes natively
    assert outcome.free_gradients < 1e-6


@pytest.mark.parametrize("case", RECORDED, ids=name)
def test_the_trainers_own_routes_are_replayed_in_the_update(proven, case):
    """The routes were recorded under other router weights: without replay the gradients are others (R2)."""
    outcome = proven.outcome(case)
    assert outcome.gradients < 1e-6 < 1e-2 < outcome.free_gradients
    assert outcome.consumed == outcome.expected > 0


def test_a_gradient_reaches_every_router_through_routes_it_would_not_take(reference):
    gradients = reference(forced=True).gradients
    routers = [g for key, g in gradients.items() if key.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS and all(g.abs().max() > 1e-4 for g in routers)


@pytest.mark.parametrize("case", [Case(2, TP2_EP2, mode="native")], ids=name)
def test_observing_changes_nothing(proven, case):
    native, observed = proven.ranks(case), proven.ranks(replace(case, mode="observe"))
    for a, b in zip(native, observed, strict=True):
        assert a["logprobs"].keys() == b["logprobs"].keys()
        assert all(torch.equal(a["logprobs"][i], b["logprobs"][i]) for i in a["logprobs"])
        assert a["grad_norm"] == b["grad_norm"]
        assert b["tallies"][0]["native_mismatch"] > 0 and b["tallies"][0]["consumed"] == 0


def test_every_layout_takes_the_same_step(proven):
    norms, weights = [], []
    for case in LAYOUTS:
        ranks = proven.ranks(case)
        norms += [rank["grad_norm"] for rank in ranks]
        weights.append(merged(ranks, "weights"))
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
    for other in weights[1:]:
        # Adam's first step is lr * sign(g): where g is about 0 the sign is rounding, elsewhere the weights agree
        wrong = sum(int(((weights[0][n] - other[n]).abs() > 1e-5).sum()) for n in other)
        assert wrong <= 1e-4 * sum(t.numel() for t in other.values())


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_the_ledger_counts_each_route_once_a_pass(proven, case):
    ranks = proven.ranks(case)
    # over all ranks every forwarded token once in each layer, however the ranks share them
    assert sum(rank["tallies"][0]["native_positions"] for rank in ranks) == LAYERS * forwarded()
    for rank in ranks:
        forward, update = rank["tallies"]
        taken, again = (rank["microbatches"] * len(rank[key]) for key in ("layers", "recomputed_layers"))
        # fillers of the interleaved schedule are not counted
        assert forward["consumed"] == forward["expected"] == taken > 0
        assert update["consumed"] == update["expected"] == taken + again
        assert forward["applied_mismatch"] == update["applied_mismatch"] == 0
        assert forward["planned"] == forward["dispatched"] == taken
        assert update["planned"] == update["dispatched"] == taken + again
        assert update["applied_checked"] * taken == forward["applied_checked"] * (taken + again) > 0
        # random routes are not what the router would choose, and the comparison sees it
        assert forward["native_mismatch"] > 0.9 * forward["native_positions"]
        assert sum(forward["native_by_layer"].values()) == forward["native_mismatch"]
        assert forward["native_token_mismatch"] == forward["native_tokens"]


@pytest.mark.parametrize(
    "case, layers",
    [
        (Case(2, EP2, {"recompute": "uniform", "recompute_layers": 3}), [[0, 1, 2, 3]] * 2),
        (Case(2, PP2, {"recompute": "block"}), [[0], [2]]),
        (Case(2, EP2, {"recompute": "block", "recompute_layers": 3}), [[0, 1, 2]] * 2),
        (Case(2, PP2, {"recompute": "moe"}), [[0, 1], [2, 3]]),
        (Case(2, EP2, OVERLAP), [[], []]),
    ],
    ids=lambda value: name(value) if isinstance(value, Case) else "",
)
def test_which_layers_are_recomputed(proven, case, layers):
    assert [rank["recomputed_layers"] for rank in proven.ranks(case)] == layers


def fillers(case: Case, rank: dict) -> int:
    """Microbatches of padding alone, which have no routes."""
    runs = case.parallel.get("virtual_pipeline", 1)
    return rank["microbatches"] % case.parallel["pipeline"] if runs > 1 else 0


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_with_a_plan_no_layer_asks_other_ranks_or_waits_for_the_device(proven, case):
    for rank in proven.ranks(case):
        waits, first, update = rank["waits"], *rank["tallies"]
        without = fillers(case, rank) * (2 * len(rank["layers"]) + len(rank["recomputed_layers"]))
        assert waits["dispatches"] == first["planned"] + update["planned"] + without
        # what is left is that of the fillers, each with the exchange and the wait that a plan replaces
        assert waits["waits"] == without and (waits["reads"] > 0) == (without > 0)
        assert waits["counts"] == (without if case.parallel.get("expert", 1) > 1 else 0)


@pytest.mark.parametrize("case", UNPLANNED, ids=name)
def test_a_plan_changes_no_bit_and_saves_an_exchange_and_a_wait_in_every_layer(proven, case):
    for planned, plain in zip(proven.ranks(replace(case, plan=True)), proven.ranks(case), strict=True):
        for key in ("logprobs", "grads", "weights"):
            assert planned[key].keys() == plain[key].keys()
            assert all(torch.equal(planned[key][n], plain[key][n]) for n in plain[key])
        assert planned["grad_norm"] == plain["grad_norm"]
        waits = plain["waits"]
        assert waits["counts"] == waits["waits"] == waits["dispatches"] == planned["waits"]["dispatches"] > 0
        assert waits["reads"] > 0
        for one, other in zip(planned["tallies"], plain["tallies"], strict=True):
            assert (one["planned"], other["planned"]) == (one["dispatched"], 0)
            assert one == {**other, "planned": one["planned"]}


def budget_of(case: Case, checkpoint) -> tuple:
    """The budget from routes, lengths and layout alone, as `--plan --trace` makes it; and whether it is exact."""
    facts, parallel = read_model(checkpoint), case.parallel_config
    _, routes = batch(facts)
    lengths = [len(one) for one in routes]
    counts = np.stack([count(one.transpose(1, 0, 2), facts.num_experts) for one in routes])
    rows = microbatch_counts(
        pack(lengths, ranks=case.copies, microbatch_tokens=MICROBATCH_TOKENS), lengths, counts, top_k=facts.top_k,
        context=parallel.context, expert_parallel=parallel.expert,
    )  # fmt: skip
    together = dispatching_shares(parallel)
    found = [
        budget(rows[first : first + together], expert_parallel=parallel.expert, top_k=facts.top_k)
        for first in range(0, case.copies, together)
    ]
    return most(found), parallel.expert * parallel.expert_tensor % (parallel.tensor * parallel.context) == 0


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_the_planned_peaks_are_what_the_dispatchers_received(proven, checkpoint, case):
    planned, exact = budget_of(case, checkpoint)
    seen = [rank["dispatch"] for rank in proven.ranks(case)]
    rows, of_an_expert = (max(one[key] for one in seen) for key in ("most_rows", "most_of_an_expert"))
    if exact:
        assert (planned.rank, planned.expert) == (rows, of_an_expert)
    else:  # several copies of the experts share the rows of a data-parallel share
        assert planned.rank > rows and planned.expert >= of_an_expert
    assert planned.even <= planned.rank <= planned.worst


@pytest.mark.parametrize("case", RECORDED, ids=name)
def test_routes_that_the_trainer_recorded_are_planned(proven, case):
    for rank in proven.ranks(case):
        first, update = rank["tallies"]
        assert first["dispatched"] == 0 < update["planned"] == update["dispatched"]


@pytest.mark.parametrize("case", [case for case in LAYOUTS if case.train == OVERLAP], ids=name)
def test_the_update_of_an_overlapping_case_goes_layer_by_layer(proven, case):
    for rank in proven.ranks(case):
        runs = case.parallel.get("virtual_pipeline", 1)
        assert rank["schedule_plans"] == runs * (rank["microbatches"] + fillers(case, rank))


def test_no_other_case_goes_layer_by_layer(proven):
    assert all(rank["schedule_plans"] == 0 for c in LAYOUTS if c.train != OVERLAP for rank in proven.ranks(c))


@pytest.mark.parametrize("case", AFTER_FAILURE, ids=name)
def test_an_update_that_broke_off_leaves_the_next_one_exact(proven, case):
    outcome, without = proven.outcome(case), proven.ranks(replace(case, after_failure=False))
    assert outcome.gradients < 1e-6 and (outcome.wrong_maps, outcome.wrong_received) == (0, 0)
    for broken, clean in zip(proven.ranks(case), without, strict=True):
        assert all(torch.equal(broken["grads"][n], clean["grads"][n]) for n in clean["grads"])
        assert broken["tallies"] == clean["tallies"]


@pytest.mark.parametrize("settings", BFLOAT16[1:], ids=lambda settings: "-".join(settings))
def test_in_bfloat16_schedule_recomputation_and_optimizer_change_no_bit(proven, settings):
    cases = [Case(2, EP2, {"dtype": "bfloat16", **s}) for s in (settings, BFLOAT16[0])]
    for rank, plain in zip(*map(proven.ranks, cases), strict=True):
        for key in ("logprobs", "grads", "weights"):
            assert all(torch.equal(rank[key][n], plain[key][n]) for n in plain[key])
        assert rank["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    "case, message",
    [
        # A router that natively routes asks its ranks for counts: behind a plan these would not answer.
        (Case(ranks, layout, plan=fault != "orphan", fault=fault), message)
        for ranks, layout, fault, message in [
            (2, TP2_EP2, "swapped", "tokens were dispatched to other experts than recorded"),
            (2, TP2_EP2, "repeated", "routes were not taken exactly once"),
            (2, TP2_EP2, "orphan", "routes were not taken exactly once"),
            (2, VPP2, "swapped", "tokens were dispatched to other experts than recorded"),
            (2, VPP2, "orphan", "routes were not taken exactly once"),
            (2, CP2, "swapped", "tokens were dispatched to other experts than recorded"),
        ]
    ],
    ids=lambda value: name(value) if isinstance(value, Case) else "",
)
def test_a_planted_fault_is_refused_and_named(proven, case, message):
    first, last = (rank["error"] for rank in proven.ranks(case))
    assert first is None
    assert last.startswith(f"{message} (logprobs, rank 1): got ")


@pytest.mark.parametrize(
    "case, message",
    [
        (
            Case(2, EP2, OVERLAP, fault="previous key"),
            "another microbatch than runs through it (update, rank {}, layer 3): got microbatch 0, expected",
        ),
        (
            Case(2, TP2_EP2, OVERLAP, fault="key bound in forward"),
            "a session that is not open (logprobs, rank {}, microbatch 2, layer 3): got update",
        ),
    ],
    ids=lambda value: name(value) if isinstance(value, Case) else "",
)
def test_a_key_that_is_not_the_microbatchs_own_is_refused_in_the_schedule(proven, case, message):
    for number, rank in enumerate(proven.ranks(case)):
        assert message.format(number) in rank["error"]


@pytest.mark.parametrize("case", [Case(2, TP2_EP2, {"dtype": "bfloat16"})], ids=name)
def test_bfloat16_trains_near_the_reference(proven, reference, case):
    logprobs = reference(forced=True).logprobs
    seen = merged(proven.ranks(case), "logprobs")
    difference = torch.cat([(seen[i] - logprobs[i]).abs() for i in logprobs])
    assert 1e-4 < difference.mean() < 0.1
    assert proven.outcome(case).wrong_maps == 0
