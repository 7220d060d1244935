"""Broadcasts an update from some ranks of the trainer to the workers of all samplers.

    a rank of the trainer                   each worker
    Sender: a store at address:port  <----  Receiver: ready for the n-th update, at every sender
    packs a bucket, broadcasts it    ---->  digests and loads it, while the next sender's bucket arrives

Each sender has a group with all workers. Who sends which tensors is part of the announcement, and all workers take the
buckets in this one order, so the groups never wait for each other in a circle. On GPUs a group is vLLM's NCCL
communicator; on CPUs it is gloo.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moe_rl.errors import About, WeightSyncError, describe
from moe_rl.weights.digest import as_announced
from moe_rl.weights.update import Broadcast, SenderAt, TensorInfo, own_address

_TIMEOUT = timedelta(minutes=10)
# A sender listens before it announces its address: a worker that cannot connect in this time never will.
_REACHED = timedelta(minutes=1)
_POLL_SECONDS = 0.01
_RANK = "moe_rl/rank"


class Sender:
    """Broadcasts from a rank of the trainer.

    It listens only on `address` of this host, for `workers` workers of samplers. Two buckets exist at a time: one is
    packed while the one before is sent.
    """

    def __init__(self, rank: int, address: str, workers: int, device: torch.device):
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.workers, self.at = workers, SenderAt(rank, address, listener.getsockname()[1])
        self._device = device
        self._store = dist.TCPStore(
            address,
            self.at.port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store.set(_RANK, str(rank))
        self._group: Communicator | None = None
        self._under_way = _UnderWay()
        self._sent, self._closed = 0, False

    def send(
        self, buckets: Sequence[Sequence[TensorInfo]], tensors: Iterator[tuple[str, Tensor]], stopped: threading.Event
    ) -> bool:
        """Broadcast tensors, which must match `buckets`, once every worker is ready.

        Returns:
            False if `stopped` was set before all workers were ready.

        Raises:
            WeightSyncError: a tensor differs from its announcement, by which the workers cut the bytes: its bucket is
                then not sent. Or the sender has left its group.
            ConnectionError: a worker is gone.
        """
        if self._closed:
            raise WeightSyncError(
                "A sender of weights has left its workers, after an earlier broadcast broke off",
                where=_where(self.at),
                do="resume the run from its last checkpoint",
                fault="closed",
            )
        self._store.set(_plan(self._sent), _plan_digest(buckets))
        keys = [_ready(self._sent, rank) for rank in range(1, self.workers + 1)]
        while not self._store.check(keys):
            if stopped.wait(_POLL_SECONDS):
                return False
        self._sent += 1
        if self._group is None:
            self._group = _lost(_joined, self._store, self.at.address, 0, self.workers + 1, self._device)
        checked = as_announced([info for infos in buckets for info in infos], tensors)
        for infos in buckets:
            octets = packed(infos, (tensor for _, tensor in islice(checked, len(infos))), self._device)
            _lost(self._under_way.end)
            _lost(self._under_way.begin, self._group, octets)
        # Ranks that share tensors end their last round together, and workers may wait for another sender first.
        for _ in checked:
            pass
        _lost(self._under_way.end)
        return True

    def close(self) -> None:
        """Leave the group, for good. A worker that still waits for bytes gets an error."""
        if self._group is not None:
            self._group.destroy()
        self._group, self._under_way, self._closed = None, _UnderWay(), True


class Receiver:
    """Receives broadcasts in a worker. `rank` is the worker's rank in the groups of all senders."""

    def __init__(self, source: Broadcast, rank: int, device: torch.device):
        self._way, self._rank, self._device = _way(source), rank, device
        self._senders = source.senders
        self._stores = [_store_of(sender) for sender in source.senders]
        self._groups: list[Communicator] = []
        self._under_way = _UnderWay()
        self._received = 0

    def reaches(self, source: Broadcast) -> bool:
        """Return whether an update from `source` can come over these connections."""
        return self._way == _way(source)

    def receive(
        self, source: Broadcast, infos: Sequence[TensorInfo], take: Callable[[list[tuple[str, Tensor]]], None]
    ) -> None:
        """Receive the tensors in this order and pass each bucket to `take`, while the next one arrives.

        Raises:
            WeightSyncError: the bytes of a sender stop coming, or the buckets differ from `infos` or from a sender's
                plan. In the last two cases nothing is sent.
        """
        buckets, number = list(_buckets(source, infos)), self._received
        links = list(zip(self._senders, self._stores, strict=True))
        for index, (sender, store) in enumerate(links):
            if _told(sender, store.get, _plan(number)) != _plan_digest([run for by, run in buckets if by == index]):
                raise WeightSyncError(
                    "A rank sends other tensors than were announced", where=_where(sender), fault="buckets"
                )
        for sender, store in links:
            _told(sender, store.set, _ready(number, self._rank), b"1")
        self._received += 1
        for sender, store in links[len(self._groups) :]:
            self._groups.append(_told(sender, self._join, sender, store))
        if buckets:
            self._begin(*buckets[0])
        for (index, run), following in zip(buckets, [*buckets[1:], None], strict=True):
            octets = _told(self._senders[index], self._under_way.end)
            if following is not None:
                self._begin(*following)
            take(list(unpacked(octets, run)))
            del octets  # else three buckets would be held

    def _join(self, sender: SenderAt, store: dist.Store) -> Communicator:
        address = own_address(sender.address, sender.port)
        return _joined(store, address, self._rank, self._way[1], self._device)

    def _begin(self, index: int, run: Sequence[TensorInfo]) -> None:
        octets = torch.empty(sum(info.size for info in run), dtype=torch.uint8, device=self._device)
        _told(self._senders[index], self._under_way.begin, self._groups[index], octets)

    def close(self) -> None:
        for group in self._groups:
            group.destroy()
        self._groups, self._under_way = [], _UnderWay()


