"""Experts that moved to other ranks: the same numbers under the same names, and nobody but the dispatcher knows.

With two experts for each token every sum has the same two terms, whichever comes first, so that all must be equal bit
for bit; with more of them their order is that of the slots, and rounding shows it.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import torchrun
from tests.distributed.placement_worker import CASES, different

pytestmark = pytest.mark.timeout(300)
EXACT = [name for name in CASES if "top-4" not in name]
RANKS = range(4)


@pytest.fixture(scope="module")
def seen(checkpoint, tmp_path_factory):
    """What each rank saw: [rank][case]."""
    out = tmp_path_factory.mktemp("placement")
    process = torchrun(4, Path(__file__).with_name("placement_worker.py"), checkpoint, out)
    assert process.returncode == 0, process.stderr[-3000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in RANKS]


def gathered(seen, name, kind, update, what):
    """{tensor: its values} of all ranks together, by whichever has it."""
    return {key: value for rank in RANKS for key, value in seen[rank][name][kind][update][what].items()}


@pytest.mark.parametrize("name", EXACT)
def test_placed_experts_compute_the_same_bits(seen, name):
    """Log-probabilities, gradients, and the weights after an update that needs the moments of the one before."""
    for what in ("logprobs", "grads", "weights"):
        for update in range(2):
            natural, placed = (gathered(seen, name, kind, update, what) for kind in ("natural", "placed"))
            assert natural and different(natural, placed) == set(), what
    norms = [[seen[0][name][kind][update]["grad_norm"] for update in range(2)] for kind in ("natural", "placed")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # a sum over all elements as they lie
    first, second = (gathered(seen, name, "natural", update, "weights") for update in range(2))
    experts = [key for key in first if ".experts." in key]
    assert experts and not any(torch.equal(first[key], second[key]) for key in experts)


def test_with_four_experts_a_token_the_order_of_its_sum_shows_and_nothing_else(seen):
    name = "EP2 DP2 top-4"
    for what, bound in (("logprobs", 5e-6), ("grads", 1e-6)):
        natural, placed = (gathered(seen, name, kind, 1, what) for kind in ("natural", "placed"))
        assert natural.keys() == placed.keys()
        differences = [float((natural[key] - placed[key]).abs().max()) for key in natural if natural[key].numel()]
        assert 0 < max(differences) < bound, what


@pytest.mark.parametrize("name", CASES)
def test_every_row_went_to_the_recorded_experts_wherever_they_lie(seen, name):
    for rank in RANKS:
        for update in range(2):
            natural, placed = (seen[rank][name][kind][update] for kind in ("natural", "placed"))
            assert placed["dispatch"]["maps"] == natural["dispatch"]["maps"] > 0
            assert placed["dispatch"]["wrong_maps"] == placed["dispatch"]["wrong_received"] == 0
            assert placed["mismatch"] == [0, 0] and placed["planned"] == natural["planned"]
            assert (placed["planned"] != [0, 0]) == CASES[name].plan


@pytest.mark.parametrize("name", CASES)
def test_back_in_their_places_experts_and_moments_are_those_that_never_moved(seen, name):
    for rank in RANKS:
        moved = seen[rank][name]["moved"]
        assert any("experts" in key for key in moved) and any(key.endswith("exp_avg_sq") for key in moved)
        if name in EXACT:
            assert different(*seen[rank][name]["back"]) == set()


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_does_not_depend_on_the_placement(seen, name):
    """Written with one and read with another, it has the same weights, main weights and moments."""
    for rank in RANKS:
        for loaded, expected in seen[rank][name]["loaded"]:
            assert different(loaded, expected) == set()


@pytest.mark.parametrize("name", CASES)
def test_the_sampler_gets_the_same_weights(seen, name):
    natural, placed = seen[0][name]["sent"]
    assert len(natural) > 100 and different(natural, placed) == set()


def test_what_does_not_fit_together_is_refused(seen):
    told = [seen[rank]["faults"] for rank in RANKS]
    assert all("different placements" in one["two placements"] and one["touched"] == set() for one in told)
    assert len({one["two placements"].split("digest ")[1].split()[0] for one in told}) == 2
    assert all("another placement" in one["plans of before"] for one in told)
    for name in ("only dispatcher", "only weights"):
        assert all("not where their tokens are sent to" in one[name] for one in told), name
