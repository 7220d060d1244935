"""Schedules, recomputation and optimizers beyond the gradients of `test_proof`: that each is really in effect, and what
must not happen in it."""

import pytest
import torch

from moe_rl.proof.cases import LAYOUTS, Case
from moe_rl.proof.matrix import merged

pytestmark = pytest.mark.timeout(600)

EP2, TP2_EP2, PP2 = {"expert": 2}, {"tensor": 2, "expert": 2}, {"pipeline": 2}
BF16 = {"dtype": "bfloat16"}
OVERLAP = {"overlap_expert_parallel_comm": True}


def name(value) -> str:
    return f"{value.ranks}: {value.name}" if isinstance(value, Case) else ""


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        (Case(2, EP2, {"recompute": "uniform", "recompute_layers": 3}), [[0, 1, 2, 3]] * 2),
        (Case(2, PP2, {"recompute": "block"}), [[0], [2]]),
        (Case(2, PP2, {"recompute": "moe"}), [[0, 1], [2, 3]]),
        (Case(2, EP2, OVERLAP), [[], []]),
    ],
    ids=name,
)
def test_which_layers_are_recomputed(proven, case, layers):
    """By the ledger's count, and by the dispatchers' own: in a forward-only pass, in the update, in recomputation."""
    for rank, recomputed in zip(proven.ranks(case), layers, strict=True):
        assert rank["recomputed_layers"] == recomputed
        first = rank["dispatch"]["first"] - rank["microbatches"] * len(rank["layers"])
        assert first == rank["microbatches"] * len(recomputed)
        assert rank["dispatch"]["with_grad"] == rank["microbatches"] * len(rank["layers"])


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_combined_1f1b_runs_where_it_was_asked_for(proven, case):
    """And in the update alone: a forward-only pass has no backward to run beside."""
    for rank in proven.ranks(case):
        runs = case.parallel.get("virtual_pipeline", 1)
        fillers = rank["microbatches"] % case.parallel["pipeline"] if runs > 1 else 0
        overlapping = "overlap_expert_parallel_comm" in case.train
        assert rank["plans"] == (runs * (rank["microbatches"] + fillers) if overlapping else 0)


@pytest.mark.parametrize(
    "case",
    [Case(2, EP2, {**BF16, **train}) for train in (OVERLAP, {"recompute": "moe"}, {"distributed_optimizer": False})],
    ids=name,
)
@pytest.mark.parametrize("plain", [Case(2, EP2, BF16)], ids=[""])
def test_bfloat16_gives_the_same_bits(proven, case, plain):
    for ours, theirs in zip(proven.ranks(case), proven.ranks(plain), strict=True):
        for key in ("logprobs", "grads", "weights"):
            assert all(torch.equal(ours[key][i], theirs[key][i]) for i in theirs[key])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case(2, EP2, OVERLAP, fault="late key"),
            "a layer asked for the routes of another microbatch than runs through it (update, rank {}, layer 3): "
            "got microbatch 0, expected microbatch 1",
        ),
        (
            Case(2, TP2_EP2, OVERLAP, fault="kept key"),
            "routes were asked of a session that is not open (logprobs, rank {}, microbatch 2, layer 3): got update",
        ),
    ],
    ids=name,
)
def test_a_key_from_the_routers_last_binding_is_refused(proven, case, message):
    for number, rank in enumerate(proven.ranks(case)):
        assert rank["error"].startswith(message.format(number))


@pytest.mark.parametrize("case", [Case(2, EP2, OVERLAP, fault="broken off")], ids=name)
def test_an_update_after_one_that_was_broken_off_is_exact(proven, case):
    outcome = proven.outcome(case)
    assert outcome.gradients < 1e-6 and outcome.wrong_maps == outcome.wrong_received == 0
    assert outcome.consumed == outcome.expected > 0
    untroubled = merged(proven.ranks(Case(2, EP2, OVERLAP)), "weights")
    again = merged(proven.ranks(case), "weights")
    assert all(torch.equal(again[key], untroubled[key]) for key in untroubled)