class _UnderWay:
    """Holds the bytes of a broadcast until it is done: they must not be freed before."""

    def __init__(self) -> None:
        self._now: tuple[Tensor, Callable[[], object]] | None = None

    def begin(self, group: Communicator, octets: Tensor) -> None:
        self._now = octets, group.start(octets)

    def end(self) -> Tensor:
        """Wait for the broadcast that began last, if it has not ended, and return its bytes."""
        if self._now is None:
            return torch.empty(0, dtype=torch.uint8)
        octets, wait = self._now
        wait()
        self._now = None
        return octets


def _way(source: Broadcast) -> tuple[list[SenderAt], int, int]:
    return source.senders, source.world_size, source.first_rank


def _buckets(source: Broadcast, infos: Sequence[TensorInfo]) -> Iterator[tuple[int, Sequence[TensorInfo]]]:
    """Yield, for each bucket, its sender's index and its tensors."""
    named, tensors = {index for index, _ in source.buckets}, sum(count for _, count in source.buckets)
    if tensors != len(infos) or not named <= set(range(len(source.senders))):
        raise WeightSyncError(
            "The buckets of a broadcast are not those of its tensors",
            got=f"{tensors} tensors of senders {sorted(named)}",
            expected=f"{len(infos)} tensors of {len(source.senders)} senders",
            fault="buckets",
        )
    rest = iter(infos)
    for index, count in source.buckets:
        yield index, list(islice(rest, count))


def _plan(number: int) -> str:
    return f"moe_rl/update {number}/buckets"


def _plan_digest(buckets: Sequence[Sequence[TensorInfo]]) -> bytes:
    """Return a digest of what each bucket holds. Gloo ends the process if the two ends expect different sizes."""
    plan = [[(info.name, info.dtype, info.shape) for info in run] for run in buckets]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(plan)).encode()


def _ready(number: int, rank: int) -> str:
    return f"moe_rl/update {number}/rank {rank}"


def _store_of(sender: SenderAt) -> dist.Store:
    try:
        store = dist.TCPStore(sender.address, sender.port, timeout=_REACHED, wait_for_workers=False)
        rank = store.get(_RANK).decode()
    except RuntimeError as error:
        do = "let the samplers' hosts reach this rank's host, or send from rank 0 only: rollout.weight_senders=1"
        message = describe("The trainer cannot be reached", where=_where(sender), got=error, do=do)
        raise WeightSyncError(message) from error
    if rank != str(sender.rank):
        raise WeightSyncError(
            "Another rank of the trainer sends from this address", where=_where(sender), got=rank, expected=sender.rank
        )
    store.set_timeout(_TIMEOUT)
    return store


