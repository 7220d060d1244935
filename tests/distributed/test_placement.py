"""Experts that moved to other ranks: the same numbers under the same names, and nobody but the dispatcher knows.

With two experts for each token every sum has the same two terms, whichever comes first, so that all must be equal bit
for bit; with more of them their order is that of the slots, and rounding shows it.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import torchrun
from tests.distributed.placement_worker import CASES, SHARDED, TOP_4, different

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
EXACT = [name for name in CASES if name != TOP_4]
RANKS = range(4)


@pytest.fixture(scope="module")
def seen(checkpoint, tmp_path_factory):
    """What each rank saw: [rank][case]."""
    out = tmp_path_factory.mktemp("placement")
    process = torchrun(4, Path(__file__).with_name("placement_worker.py"), checkpoint, out)
    assert process.returncode == 0, process.stderr[-3000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in RANKS]


def gathered(seen, name, kind, what):
    """{tensor: its values, or their digest} of all ranks together, by whichever has it."""
    return {key: value for rank in RANKS for key, value in seen[rank][name][kind][what].items()}


@pytest.mark.parametrize("name", EXACT)
def test_placed_experts_compute_the_same_bits(seen, name):
    """Log-probabilities, gradients, and the weights after an update that needs the moments of the one before."""
    for what in ("logprobs", "grads", "weights"):
        natural, placed = (gathered(seen, name, kind, what) for kind in ("natural", "placed"))
        assert natural and different(natural, placed) == set(), what
    natural, placed = (seen[0][name][kind]["grad_norm"] for kind in ("natural", "placed"))
    assert placed == pytest.approx(natural, rel=1e-6)  # a sum over all elements as they lie


def test_with_four_experts_a_token_the_order_of_its_sum_shows_and_nothing_else(seen):
    for what, bound in (("logprobs", 5e-6), ("grads", 1e-6)):
        natural, placed = (gathered(seen, TOP_4, kind, what) for kind in ("natural", "placed"))
        assert natural.keys() == placed.keys()
        differences = [float((natural[key] - placed[key]).abs().max()) for key in natural if natural[key].numel()]
        assert 0 < max(differences) < bound, what


@pytest.mark.parametrize("name", CASES)
def test_every_row_went_to_the_recorded_experts_wherever_they_lie(seen, name):
    for rank in RANKS:
        natural, placed = (seen[rank][name][kind] for kind in ("natural", "placed"))
        assert placed["dispatch"]["maps"] == natural["dispatch"]["maps"] > 0
        assert placed["dispatch"]["wrong_maps"] == placed["dispatch"]["wrong_received"] == 0
        assert placed["mismatch"] == [0, 0] and placed["planned"] == natural["planned"]
        assert (placed["planned"] != [0, 0]) == CASES[name].plan


@pytest.mark.parametrize("name", EXACT)
def test_back_in_their_places_experts_and_moments_are_those_that_never_moved(seen, name):
    """After an update in other places."""
    for rank in RANKS:
        moved = seen[rank][name]["moved"]
        assert any("experts" in key for key in moved) and any(key.endswith("exp_avg_sq") for key in moved)
        assert seen[rank][name]["back"] == set()


def test_checkpoints_and_the_sampler_know_nothing_of_placements(seen):
    """A checkpoint that was written with one and read with another gives the same weights, main weights and moments."""
    assert all(seen[rank][SHARDED]["loaded"] == set() for rank in RANKS)
    sent, differing = seen[0][SHARDED]["sent"]
    assert sent > 100 and differing == set()


def test_what_does_not_fit_together_is_refused(seen):
    told = [seen[rank]["faults"] for rank in RANKS]
    assert all("different placements" in one["two placements"] and one["touched"] == set() for one in told)
    assert len({one["two placements"].split("digest ")[1].split()[0] for one in told}) == 2
    assert all("another placement" in one["plans of before"] for one in told)
    for name in ("only dispatcher", "only weights"):
        assert all("not where their tokens are sent" in one[name] for one in told), name
