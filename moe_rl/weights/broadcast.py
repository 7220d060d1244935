"""Broadcasts an update in vLLM's packed buckets, from one trainer rank to the workers of all samplers.

    trainer (rank 0)                        each worker
    Sender: a store at address:port  <----  Receiver: ready for the n-th update
    packed_nccl_broadcast_producer   ---->  packed_nccl_broadcast_consumer: unpacked, digested, loaded, bucket by bucket

Both ends cut the stream into the same buckets from names, shapes and the bucket size alone. On GPUs the group is vLLM's
NCCL communicator; on CPUs it is gloo with the same packing. vLLM's code takes seconds to import, so it is imported only
when a broadcast is first used.
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

from moe_rl.errors import About, WeightSyncError, describe
from moe_rl.weights.digest import as_announced
from moe_rl.weights.update import Broadcast, TensorInfo

_TIMEOUT = timedelta(minutes=10)
# The trainer listens before it announces its address: a worker that cannot connect in this time never will.
_REACHED = timedelta(minutes=1)
_POLL_SECONDS = 0.01
# vLLM gives each buffer a CUDA stream of its own. With several buffers, memory allocated on one stream may still be
# read
# on another when its last tensor is freed: a round of another rank here, tensors that vLLM keeps for a layer there. The
# allocator does not see that read and reuses the memory for the next bucket, so the loaded bytes would differ from the
# digested ones.
_BUFFERS = 1


class Communicator(Protocol):
    """Implements the part of a communicator that vLLM's packed code uses."""

    def broadcast(self, tensor: Tensor, src: int) -> None: ...

    def destroy(self) -> None: ...


class Sender:
    """Broadcasts from the trainer. It listens only on `address` of this host, for `workers` workers of samplers."""

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
        """Return how the workers of a sampler reach the next update; their ranks start at `first_rank`."""
        return Broadcast(self._address, self._port, self.workers + 1, first_rank, self._bucket_bytes)

    def send(
        self, infos: Sequence[TensorInfo], tensors: Iterator[tuple[str, Tensor]], stopped: threading.Event
    ) -> bool:
        """Broadcast tensors, which must match `infos`, once every worker is ready.

        Returns:
            False if `stopped` was set before all workers were ready.

        Raises:
            WeightSyncError: a tensor differs from its announcement, by which the workers cut the stream. It is not
                sent.
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
        """Close the group. A worker that still waits for bytes gets an error."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


class Receiver:
    """Receives broadcasts in a worker. `rank` is the worker's rank in the group."""

    def __init__(self, source: Broadcast, rank: int, device: torch.device):
        self.source, self._rank, self._device = source, rank, device
        try:
            self._store = dist.TCPStore(source.address, source.port, timeout=_REACHED, wait_for_workers=False)
            self._store.set_timeout(_TIMEOUT)
        except RuntimeError as error:
            where: About = {"host": f"{source.address}:{source.port}"}
            raise WeightSyncError(describe("The trainer cannot be reached", where=where, got=error)) from error
        self._group: Communicator | None = None
        self._received = 0
        _lend_streams(device)

    def receive(self, infos: Sequence[TensorInfo], take: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        """Receive the tensors in this order and pass each bucket to `take`.

        Raises:
            WeightSyncError: the bytes stop coming.
        """
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
            do = "check whether the trainer ended, and the network between the hosts"
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
    """Broadcasts over gloo, in a group separate from torch.distributed's default group."""

    def __init__(self, store: dist.Store, address: str, rank: int, size: int):
        """Join the group. `address` is the one by which the other members reach this host."""
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _TIMEOUT
        # By default gloo resolves the host's name, which may give an address that the others cannot reach.
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(dist.PrefixStore("moe_rl/gloo", store), rank, size, options)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group = None


class _NoStream:
    """Stands in for a CUDA stream on the CPU, where work is never asynchronous."""

    def synchronize(self) -> None:
        pass


def _lend_streams(device: torch.device) -> None:
    """Give a process without a GPU no-op CUDA streams, which vLLM's packed code asks for. Lasts for the whole
    process."""
    if device.type == "cpu":
        from vllm.distributed.weight_transfer import packed_tensor

        packed_tensor._get_streams = lambda _, count: (_NoStream(),) * count
        torch.accelerator.current_device_index = lambda: 0


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host. Sends nothing. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reached_by_all(others: Iterable[tuple[str, int]]) -> str:
    """Return an address of this host that all of several (host, port) can reach.

    Some of them may be this host itself. The address is a loopback address only if all are. Raises OSError as
    `own_address` does.
    """
    found = [own_address(*other) for other in others]
    outer = (address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback)
    return next(outer, found[0])
