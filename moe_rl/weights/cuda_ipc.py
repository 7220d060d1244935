"""Sends an update through GPU buffers that trainer ranks share with engines, in vLLM's packed IPC chunks.

Here rank 0 packs the stream of all ranks for one engine; for several see `handles`. The tests use a buffer of one
process where two processes would map one. One H200 has run it: docs/measurements/gpu.md.

A buffer's handle travels as typed fields; vLLM would pickle it over HTTP. vLLM copies the buffer before it answers the
call, so the trainer may then fill the buffer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.packed_tensor import (
    PackedBufferImporter,
    packed_ipc_consumer,
    packed_ipc_producer,
)

from moe_rl.errors import WeightSyncError
from moe_rl.weights.handles import arguments_of, buffer_of
from moe_rl.weights.stream import Recipient, WeightStream
from moe_rl.weights.update import CudaIpc, TensorInfo, WeightUpdate


def by_cuda_ipc(
    stream: WeightStream,
    sampler: Recipient,
    part: Callable[..., WeightUpdate],
    bucket_bytes: int,
    settle: Callable[[], None],
) -> int:
    """Send the stream through a buffer on the GPU that rank 0 and the sampler share, one part per filling of the
    buffer.

    Arguments and errors are those of `stream.broadcast`. The sampler has copied the buffer when it answers a call.
    """
    gpu = str(torch.cuda.get_device_properties(stream.device).uuid)
    largest, sent = max(info.size for info in stream.infos), 0
    for number, (names, source) in enumerate(packed(iter(stream), max(bucket_bytes, largest), gpu)):
        infos = stream.digested(stream.infos[sent : sent + len(names)])
        sent += len(names)
        final = sent == len(stream.infos)
        if final:
            settle()
        sampler.update_weights(part(number=number, final=final, tensors=infos, source=source))
    torch.cuda.ipc_collect()
    return sum(info.size for info in stream.infos)


def packed(
    tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int, gpu_uuid: str
) -> Iterator[tuple[list[str], CudaIpc]]:
    """Yield the names of the tensors now in the buffer, and the buffer. `bucket_bytes` must fit the largest tensor."""
    for chunk in packed_ipc_producer(tensors, gpu_uuid, lambda item: item[1], bucket_bytes):
        yield chunk.names, CudaIpc([buffer_of(gpu_uuid, chunk.ipc_handle[gpu_uuid])])


def unpacked(
    source: CudaIpc, infos: Sequence[TensorInfo], device: torch.device, importer: PackedBufferImporter
) -> list[tuple[str, Tensor]]:
    """Return copies of the tensors in the buffer on this GPU. `importer` is vLLM's, one for all chunks of an update.

    Raises:
        WeightSyncError: no buffer is on this GPU.
    """
    arguments = {buffer.gpu_uuid: arguments_of(buffer) for buffer in source.buffers}
    if (own := str(torch.cuda.get_device_properties(device).uuid)) not in arguments:
        raise WeightSyncError(
            "The trainer has no weights on the GPU of this engine",
            got=own,
            expected=" or ".join(arguments),
            do="give engine n and rank n the same GPU, or set rollout.weight_transfer to shared_memory",
        )
    return packed_ipc_consumer(
        arguments,
        [info.name for info in infos],
        [list(info.shape) for info in infos],
        [info.dtype for info in infos],
        [info.size for info in infos],
        device.index,
        importer,
    )
