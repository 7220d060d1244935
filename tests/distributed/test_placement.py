"""Experts that moved to other ranks: the same numbers under the same names, and nobody but the dispatcher knows.

With two experts for each token every sum has the same two terms, whichever comes first, so that all must be equal bit
for bit; with more of them their order is that of the slots, and rounding shows it.
"""

import functools
import json

import pytest

from tests.distributed.jobs.placement import CASES, SHARDED, TOP_4, compared, different, faults, nodes

USUAL = ["EP2"]
EXACT = [name for name in CASES if name != TOP_4]


@pytest.fixture(scope="module")
def top_2(checkpoint, tmp_path_factory):
    """The model with two experts for each token."""
    folder = tmp_path_factory.mktemp("top-2")
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    return folder


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint, top_2, tmp_path_factory):
    """seen(case) -> what each rank saw."""

    @functools.cache
    def run(name):
        source = checkpoint if name == TOP_4 else top_2
        return on_ranks(CASES[name].ranks, compared, CASES[name], source, tmp_path_factory.mktemp("placement"))

    return run


def gathered(seen, name, kind, what):
    """{tensor: its values, or their digest} of all ranks together, by whichever has it."""
    return {key: value for rank in seen(name) for key, value in rank[kind][what].items()}


@pytest.mark.parametrize("name", EXACT)
def test_placed_experts_compute_the_same_bits(seen, name):
    """Log-probabilities, gradients, and the weights after an update that needs the moments of the one before."""
    for what in ("logprobs", "grads", "weights"):
        natural, placed = (gathered(seen, name, kind, what) for kind in ("natural", "placed"))
        assert natural and different(natural, placed) == set(), what
    natural, placed = (seen(name)[0][kind]["grad_norm"] for kind in ("natural", "placed"))
    assert placed == pytest.approx(natural, rel=1e-6)  # a sum over all elements as they lie


@pytest.mark.long
def test_with_four_experts_a_token_the_order_of_its_sum_shows_and_nothing_else(seen):
    for what, bound in (("logprobs", 5e-6), ("grads", 1e-6)):
        natural, placed = (gathered(seen, TOP_4, kind, what) for kind in ("natural", "placed"))
        assert natural.keys() == placed.keys()
        differences = [float((natural[key] - placed[key]).abs().max()) for key in natural if natural[key].numel()]
        assert 0 < max(differences) < bound, what


@pytest.mark.parametrize("name", CASES)
def test_every_row_went_to_the_recorded_experts_wherever_they_lie(seen, name):
    for rank in seen(name):
        natural, placed = (rank[kind] for kind in ("natural", "placed"))
        assert placed["dispatch"]["maps"] == natural["dispatch"]["maps"] > 0
        assert placed["dispatch"]["wrong_maps"] == placed["dispatch"]["wrong_received"] == 0
        assert placed["mismatch"] == [0, 0] and placed["planned"] == natural["planned"]
        assert (placed["planned"] != [0, 0]) == CASES[name].plan


@pytest.mark.parametrize("name", EXACT)
def test_back_in_their_places_experts_and_moments_are_those_that_never_moved(seen, name):
    """After an update in other places."""
    for rank in seen(name):
        moved = rank["moved"]
        assert any("experts" in key for key in moved) and any(key.endswith("exp_avg_sq") for key in moved)
        assert rank["back"] == set()


@pytest.mark.long
def test_checkpoints_and_the_sampler_know_nothing_of_placements(seen):
    """A checkpoint that was written with one and read with another gives the same weights, main weights and moments."""
    assert all(rank["loaded"] == set() for rank in seen(SHARDED))
    sent, differing = seen(SHARDED)[0]["sent"]
    assert sent > 100 and differing == set()


@pytest.mark.long
def test_what_does_not_fit_together_is_refused(on_ranks, top_2):
    told = on_ranks(4, faults, CASES[SHARDED], top_2)
    assert all("different placements" in one["two placements"] and one["touched"] == set() for one in told)
    assert len({one["two placements"].split("digest ")[1].split()[0] for one in told}) == 2
    assert all("another placement" in one["plans of before"] for one in told)
    for name in ("only dispatcher", "only weights"):
        assert all("not where their tokens are sent" in one[name] for one in told), name


def test_a_node_is_a_host_or_what_the_config_says(on_ranks):
    assert on_ranks(2, nodes) == [([0, 0], [0, 1], [0, 1], [0, 0])] * 2
