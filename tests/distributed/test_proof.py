"""The trained policy against an independent reference: same routes, same gradients, in any layout and schedule."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.models.hf import read_model
from moe_rl.planning.dispatch import count
from moe_rl.planning.packing import pack
from moe_rl.planning.peaks import budget, dispatching_groups, microbatch_counts, most
from moe_rl.proof.batch import LENGTHS, batch
from moe_rl.proof.cases import LAYOUTS, MICROBATCH_TOKENS, RECORDED, Case
from moe_rl.proof.matrix import Proved, merged
from tests.distributed.usual import with_seeds
from tests.support.planted import Planted

# The first case of a world size waits for all of them.
pytestmark = pytest.mark.timeout(900)

EP2, CP2, PP2 = {"expert": 2}, {"context": 2}, {"pipeline": 2}
TP2_EP2, VPP2 = {"tensor": 2, "expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}
OVERLAP = {"overlap_expert_parallel_comm": True}
AFTER_FAILURE = [Case(2, EP2, OVERLAP, after_failure=True), Case(2, CP2, after_failure=True)]
BFLOAT16 = [
    Case(2, EP2, {"dtype": "bfloat16", **settings})
    for settings in ({}, OVERLAP, {"recompute": "moe"}, {"distributed_optimizer": False})
]
SMALL_SUMS = {"dtype": "bfloat16", "megatron_optimizer": {"grad_reduce_in_fp32": False}}
UNPLANNED = [
    Case(2, EP2, plan=False),
    Case(2, TP2_EP2, plan=False),
    Case(2, {"tensor": 2, "expert_tensor": 2}, plan=False),
    Case(2, {"expert_tensor": 2}, plan=False),
    Case(2, TP2_EP2, {"recompute": "moe"}, plan=False),
    Case(2, EP2, OVERLAP, plan=False),
]
# most of them in chunks as well; where ranks share an expert's matrices, they gather every chunk's rows
OVERLAPPED = [
    Case(2, EP2, overlap_chunks=1),
    Case(2, TP2_EP2, overlap_chunks=1),
    Case(2, {"context": 2, "expert": 2}, overlap_chunks=1),
    Case(2, EP2, {"recompute": "uniform"}, overlap_chunks=1),
    Case(2, TP2_EP2, {"recompute": "moe"}, overlap_chunks=1),
    Case(2, {"expert_tensor": 2}, overlap_chunks=1),
    Case(4, {"expert": 2, **VPP2}, {"recompute": "moe"}, overlap_chunks=1),
]
IN_CHUNKS = [OVERLAPPED[0], OVERLAPPED[2], *OVERLAPPED[4:]]
CHUNKS = [replace(case, overlap_chunks=2 + number % 2) for number, case in enumerate(IN_CHUNKS)]
COPIED = [
    Case(2, EP2, expert_copies=1),
    Case(2, EP2, {"recompute": "uniform"}, expert_copies=2),
    Case(2, TP2_EP2, {"recompute": "moe"}, expert_copies=1, overlap_chunks=2),
    Case(4, {"expert": 4}, expert_copies=2),
    Case(2, EP2, expert_copies=1, node_ranks=1),
    Case(4, {"expert": 4}, expert_copies=2, node_ranks=2),
    Case(4, {"expert": 2, "expert_tensor": 2}, expert_copies=1),
    Case(4, {"expert": 2, **PP2}, {"dtype": "bfloat16"}, expert_copies=1),
]
OBSERVED = [replace(case, mode="observe") for case in LAYOUTS]
LAYERS = 4
# One or two of each kind.
USUAL = [
    Case(2, EP2),
    Case(2, TP2_EP2, {"recompute": "uniform"}),
    Case(2, VPP2, {"recompute": "uniform"}),
    Case(2, {"context": 2, "expert": 2}, OVERLAP),
    Case(2, EP2, {"recompute": "block", "recompute_layers": 3}),
    Case(2, EP2, {"dtype": "bfloat16"}),
    Case(2, EP2, {"dtype": "bfloat16", "recompute": "moe"}),
    Case(2, TP2_EP2, {"dtype": "bfloat16"}),
    Case(2, EP2, SMALL_SUMS),
    Case(2, EP2, mode="observe"),
    Case(2, TP2_EP2, mode="native"),
    Case(2, TP2_EP2, {"recompute": "uniform"}, mode="r2"),
    Case(2, TP2_EP2, plan=False),
    Case(2, TP2_EP2, {"recompute": "moe"}, overlap_chunks=1),
    Case(2, TP2_EP2, {"recompute": "moe"}, overlap_chunks=3),
    Case(2, EP2, expert_copies=1),
    Case(2, EP2, expert_copies=1, node_ranks=1),
    Case(2, CP2, after_failure=True),
    Planted(2, EP2, fault="swapped"),
    Planted(2, CP2, fault="swapped"),
    Planted(2, TP2_EP2, plan=False, fault="other rows read"),
    Planted(2, TP2_EP2, fault="repeated"),
    Planted(2, TP2_EP2, fault="lost key"),
    Planted(2, EP2, OVERLAP, fault="previous key"),
]


def name(case: Case) -> str:
    return f"{case.ranks}: {case.name}"


def forwarded() -> int:
    return sum(prompt + completion - 1 for prompt, completion in LENGTHS)


@pytest.mark.parametrize("case", [with_seeds(case, usual=case in USUAL) for case in LAYOUTS], ids=name)
def test_replay_equals_the_reference_with_the_same_routes(proven, case):
    outcome = proven.outcome(case)
    assert outcome.gradients < 1e-6 and outcome.logprobs < 2e-6
    assert outcome.free_gradients > 1e-2, "the random routes are no test: freely routed, the model learns the same"
    # seen at the dispatchers themselves: every map, and every count of rows that arrived
    assert (outcome.wrong_maps, outcome.wrong_received) == (0, 0) and 0 < outcome.maps_with_grad < outcome.maps
    assert outcome.consumed == outcome.expected > 0


@pytest.mark.parametrize("case", [with_seeds(case, usual=case in USUAL) for case in OBSERVED], ids=name)
def test_with_replay_off_the_same_checks_fail(proven, case):
    outcome = proven.outcome(case)
    assert outcome.gradients > 1e-2 and outcome.logprobs > 1e-2
    assert outcome.wrong_maps == outcome.maps > 0 and outcome.wrong_received > 0.9 * outcome.maps
    # and the model itself is right: it is the one that routes natively
    assert outcome.free_gradients < 1e-6


@pytest.mark.parametrize("case", [with_seeds(case, usual=case in USUAL) for case in RECORDED], ids=name)
def test_the_trainers_own_routes_are_replayed_in_the_update(proven, case):
    """The routes were recorded under other router weights: without replay the gradients are others (R2)."""
    outcome = proven.outcome(case)
    assert outcome.gradients < 1e-6 < 1e-2 < outcome.free_gradients
    assert outcome.consumed == outcome.expected > 0


def test_a_gradient_reaches_every_router_through_routes_it_would_not_take(reference):
    gradients = reference(forced=True).gradients
    routers = [g for key, g in gradients.items() if key.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS and all(g.abs().max() > 1e-4 for g in routers)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, TP2_EP2, mode="native"),
        Case(2, EP2, OVERLAP, mode="native"),
        Case(2, VPP2, {"recompute": "uniform"}, mode="native"),
    ],
    ids=name,
)
def test_observing_changes_nothing(proven, case):
    native, observed = proven.ranks(case), proven.ranks(replace(case, mode="observe"))
    for a, b in zip(native, observed, strict=True):
        assert a["logprobs"].keys() == b["logprobs"].keys()
        assert all(torch.equal(a["logprobs"][i], b["logprobs"][i]) for i in a["logprobs"])
        assert a["grad_norm"] == b["grad_norm"]
        assert b["tallies"][0]["native_mismatch"] > 0 and b["tallies"][0]["consumed"] == 0


@pytest.mark.long
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
        assert forward["consumed"] == forward["expected"] == taken > 0
        assert update["consumed"] == update["expected"] == taken + again
        # and so it is seen at the dispatchers, which keep no ledger
        keys = [(m, layer) for m in range(rank["microbatches"]) for layer in rank["layers"]]
        assert rank["forwards"] == dict.fromkeys(keys, 1)
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


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_with_a_plan_no_layer_asks_other_ranks_or_waits_for_the_device(proven, case):
    for rank in proven.ranks(case):
        waits, first, update = rank["waits"], *rank["tallies"]
        assert waits["dispatches"] == first["planned"] + update["planned"] > 0
        assert waits["counts"] == waits["waits"] == waits["reads"] == 0


@pytest.mark.long
def test_interleaved_stages_are_filled_up_with_microbatches_of_padding(proven):
    """They have routes and plans as all others: what is claimed of these layouts is claimed of them too."""
    filled = [case for case in LAYOUTS if any(rank["fillers"] for rank in proven.ranks(case))]
    assert {case.train == OVERLAP for case in filled} == {True, False}
    for case in LAYOUTS:
        for rank in proven.ranks(case):
            stages = case.parallel["pipeline"] if "virtual_pipeline" in case.parallel else 1
            assert (rank["microbatches"] % stages, rank["fillers"] < stages) == (0, True)


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


@pytest.mark.parametrize("case", OVERLAPPED + CHUNKS, ids=name)
def test_rows_that_leave_before_the_router_has_run_are_those_of_the_record(proven, case):
    """Maps, received rows, routes taken, waits: as in Megatron's order."""
    outcome, plain = proven.outcome(case), proven.outcome(replace(case, overlap_chunks=0))
    assert outcome.gradients < 1e-6 and outcome.logprobs < 2e-6 < 1e-2 < outcome.free_gradients
    assert (outcome.wrong_maps, outcome.wrong_received) == (0, 0) and outcome.maps == plain.maps > 0
    assert outcome.consumed == outcome.expected == plain.expected
    for rank in proven.ranks(case):
        first, update = rank["tallies"]
        assert first["planned"] == first["dispatched"] and update["planned"] == update["dispatched"]
        dispatches = first["planned"] + update["planned"]
        assert rank["waits"] == {"counts": 0, "waits": 0, "reads": 0, "dispatches": dispatches}


