"""Sends an update through a GPU buffer that trainer rank 0 and the sampler share, in vLLM's packed IPC chunks.

The tests use a buffer of one process where two processes would map one. One H200 has run it: docs/measurements/gpu.md.

The buffer's handle travels as typed fields; vLLM would pickle it over HTTP. vLLM copies the buffer before it answers
the call, so the trainer may then fill the buffer again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.packed_tensor import (
    PackedBufferImporter,
    packed_ipc_consumer,
    packed_ipc_producer,
)

from moe_rl.weights.update import CudaBuffer, CudaIpc, TensorInfo


def packed(
    tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int, gpu_uuid: str
) -> Iterator[tuple[list[str], CudaIpc]]:
    """Yield the names of the tensors now in the buffer, and the buffer. `bucket_bytes` must fit the largest tensor."""
    for chunk in packed_ipc_producer(tensors, gpu_uuid, lambda item: item[1], bucket_bytes):
        yield chunk.names, CudaIpc(buffer_of(gpu_uuid, chunk.ipc_handle[gpu_uuid]))


def unpacked(
    source: CudaIpc, infos: Sequence[TensorInfo], device: torch.device, importer: PackedBufferImporter
) -> list[tuple[str, Tensor]]:
    """Return copies of the tensors in the buffer. `importer` is vLLM's, one for all chunks of an update."""
    return packed_ipc_consumer(
        {source.buffer.gpu_uuid: arguments_of(source.buffer)},
        [info.name for info in infos],
        [list(info.shape) for info in infos],
        [info.dtype for info in infos],
        [info.size for info in infos],
        device.index,
        importer,
    )


def buffer_of(gpu_uuid: str, arguments: tuple) -> CudaBuffer:
    """Describe a buffer by the arguments of torch's `rebuild_cuda_tensor` that differ between buffers."""
    _, size, _, _, _, _, device, handle, storage_bytes, offset, _, counter, counter_offset, event, sync = arguments
    return CudaBuffer(gpu_uuid, size[0], device, handle, storage_bytes, offset, counter, counter_offset, event, sync)


def arguments_of(buffer: CudaBuffer) -> tuple:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a buffer; the inverse of `buffer_of`."""
    return (
        torch.Tensor,
        torch.Size([buffer.size]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        buffer.device,
        buffer.storage_handle,
        buffer.storage_bytes,
        buffer.storage_offset,
        False,
        buffer.counter_handle,
        buffer.counter_offset,
        buffer.event_handle,
        buffer.event_sync,
    )
