"""Tests updates by CUDA IPC without a GPU: the buffer belongs to this process, and its handle leads back to it.

vLLM's producer and consumer, the parts and the digests are the real ones. Mapping the buffer on a GPU was never tried.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from moe_rl.errors import WeightSyncError
from moe_rl.weights import stream
from moe_rl.weights.update import CudaIpc, WeightUpdate
from tests.weights.sending import ALONE
from tests.weights.test_intake import equal

BUCKET = 400  # bytes


@pytest.fixture
def gpu(monkeypatch):
    """Replace CUDA's buffers. `opened` lists the buffers mapped, once for each time; `made` lists the exported ones."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import packed_tensor

    gpu = SimpleNamespace(made=[], opened=[])

    def export(buffer):
        gpu.made.append(buffer)
        handle = len(gpu.made).to_bytes(1, "little")
        tail = (0, handle, buffer.nbytes, 0, False, b"counter", 0, b"event", True)
        return None, (torch.Tensor, buffer.shape, (1,), 0, torch.storage.TypedStorage, torch.uint8, *tail)

    def opened(*arguments):
        gpu.opened.append(gpu.made[int.from_bytes(arguments[7], "little") - 1])
        return gpu.opened[-1]

    class Torch:
        cuda = SimpleNamespace(
            current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
            get_device_properties=lambda device: SimpleNamespace(uuid="GPU-1"),
        )
        empty = staticmethod(lambda *size, device, **about: torch.empty(*size, **about))

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(packed_tensor, "torch", Torch())
    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", opened)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Torch.cuda.get_device_properties)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return gpu


@pytest.fixture
def send(taker):
    """send(tensors, version) sends an update from rank 0 alone, and returns the receiver and the parts."""

    class Watched:
        def update_weights(self, update):
            self.parts.append(update)
            taker.update_weights(self.change(update))

    def send(tensors, version, change=lambda update: update):
        from moe_rl.weights.cuda_ipc import by_cuda_ipc

        sampler = Watched()
        sampler.parts, sampler.settled, sampler.change = [], [], change
        part = partial(WeightUpdate, version=version, replaces=version - 1, changed=True)
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        whole = stream.WeightStream([stream.Round(described, iter(tensors.items()))], ALONE)
        by_cuda_ipc(whole, sampler, part, BUCKET, lambda: sampler.settled.append(len(sampler.parts)))
        return sampler

    return send


def test_parts_come_through_one_buffer_that_is_opened_once_an_update(gpu, send, taker, weights, others):
    for version, tensors in ((1, others), (2, weights)):
        sampler = send(tensors, version)
        parts = sampler.parts
        assert sampler.settled == [len(parts) - 1], "what was exported is judged once, before the final part"
        assert [part.number for part in parts] == list(range(len(parts))) and len(parts) > 3
        assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
        # Each tensor was copied before the buffer was refilled, and none is still referenced.
        assert equal(taker.weights, tensors) and taker.intake.holding().version == version
        assert len(gpu.made) == len(gpu.opened) == version
        assert taker.reader._importer._entry is None, "the trainer could not free its buffer"


def test_a_buffer_that_was_filled_too_early_is_refused(gpu, send, taker, others):
    """The trainer refills the buffer before the sampler has copied it."""

    def spoil(update: WeightUpdate) -> WeightUpdate:
        assert isinstance(update.source, CudaIpc)
        if update.number == 2:
            gpu.made[0][:64] = 7
        return update

    with pytest.raises(WeightSyncError, match="got other weights than were sent"):
        send(others, 1, spoil)
    assert 0 < len(taker.weights) < len(others) and not taker.intake.holding().whole
    assert taker.reader._importer._entry is None


def test_an_engine_takes_the_buffer_on_its_own_gpu_and_refuses_without_one(gpu, send, taker, others):
    def beside(gpus: tuple[str, ...]):
        """Also name buffers on other GPUs, or only these."""

        def change(update: WeightUpdate) -> WeightUpdate:
            own = update.source.buffers[0]
            buffers = [
                replace(own, gpu_uuid=name, storage_handle=own.storage_handle * (name == "GPU-1")) for name in gpus
            ]
            return replace(update, source=CudaIpc(buffers))

        return change

    send(others, 1, beside(("GPU-0", "GPU-1", "GPU-2")))
    assert equal(taker.weights, others)
    with pytest.raises(
        WeightSyncError, match="no weights on the GPU of this engine.*got GPU-1.*GPU-0 or GPU-2.*rank n"
    ):
        send(others, 2, beside(("GPU-0", "GPU-2")))
    assert taker.intake.holding().version == 1
