"""Random generators continue where they were: each stream by itself, whatever was drawn from the others meanwhile."""

import importlib.util

import pytest
import torch

from moe_rl.megatron import rng  # must come before megatron.core, because it chooses the device backend
from moe_rl.megatron.rng import tensor_parallel

STREAMS = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")


def draw(streams=STREAMS):
    """Draw four numbers from the device's own generator, then from each stream, in this order."""
    drawn = {"device": torch.rand(4, device="cuda")}
    for name in streams:
        with tensor_parallel.get_cuda_rng_tracker().fork(name):
            drawn[name] = torch.rand(4, device="cuda")
    return {name: tuple(values.tolist()) for name, values in drawn.items()}


def interrupted():
    """Draw without an interruption, and with one, after which the streams are used in another order."""
    tensor_parallel.model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=2, etp_rank=0)
    torch.rand(1, device="cuda")  # has the same seed as the data-parallel stream, which this test does not draw from
    draw()
    saved = rng.state()
    straight = draw()
    tensor_parallel.model_parallel_cuda_manual_seed(8, tp_rank=1, ep_rank=2, etp_rank=0)
    assert draw() != straight
    rng.set_state(saved)
    return straight, draw(STREAMS[::-1])


def test_every_stream_goes_on():
    straight, resumed = interrupted()
    assert straight == resumed
    assert len(set(straight.values())) == 4, "streams that repeat each other"


def test_upstream_restores_no_stream_without_cuda(monkeypatch):
    """The control: megatron-core as released delays restoring a stream until CUDA starts, which never happens."""
    if torch.cuda.is_available():
        pytest.skip("the machine has CUDA")
    name = f"{tensor_parallel.__name__}.released_random"
    spec = importlib.util.spec_from_file_location(name, tensor_parallel.random.__file__)
    released = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(released)
    monkeypatch.setattr(tensor_parallel.random, "_set_cuda_rng_state", released._set_cuda_rng_state)
    straight, resumed = interrupted()
    assert all(straight[name] != resumed[name] for name in STREAMS if name != STREAMS[1])
