"""Tests the process groups of a rank."""

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.megatron.conftest import TIMEOUT_SECONDS


@pytest.mark.usefixtures("one_rank")
def test_every_group_waits_as_long_as_the_ranks_were_told_to():
    """Megatron's own groups would wait 30 minutes, and one of them however long the others wait."""
    groups = list(distributed_c10d._world.pg_map)
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    waits = {group.group_desc: seconds for group, seconds in zip(groups, timeouts, strict=True)}
    assert len(waits) > 10 and set(waits.values()) == {TIMEOUT_SECONDS}, waits
