"""Megatron in the test's own process: a process group of one rank."""

import os
import socket
from unittest import mock

import pytest
import torch

from moe_rl.config.schema import ParallelConfig


@pytest.fixture(scope="module")
def one_rank():
    from moe_rl.megatron import world

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = torch.get_num_threads()
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, environment):
        world.start(ParallelConfig(), seed=1, timeout_seconds=30)
    yield
    world.stop()
    torch.set_num_threads(threads)