@pytest.mark.parametrize("case", OVERLAPPED, ids=name)
def test_overlapped_in_one_chunk_no_bit_changes(proven, case):
    for one, plain in zip(proven.ranks(case), proven.ranks(replace(case, overlap_chunks=0)), strict=True):
        for key in ("logprobs", "grads", "weights"):
            assert one[key].keys() == plain[key].keys()
            assert all(torch.equal(one[key][n], plain[key][n]) for n in plain[key])
        assert (one["grad_norm"], one["tallies"]) == (plain["grad_norm"], plain["tallies"])


@pytest.mark.parametrize("case", CHUNKS, ids=name)
def test_in_chunks_the_gradient_changes_by_the_rounding_of_its_sums(proven, case):
    """The norm of all tensors together; through four layers each adds its rounding to what it got."""
    chunked, plain = (merged(proven.ranks(one), "grads") for one in (case, replace(case, overlap_chunks=0)))
    whole, difference = (torch.cat([t.flatten().double() for t in one]) for one in (
        plain.values(), [chunked[n].double() - plain[n].double() for n in plain]
    ))  # fmt: skip
    assert 0 < difference.norm() < 1e-6 * whole.norm()


@pytest.mark.parametrize("case", COPIED, ids=name)
def test_copies_of_experts_compute_rows_and_the_gradient_is_the_same(proven, case):
    """Each row is computed once, by its expert or a copy. Sums over rows are rounded in another order."""
    uncopied = replace(case, expert_copies=0, node_ranks=None)
    outcome, plain = proven.outcome(case), proven.outcome(uncopied)
    assert (outcome.wrong_maps, outcome.wrong_received) == (0, 0) and outcome.maps == plain.maps > 0
    assert outcome.consumed == outcome.expected == plain.expected
    ranks = proven.ranks(case)
    assert sum(rank["dispatch"]["copied"] for rank in ranks) > 0
    assert all(rank["dispatch"]["copied"] == 0 for rank in proven.ranks(uncopied))
    bound = 2e-2 if case.train.get("dtype") == "bfloat16" else 1e-6
    assert outcome.gradients < bound < outcome.free_gradients and outcome.logprobs < 2 * bound


