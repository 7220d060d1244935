"""Provides a process group of one rank, for tests that need Megatron's groups but no second rank."""

import pytest

TIMEOUT_SECONDS = 77.0


@pytest.fixture(scope="session")
def one_rank():
    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import world

    world.start(ParallelConfig(), seed=1, timeout_seconds=TIMEOUT_SECONDS)
    yield
    world.stop()
