"""Under every layout the trainer's choice on the canary is the same, whole on rank 0, and a wrong record is named."""

import functools

import numpy as np
import pytest

from tests.distributed.jobs import canary

USUAL = ["PP2 VPP2"]


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint, tmp_path_factory):
    """seen(layout) -> what rank 0 saw."""
    return functools.cache(
        lambda layout: on_ranks(2, canary.run, layout, checkpoint, tmp_path_factory.mktemp("canary"))[0]
    )


@pytest.mark.parametrize("case", canary.LAYOUTS)
def test_every_layout_routes_the_canary_alike(seen, case):
    first, one = seen("EP2"), seen(case)
    assert first["routes"].shape == (4, 49 + 63 + 32 + 1 + 63, 4)
    # float32: a near tie may fall otherwise, and no more
    assert (np.sort(one["routes"], -1) != np.sort(first["routes"], -1)).any(-1).mean() < 0.005
    np.testing.assert_allclose(one["logprobs"], first["logprobs"], atol=2e-3)
    np.testing.assert_allclose(one["scores"], first["scores"], atol=1e-2)
    best = np.sort(np.argsort(-one["scores"], -1)[..., :4], -1)
    np.testing.assert_array_equal(best, np.sort(one["routes"], -1))
    assert one["heard"]["sync/canary_mismatch"] == 0 and one["heard"]["sync/canary_recorded"] == 1
    assert one["heard"]["sync/canary_power"] == 1 and one["heard"]["sync/canary_abs_diff"] > 1


@pytest.mark.parametrize("case", canary.LAYOUTS)
def test_a_record_with_two_layers_exchanged_is_named_and_kept(seen, case):
    one = seen(case)
    for said in ("version 3, the sampler", "layer 1 has the rows of layer 2", "canary-version000003"):
        assert said in one["said"]
    assert (one["shards"], one["kept"]) == ([], ["canary-version000003"])
