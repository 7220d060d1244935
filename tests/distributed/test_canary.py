"""Under every layout the trainer's choice on the canary is the same, whole on rank 0, and a wrong record is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.conftest import torchrun

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("canary_worker.py")


@pytest.fixture(scope="module")
def seen(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("canary")
    process = torchrun(2, SCRIPT, checkpoint, out)
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.load(out / "seen.pt", weights_only=False)


def test_every_layout_routes_the_canary_alike(seen):
    first = seen["EP2"]
    for one in seen.values():
        # float32: a near tie may fall otherwise, and no more
        assert (np.sort(one["routes"], -1) != np.sort(first["routes"], -1)).any(-1).mean() < 0.005
        np.testing.assert_allclose(one["logprobs"], first["logprobs"], atol=2e-3)
        assert one["heard"]["sync/canary_mismatch"] == 0 and one["heard"]["sync/canary_recorded"] == 1
        assert one["heard"]["sync/canary_power"] == 1 and one["heard"]["sync/canary_abs_diff"] > 1
    assert len(seen) == 5 and first["routes"].shape == (4, 49 + 63 + 32 + 1 + 63, 4)


def test_a_record_with_two_layers_exchanged_is_named_and_kept(seen):
    for one in seen.values():
        for said in (
            "after the sync of version 3, the sampler",
            "layer 1 has the rows of layer 2",
            "canary-version000003",
        ):
            assert said in one["said"]
        assert (one["shards"], one["kept"]) == ([], ["canary-version000003"])