def _where(sender: SenderAt) -> About:
    return {"rank": sender.rank, "host": f"{sender.address}:{sender.port}"}


def _lost[T](act: Callable[..., T], *arguments: object) -> T:
    """Return `act(*arguments)`. Raises ConnectionError for an error of the group."""
    try:
        return act(*arguments)
    except (RuntimeError, OSError) as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def _told[T](sender: SenderAt, act: Callable[..., T], *arguments: object) -> T:
    """Return `act(*arguments)`. A connection error names the sender."""
    try:
        return act(*arguments)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            "The broadcast of weights broke off",
            where=_where(sender),
            got=str(error).splitlines()[0],
            do="check whether this rank of the trainer ended, and the network between the hosts",
        ) from error


def _joined(store: dist.Store, address: str, rank: int, size: int, device: torch.device) -> Communicator:
    if device.type == "cpu":
        return GlooGroup(store, address, rank, size)
    return NcclGroup(store, rank, size, device)


class GlooGroup:
    """Broadcasts over gloo, in a group separate from torch.distributed's default group."""

    def __init__(self, store: dist.Store, address: str, rank: int, size: int):
        """Join the group. `address` is that by which the other members reach this host."""
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _TIMEOUT
        # By default gloo resolves the host's name, which may give an address that the others cannot reach.
        options._devices = [gloo.create_device(hostname=address)]
        self._group: dist.ProcessGroupGloo | None = gloo(dist.PrefixStore("moe_rl/gloo", store), rank, size, options)

    def start(self, octets: Tensor) -> Callable[[], object]:
        """Begin to broadcast rank 0's bytes into all others'. The returned function waits until this is done."""
        assert self._group is not None, "this rank has left the group"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([octets], options).wait

    def destroy(self) -> None:
        """Leave the group, even in the middle of a broadcast. The others get an error."""
        if self._group is not None:
            self._group.abort()  # otherwise the group would wait for a broadcast that is under way
        self._group = None  # its connections close now, even while an error's traceback refers to this object


class NcclGroup:
    """Broadcasts over vLLM's NCCL communicator, on its own CUDA stream. Never run.

    The bytes are allocated, packed, read and freed in the order of the caller's stream. A broadcast begins after the
    work already queued on that stream, and `wait` makes the stream wait for it. So the allocator, which knows only the
    caller's stream, never reuses bytes that a broadcast still needs.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device):
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        if rank == 0:
            store.set("moe_rl/nccl", bytes(NCCLLibrary().ncclGetUniqueId().internal))
        # Otherwise vLLM gives this thread a stream of its own for good, and no other thread waits for what runs there.
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            self._group = uid_init_process_group(store.get("moe_rl/nccl"), rank, size, device)
        self._stream = torch.cuda.Stream(device)

    def start(self, octets: Tensor) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._group.broadcast(octets, 0, stream=self._stream)
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def destroy(self) -> None:
        """Leave the group as GlooGroup does; the others wait forever."""
        self._group.destroy()


Communicator = GlooGroup | NcclGroup
"""Joins a sender, which is rank 0, and all workers."""


def packed(infos: Sequence[TensorInfo], tensors: Iterable[Tensor], device: torch.device, *, after: int = 0) -> Tensor:
    """Copy tensors, which must be as announced by `infos`, into uint8 [their bytes + after], one after the other.

    They are taken one at a time. The last `after` bytes are left for the caller.
    """
    octets = torch.empty(sum(info.size for info in infos) + after, dtype=torch.uint8, device=device)
    start = 0
    for info, tensor in zip(infos, tensors, strict=True):
        octets[start : start + info.size] = tensor.contiguous().reshape(-1).view(torch.uint8)
        start += info.size
    return octets


def unpacked(octets: Tensor, infos: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each tensor in `octets`, which are those that `infos` announce. They share its memory."""
    start = 0
    for info in infos:
        piece = octets[start : start + info.size]
        start += info.size
        # A tensor may start at an offset that is not a multiple of its item size; a view needs an aligned copy then.
        dtype = getattr(torch, info.dtype)
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        yield info.name, aligned.view(dtype).view(info.shape)
