"""Gradients that are summed over the ranks during the backward pass: the same, and with the same checks."""

import pytest
import torch

from tests.distributed.jobs.overlapped_sums import one

pytestmark = pytest.mark.timeout(600)
WHOLE, CUT = {"distributed_optimizer": False}, {}
CASES = {
    "DP2": ({}, WHOLE, 0),
    "EP2": ({"expert": 2}, CUT, 0),
    "EP2 in chunks, recomputed": ({"expert": 2}, {"recompute": "moe"}, 2),
    "EP2 combined 1F1B": ({"expert": 2}, {"overlap_expert_parallel_comm": True, "dtype": "bfloat16"}, 0),
    "TP2": ({"tensor": 2}, CUT, 0),
    "PP2-VPP2": ({"pipeline": 2, "virtual_pipeline": 2}, CUT, 0),
}
USUAL = ["DP2"]


@pytest.mark.parametrize("case", CASES)
def test_sums_during_the_backward_pass_are_the_same_and_hide_nothing(case, on_ranks, checkpoint):
    seen = on_ranks(2, one, checkpoint, *CASES[case])
    for rank, found in enumerate(seen):
        after, during = found["gradients"]["after"], found["gradients"]["during"]
        assert all(g.keys() == h.keys() for g, h in zip(after, during, strict=True))
        assert all(torch.equal(g[name], h[name]) for g, h in zip(after, during, strict=True) for name in g)
        assert all(begun == 0 for begun, _ in found["begun"]["after"])
        first, *later = found["begun"]["during"]
        least = 2 if "PP" in case else 4  # a later stage sums each buffer whole
        assert first[0] == 0 and all(begun == groups >= least for begun, groups in later), (rank, found["begun"])
        named = "gradient on rank 1, gradient norm nan" if case == "DP2" else "gradient on rank"
        assert found["spoiled"].startswith(named) and "1" in found["spoiled"]
        assert "were not all there when the ranks began to sum them" in found["late"]
        if "lost" in found:
            assert "a rank's part of a router's gradient is lost" in found["lost"] == seen[0]["lost"]
    assert case != "DP2" or "lost" in seen[0]
