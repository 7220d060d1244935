"""Provides a process group of one rank, for tests that need Megatron's groups but no second rank."""

from unittest import mock

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def one_rank():
    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch("torch.distributed.init_process_group"):
        world.start(ParallelConfig(), seed=1, timeout_seconds=60)
    yield
    world.stop()
