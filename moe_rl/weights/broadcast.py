"""An update by broadcast: vLLM's packed buckets, from one trainer rank to the workers of all samplers.

    trainer (rank 0)                        each worker
    Sender: a store at address:port  <----  Receiver: ready for the n-th update
    packed_nccl_broadcast_producer   ---->  packed_nccl_broadcast_consumer: unpacked, digested, loaded, bucket by bucket

Both ends cut the stream into the same buckets, from names, shapes and the bucket size alone. On GPUs the group is
vLLM's NCCL communicator; on hosts it is gloo, under the same packing. vLLM's code takes seconds to import, so that it
is imported when an update first goes this way.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.digest import as_announced
from moe_rl.weights.update import Broadcast, TensorInfo

_TIMEOUT = timedelta(minutes=10)
# The trainer listens before it says where: who is not reached by then is gone.
_REACHED = timedelta(minutes=1)
_POLL_SECONDS = 0.01
# vLLM gives each buffer a CUDA stream. With more than one, memory that was allocated on one stream is still read on the
# other when its last tensor is let go: a round of another rank here, what vLLM keeps of a layer there. The allocator
# does not know, gives it to the next bucket, and what is loaded are other bytes than were digested.
_BUFFERS = 1


class Communicator(Protocol):
    """What vLLM's packed code asks of a communicator."""

    def broadcast(self, tensor: Tensor, src: int) -> None: ...

    def destroy(self) -> None: ...


class Sender:
    """The trainer's end. It listens on `address` alone, of this host, for `workers` workers of samplers."""

    def __init__(self, address: str, workers: int, bucket_bytes: int, device: torch.device):
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.workers, self._port, self._device = workers, listener.getsockname()[1], device
        self._address, self._bucket_bytes = address, bucket_bytes
        self._store = dist.TCPStore(
            address,
            self._port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: Communicator | None = None
        self._sent = 0
        _lend_streams(device)

    def source(self, first_rank: int = 1) -> Broadcast:
        """Where the workers of a sampler, whose ranks begin at first_rank, get the next update."""
        return Broadcast(self._address, self._port, self.workers + 1, first_rank, self._bucket_bytes)

    def send(
        self, infos: Sequence[TensorInfo], tensors: Iterator[tuple[str, Tensor]], stopped: threading.Event
    ) -> bool:
        """Broadcast tensors, which must be these, once every worker is ready. False when `stopped` was set before.

        Raises WeightSyncError before it sends anything else: workers cut the stream by what they were announced.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        keys = [_ready(self._sent, rank) for rank in range(1, self.workers + 1)]
        while not self._store.check(keys):
            if stopped.wait(_POLL_SECONDS):
                return False
        self._sent += 1
        if self._group is None:
            self._group = _connect(self._store, self._address, 0, self.workers + 1, self._device)
        checked = as_announced(infos, tensors)
        packed_nccl_broadcast_producer(checked, self._group, 0, lambda item: item[1], self._bucket_bytes, _BUFFERS)
        return True

    def close(self) -> None:
        """Whoever still waits for bytes gets an error."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


class Receiver:
    """A worker's end. rank: in the group."""

    def __init__(self, source: Broadcast, rank: int, device: torch.device):
        self.source, self._rank, self._device = source, rank, device
        try:
            self._store = dist.TCPStore(source.address, source.port, timeout=_REACHED, wait_for_workers=False)
            self._store.set_timeout(_TIMEOUT)
        except RuntimeError as error:
            where = f"{source.address}:{source.port}"
            raise WeightSyncError(describe("The trainer cannot be reached", where=where, got=error)) from error
        self._group: Communicator | None = None
        self._received = 0
        _lend_streams(device)

    def receive(self, infos: Sequence[TensorInfo], take: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        """Get the tensors in this order; `take` is given each bucket of them. Raises WeightSyncError when the bytes
        stop coming."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        expected = ((info.name, (list(info.shape), getattr(torch, info.dtype))) for info in infos)
        try:
            self._store.set(_ready(self._received, self._rank), b"1")
            self._received += 1
            if self._group is None:
                own, size = own_address(self.source.address, self.source.port), self.source.world_size
                self._group = _connect(self._store, own, self._rank, size, self._device)
            packed_nccl_broadcast_consumer(
                expected, self._group, 0, take, self.source.bucket_bytes, _BUFFERS, self._device
            )
        except (RuntimeError, OSError) as error:
            got = str(error).splitlines()[0]
            do = "see what ended the trainer, or the network between"
            raise WeightSyncError(describe("The broadcast of weights broke off", got=got, do=do)) from error

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
        self._group = None


def _ready(number: int, rank: int) -> str:
    return f"moe_rl/update {number}/rank {rank}"


def _connect(store: dist.Store, address: str, rank: int, size: int, device: torch.device) -> Communicator:
    if device.type == "cpu":
        return GlooGroup(store, address, rank, size)
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if rank == 0:
        store.set("moe_rl/nccl", bytes(NCCLLibrary().ncclGetUniqueId().internal))
    return uid_init_process_group(store.get("moe_rl/nccl"), rank, size, device)


class GlooGroup:
    """Broadcasts over gloo, apart from the process group that torch.distributed was started with."""

    def __init__(self, store: dist.Store, address: str, rank: int, size: int):
        """address: of this host, which the others reach it by."""
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _TIMEOUT
        # gloo asks the host's name for its address otherwise, which need not lead back here.
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(dist.PrefixStore("moe_rl/gloo", store), rank, size, options)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group = None


class _NoStream:
    """A host does one thing after the other."""

    def synchronize(self) -> None:
        pass


def _lend_streams(device: torch.device) -> None:
    """vLLM's packed code asks for CUDA streams: a process without a GPU gets some that do nothing, for good."""
    if device.type == "cpu":
        from vllm.distributed.weight_transfer import packed_tensor

        packed_tensor._get_streams = lambda _, count: (_NoStream(),) * count
        torch.accelerator.current_device_index = lambda: 0


def own_address(host: str, port: int) -> str:
    """The address of this host on the way to another one. Nothing is sent. Raises OSError when there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reached_by_all(others: Iterable[tuple[str, int]]) -> str:
    """The address of this host on the way to several (host, port), of which some may be this host itself: a loopback
    address only when all are. Raises OSError as `own_address`."""
    found = [own_address(*other) for other in others]
    outer = (address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback)
    return next(outer, found[0])
