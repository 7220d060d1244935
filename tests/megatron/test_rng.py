"""Random generators continue where they were: each stream by itself, whatever was drawn from the others meanwhile."""

import importlib.util

import pytest
import torch

from moe_rl.config.training import ParallelConfig
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_streams_of_another_kind_of_device_are_seeded_again(one_rank, tmp_path, monkeypatch):
    """The state of a GPU's generator has 16 bytes."""
    from moe_rl.megatron import checkpoint
    from moe_rl.megatron.saving import Checkpoints
    from tests.megatron.test_schedule import Run

    policy, own = Run().policy, rng.state()
    other = {name: values if name == "host" else torch.zeros(16, dtype=torch.uint8) for name, values in own.items()}
    assert len(own) > 2
    for step, written in ((1, own), (2, other)):
        with monkeypatch.context() as patched:
            patched.setattr(rng, "state", lambda written=written: written)
            Checkpoints(tmp_path, ParallelConfig(), keep=2, asynchronous=False).save(step, policy, {})
        rng.seed(3, step)
        again = own if step == 1 else rng.state()
        rng.seed(4, step)
        state = checkpoint.load(tmp_path / f"step-{step:06d}", policy, parallel=ParallelConfig(), seed=3)
        assert state["seeded"] == (written is other)
        assert all(torch.equal(again[name], values) for name, values in rng.state().items())