def test_ranks_on_nodes_of_their_own_copy_more(proven):
    """Copies then also keep rows where they come from."""
    copied = [
        sum(rank["dispatch"]["copied"] for rank in proven.ranks(Case(2, EP2, expert_copies=1, node_ranks=node_ranks)))
        for node_ranks in (None, 1)
    ]
    assert 0 < copied[0] < copied[1]


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
    found = [
        budget(rows[together], expert_parallel=parallel.expert, top_k=facts.top_k)
        for together in dispatching_groups(parallel, case.copies)
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
        assert rank["schedule_plans"] == runs * rank["microbatches"]


def overlapping(case: Case, rank: dict, number: int) -> int:
    """Forwards of a layer that combined 1F1B runs in turns with the backward of another microbatch, on this rank."""
    stages, runs = case.parallel.get("pipeline", 1), case.parallel.get("virtual_pipeline", 1)
    stage = number * stages // case.ranks
    # Without a pipeline it begins with one microbatch alone; see megatron's get_pp_rank_microbatches for the other.
    alone = 1 if stages == 1 else 2 * (stages - stage - 1) + (runs - 1) * stages + 1
    in_turns = max(0, runs * rank["microbatches"] - alone)
    return in_turns * len(rank["layers"]) // runs


@pytest.mark.parametrize("case", [case for case in LAYOUTS if case.train == OVERLAP], ids=name)
def test_an_overlapping_case_runs_a_forward_in_turns_with_the_backward_of_another_microbatch(proven, case):
    seen = [rank["overlapped"] for rank in proven.ranks(case)]
    assert seen == [overlapping(case, rank, number) for number, rank in enumerate(proven.ranks(case))]
    assert any(seen)


@pytest.mark.long
def test_both_kinds_of_schedule_overlap_on_every_rank_of_some_layout(proven):
    overlapping = [case for case in LAYOUTS if case.train == OVERLAP]
    everywhere = [case for case in overlapping if all(rank["overlapped"] for rank in proven.ranks(case))]
    assert {"pipeline" in case.parallel for case in everywhere} == {True, False}


@pytest.mark.long
def test_no_other_case_goes_layer_by_layer(proven):
    others = [rank for case in LAYOUTS if case.train != OVERLAP for rank in proven.ranks(case)]
    assert all(rank["schedule_plans"] == rank["overlapped"] == 0 for rank in others)


@pytest.mark.parametrize("case", [Case(2, EP2, OVERLAP | {"delay_wgrad_compute": True})], ids=name)
def test_a_schedule_that_delays_the_gradients_of_weights(proven, case):
    """It asks every layer for them, twice: its experts, and those it shares. Megatron's own linear layers, unlike
    TransformerEngine's, have computed them by then, and nothing changes by a bit."""
    for delayed, plain in zip(proven.ranks(case), proven.ranks(replace(case, train=OVERLAP)), strict=True):
        assert delayed["delayed"] == 2 * delayed["microbatches"] * len(delayed["layers"]) > 0 == plain["delayed"]
        assert delayed["overlapped"] == plain["overlapped"] > 0
        assert all(torch.equal(delayed["grads"][n], plain["grads"][n]) for n in plain["grads"])
        assert delayed["tallies"] == plain["tallies"]


@pytest.mark.parametrize("case", AFTER_FAILURE, ids=name)
def test_an_update_that_broke_off_leaves_the_next_one_exact(proven, case):
    outcome, without = proven.outcome(case), proven.ranks(replace(case, after_failure=False))
    assert outcome.gradients < 1e-6 and (outcome.wrong_maps, outcome.wrong_received) == (0, 0)
    for broken, clean in zip(proven.ranks(case), without, strict=True):
        assert all(torch.equal(broken["grads"][n], clean["grads"][n]) for n in clean["grads"])
        assert broken["tallies"] == clean["tallies"]


@pytest.mark.parametrize("plain", [BFLOAT16[0]], ids=name)
@pytest.mark.parametrize("case", BFLOAT16[1:], ids=name)
def test_in_bfloat16_schedule_recomputation_and_optimizer_change_no_bit(proven, case, plain):
    for rank, without in zip(proven.ranks(case), proven.ranks(plain), strict=True):
        for key in ("logprobs", "grads", "weights"):
            assert all(torch.equal(rank[key][n], without[key][n]) for n in without[key])
        assert rank["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("case", [Case(2, layout, SMALL_SUMS) for layout in (EP2, TP2_EP2, CP2)], ids=name)
def test_gradients_summed_in_bfloat16_are_exact_up_to_their_rounding(proven, case):
    outcome, control = proven.outcome(case), proven.outcome(replace(case, mode="observe"))
    assert Proved(outcome, control).exact and outcome.gradients > 1e-3


OTHER_EXPERTS = "tokens were dispatched to other experts than recorded ({}, rank {}): got "
OTHER_KEY = "a layer asked for routes of a microbatch that it is not running (update, rank {}, layer {}): got "
OTHER_SOURCE = "the routes {} are not those that left the sampler's engine (logprobs, rank {}): got other sums for "
# found by the sum over the ranks that share the sequences, on each of them; what is wrong was planted on the last
LOST_BY_ANOTHER = OTHER_SOURCE.format("dispatched", 0)
READ_WRONG = [OTHER_SOURCE.format("as they were read", rank) for rank in range(4)]
# a check at the end of a pass ends all ranks together
ANOTHER = "another rank refused the routes that it replays: got rank 1: "
NO_KEY = "a layer lost the handle to its routes ({}, rank {}, microbatch 0, layer {}): got no handle"
OVERLAPPED_VPP2 = (TP2_EP2 | VPP2, OVERLAP)


@pytest.mark.parametrize(
    "case, messages",
    [
        (Planted(2, EP2, fault="swapped"), [ANOTHER, OTHER_EXPERTS.format("logprobs", 1)]),
        (Planted(2, TP2_EP2, fault="swapped"), [LOST_BY_ANOTHER, OTHER_EXPERTS.format("logprobs", 1)]),
        (Planted(2, VPP2, fault="swapped"), [LOST_BY_ANOTHER, OTHER_EXPERTS.format("logprobs", 1)]),
        (Planted(2, CP2, fault="swapped"), [LOST_BY_ANOTHER, OTHER_EXPERTS.format("logprobs", 1)]),
        (Planted(2, EP2, plan=False, fault="other rows read"), [ANOTHER, READ_WRONG[1]]),
        *((Planted(2, way, plan=False, fault="other rows read"), READ_WRONG[:2]) for way in (TP2_EP2, VPP2, CP2)),
        (Planted(4, TP2_EP2 | PP2, plan=False, fault="other rows read"), READ_WRONG),
        (
            Planted(2, TP2_EP2, fault="repeated"),
            [ANOTHER, "routes were not taken exactly once (logprobs, rank 1): got "],
        ),
        (Planted(2, TP2_EP2, fault="lost key"), [NO_KEY.format("logprobs", rank, 0) for rank in (0, 1)]),
        (Planted(2, EP2, OVERLAP, fault="key lost on one rank"), ["deserted", NO_KEY.format("update", 1, 0)]),
        # sent before the router went wrong, or not at all
        (
            Planted(2, TP2_EP2, overlap_chunks=2, fault="swapped"),
            [LOST_BY_ANOTHER, OTHER_EXPERTS.format("logprobs", 1)],
        ),
        (
            Planted(2, EP2, overlap_chunks=2, fault="previous key"),
            [OTHER_KEY.format(rank, 3) + "microbatch 0, expected microbatch 1" for rank in (0, 1)],
        ),
        (
            Planted(2, EP2, OVERLAP, fault="previous key"),
            [OTHER_KEY.format(rank, 3) + "microbatch 0, expected microbatch 1" for rank in (0, 1)],
        ),
        (
            Planted(2, EP2, OVERLAP, fault="exchanged keys"),
            [OTHER_KEY.format(rank, 0) + "microbatch 1, expected microbatch 0" for rank in (0, 1)],
        ),
        (Planted(2, EP2, OVERLAP, fault="exchanged layers"), [OTHER_EXPERTS.format("update", rank) for rank in (0, 1)]),
        (
            Planted(2, TP2_EP2, OVERLAP, fault="key bound in forward"),
            [NO_KEY.format("update", rank, 3) for rank in (0, 1)],
        ),
        # of two runs of layers on each stage
        (Planted(4, *OVERLAPPED_VPP2, fault="exchanged layers"), [OTHER_EXPERTS.format("update", r) for r in range(4)]),
        # the second stage waits for what the first has to compute from it
        (
            Planted(4, *OVERLAPPED_VPP2, fault="key of another chunk"),
            [OTHER_KEY.format(rank, 2) + "microbatch 1, expected microbatch 0" for rank in (0, 1)] + ["deserted"] * 2,
        ),
    ],
    ids=lambda value: name(value) if isinstance(value, Case) else "",
)
def test_a_planted_fault_is_refused_and_named_under_plans(proven, case, messages):
    assert any(rank["fired"] for rank in proven.ranks(case))
    for rank, message in zip(proven.ranks(case), messages, strict=True):
        if message == "deserted":
            assert rank["error"] is None and rank["deserted"]
        else:
            assert rank["error"].startswith(message)
            assert rank["fired"] or message in (ANOTHER, LOST_BY_ANOTHER, *READ_WRONG)


@pytest.mark.parametrize("case", [Case(2, TP2_EP2, {"dtype": "bfloat16"})], ids=name)
def test_bfloat16_trains_near_the_reference(proven, reference, case):
    logprobs = reference(forced=True).logprobs
    seen = merged(proven.ranks(case), "logprobs")
    difference = torch.cat([(seen[i] - logprobs[i]).abs() for i in logprobs])
    assert 1e-4 < difference.mean() < 0.1
    assert proven.outcome(case).wrong_maps == 0
