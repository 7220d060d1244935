"""Context parallelism on two ranks: steps on halves of every sequence are those on shares of the batch."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.jobs import context


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint, tmp_path_factory):
    return on_ranks(2, context.run, checkpoint, tmp_path_factory.mktemp("context"))


def test_a_step_on_halves_of_sequences_is_the_step_on_shares_of_the_batch(seen):
    for rank in seen:
        halves, shares = dict(rank["halves"]), dict(rank["shares"])
        # 4 layers in one update: of 2 microbatches on both ranks, of 1 on each
        assert halves.pop("routing/consumed") == halves.pop("routing/expected") == 4 * (2 + 2)
        assert shares.pop("routing/consumed") == shares.pop("routing/expected") == 4 * (1 + 1)
        # what two rounds wait for is more than what one round of the same tokens does
        assert halves.pop("routing/load_excess") > shares.pop("routing/load_excess") > 0
        # each rank tests the alignment of its own rows
        for one in (halves, shares):
            tested = {key: one.pop(key) for key in [*one] if key.startswith(("routing/alignment", "routing/proven/"))}
            assert -1000 < tested["routing/alignment_evidence"] < 0 <= tested["routing/alignment_power"] <= 1
        # and none of them brings as many rows
        assert 0 < halves.pop("routing/peak_rows") < shares.pop("routing/peak_rows")
        # a signed mean of log-probabilities of 4 to 8 nats keeps their rounding
        signed = {key for key in halves if key.startswith("policy_kl/k1")}
        assert len(signed) > 1 and halves.keys() == shares.keys()
        for key, value in halves.items():
            assert value == pytest.approx(shares[key], rel=1e-5, abs=8 * 2**-24 if key in signed else 1e-7), key
        assert halves["routing/coverage"] == 1 and halves["routing/applied_mismatch"] == 0
        # what the numbers above are of: random routes are not what the routers choose, and it shows
        assert halves["routing/native_mismatch"] > 0.9 and halves["optim/grad_norm"] > 0.1
        assert halves["policy_kl/k1"] != pytest.approx(halves["policy_kl/k1_native"], rel=0.1)


def test_the_sampler_gets_every_weight_once(seen, checkpoint):
    original, sent = load_file(checkpoint / "model.safetensors"), seen[0]["sent"][0]
    assert sent.keys() == original.keys() and all(torch.equal(sent[name], original[name]) for name in original)
    # rank 0 writes everything but the experts of rank 1, which holds the same dense weights
    assert seen[0]["sent"][1] == [2]
    # and scores the canary whole, whose tokens lie on both ranks
    assert seen[0]["canary"] == seen[1]["canary"] > 1


def test_a_resumed_run_goes_on_as_the_run_did(seen):
    for rank in seen:
        straight, resumed = rank["next"]
        assert straight == resumed and straight["optim/grad_norm"] != rank["halves"]["optim/grad_norm"]


def test_a_rank_that_takes_the_routes_of_another_ranks_rows_is_refused(seen):
    for rank in seen:
        assert "routes were recorded from other tokens (request s1" in rank["shifted"]


def test_a_microbatch_that_was_not_cut_is_refused(seen):
    for rank in seen:
        assert (
            "not split over the context-parallel ranks" in rank["uncut"] and "world.context_parallel()" in rank["uncut"]
        )
