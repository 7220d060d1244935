"""Sends an update to several engines beside ranks of one node, through a buffer on the GPU of each.

The engines open the buffers as vLLM's IPC backend does: each takes the one on its own GPU. The tests use host memory in
place of the GPUs'; this never ran on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from moe_rl.weights.broadcast import packed
from moe_rl.weights.digest import TensorDigests, dtype_name
from moe_rl.weights.stream import Ranks
from moe_rl.weights.update import Bucket, CudaBuffer, CudaIpc, TensorInfo


class HandleWay:
    """Sends tensors through one buffer on the GPU of each of the first ranks, which have an engine there.

    In each round every rank packs its bucket, and the ranks with an engine get the buckets of all. A rank holds its
    bucket, and one with an engine those of all ranks too. The ranks send in turn, so no two wait for each other.

    Args:
        ranks: the trainer's ranks, all on one host.
        engines: how many of them have an engine.
    """

    one_call, on_host = False, False

    def __init__(self, ranks: Ranks, engines: int):
        self._ranks, self._engines = ranks, engines
        self._own = self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle: list[CudaBuffer] = []  # of this rank's buffer
        self._handles: list[CudaBuffer] = []  # of all ranks' buffers

    def begin(self) -> None:
        """Do nothing: the first round makes the buffers."""

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Pack this rank's tensors."""
        digests, items = TensorDigests(), list(tensors)
        for name, tensor in items:
            digests.add(name, tensor)
        known = digests.read()
        infos = [TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), known[name]) for name, tensor in items]
        self._own = packed(infos, (tensor for _, tensor in items), self._ranks.device())
        return Bucket(infos, None)

    def spread(self, buckets: Sequence[Bucket]) -> None:
        """Give the buckets of all ranks to the ranks with an engine. All ranks call this together."""
        rank = dist.get_rank()
        sizes = [sum(info.size for info in bucket.tensors) for bucket in buckets]
        needed = max(1, sum(sizes))  # an engine gets a buffer also where no rank has a tensor
        if rank < self._engines and len(self._buffer) < needed:
            self._share(torch.empty(needed, dtype=torch.uint8, device=self._ranks.device()))
        end = 0
        for source, size in enumerate(sizes):
            start, end = end, end + size
            if size and rank == source:
                for other in range(self._engines):
                    if other != rank:
                        dist.send(self._own, other)
                if rank < self._engines:
                    self._buffer[start:end].copy_(self._own)
            elif size and rank < self._engines:
                dist.recv(self._buffer[start:end], source)
        if self._buffer.is_cuda:
            torch.cuda.synchronize(self._buffer.device)
        self._handles = [handle for handles in self._ranks.gather(self._handle, list[CudaBuffer]) for handle in handles]

    def source(self, buckets: Sequence[Bucket]) -> CudaIpc:
        """Tell the engines where their buffers are."""
        return CudaIpc(self._handles)

    def end(self) -> None:
        """Free the buffers. The engines have released them by now."""
        self._own = self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle, self._handles = [], []
        if self._ranks.device().type == "cuda":
            torch.cuda.ipc_collect()

    def _share(self, buffer: Tensor) -> None:
        gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
        self._buffer, self._handle = buffer, [buffer_of(gpu, reduce_tensor(buffer)[1])]


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
