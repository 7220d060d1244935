"""Replay under Megatron's flex dispatcher (DeepEP, HybridEP) and fused permutation, whose kernels are stubs here."""

import functools

import pytest
import torch

from tests.distributed.jobs import flex


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint):
    """seen(kind, plant) -> what the two ranks saw."""
    return functools.cache(lambda kind, plant="": on_ranks(2, flex.run, checkpoint, kind, plant))


@pytest.mark.parametrize("kind", ["deepep", "hybridep", "permute fusion"])
def test_every_dispatcher_computes_the_same_and_is_compared_with_the_record(seen, kind):
    for ours, plain in zip(seen(kind), seen("alltoall"), strict=True):
        is_flex = kind != "permute fusion"
        assert ours["dispatcher"] == ("MoEFlexTokenDispatcher" if is_flex else "MoEAlltoAllTokenDispatcher")
        tally = ours["tally"]
        assert tally == plain["tally"] and tally.applied_checked > 0 == tally.applied_mismatch
        assert tally.consumed == tally.expected > 0 == tally.planned
        for key, one in plain["logprobs"].items():
            torch.testing.assert_close(ours["logprobs"][key], one, rtol=0, atol=1e-5)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
        for name, one in plain["grads"].items():
            assert (ours["grads"][name] - one).abs().max() <= 1e-5 * max(1.0, one.abs().max()), name


def test_an_expert_that_deepep_exchanged_for_one_of_weight_0_is_named(seen):
    for one in seen("deepep", "faded"):
        assert one["fault"] == "underflow" and "underflowed to 0" in one["text"] and "layer" in one["text"], one
    for kind in ("alltoall", "hybridep"):  # they take the routing map
        for one in seen(kind, "faded"):
            assert one["tally"].applied_mismatch == 0 < one["tally"].applied_checked


@pytest.mark.parametrize("kind", ["deepep", "permute fusion"])
def test_a_plan_is_refused_where_the_dispatcher_follows_none(seen, kind):
    setting = "moe_permute_fusion" if kind == "permute fusion" else "moe_token_dispatcher_type"
    assert {one["about"].get("setting") for one in seen(kind, "plan")} == {setting}
