"""Tests which shares send to which copy of the experts. Other tests compare the peaks with real runs."""

import pytest

from moe_rl.config.training import ParallelConfig
from moe_rl.planning.peaks import dispatching_groups


@pytest.mark.parametrize(
    ("parallel", "shares", "groups"),
    [
        ({"expert": 2}, 4, [{0, 1}, {2, 3}]),
        ({"expert": 2, "expert_tensor": 2}, 4, [{0, 1, 2, 3}]),
        ({"tensor": 2, "expert": 2}, 2, [{0}, {1}]),
        ({"tensor": 2, "expert": 4}, 2, [{0, 1}]),
        ({"tensor": 2}, 2, [{0}, {0}, {1}, {1}]),
        ({"tensor": 4, "expert": 6}, 3, [{0, 1}, {1, 2}]),
    ],
)
def test_shares_that_dispatch_to_the_same_experts(parallel, shares, groups):
    """Expected by hand: the ranks of a share are neighbours, and so are those of a copy of the experts."""
    found = dispatching_groups(ParallelConfig(**parallel), shares)
    assert [set(range(shares)[one]) for one in found] == groups
