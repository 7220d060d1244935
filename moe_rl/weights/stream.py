"""Streams the tensors of all ranks through rank 0, for updates by broadcast or CUDA IPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import WeightSyncError
from moe_rl.weights.broadcast import Sender
from moe_rl.weights.digest import TensorDigests, as_announced, dtype_name
from moe_rl.weights.update import Received, TensorInfo, WeightUpdate

_LEAVE_SECONDS = 5.0
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Round:
    """Holds one round of a rank's export. Ranks that share tensors make them together, so all must exhaust `tensors`.

    Attributes:
        whole: name, dtype and shape of each tensor, known before any is made.
        tensors: yields (name, tensor), one at a time.
    """

    whole: list[tuple[str, torch.dtype, tuple[int, ...]]]
    tensors: Iterator[tuple[str, Tensor]]


class Ranks(Protocol):
    """Lists the operations on the trainer's ranks that an update uses: `megatron.world`."""

    def gather(self, message: object, kind: type) -> list[Any]:
        """Return one value of each rank, in rank order, on all ranks. `kind` is the type to decode to."""
        ...

    def device(self) -> torch.device:
        """Return the device of this rank's tensors."""
        ...


class Recipient(Protocol):
    """Lists the operations of a sampler that an update uses, see `rollout.sampler.Sampler`."""

    @property
    def workers(self) -> int: ...

    @property
    def address(self) -> str: ...

    def update_weights(self, update: WeightUpdate) -> None: ...

    def wake(self, part: str) -> None: ...


class Announced(msgspec.Struct, frozen=True):
    """Lists what a rank will export, round by round."""

    rounds: list[list[TensorInfo]]


class WeightStream:
    """Merges the exports of all ranks into one stream on rank 0: round by round, rank by rank. All ranks create it
    together."""

    def __init__(self, rounds: list[Round], ranks: Ranks):
        self.device = ranks.device()
        everyone = ranks.gather(Announced([[_info(*one) for one in run.whole] for run in rounds]), Announced)
        count = max((len(one.rounds) for one in everyone), default=0)
        self._order = [(rank, at) for at in range(count) for rank, one in enumerate(everyone) if at < len(one.rounds)]
        self._rounds, self._everyone = rounds, everyone
        self.infos = [info for rank, at in self._order for info in everyone[rank].rounds[at]]
        """On rank 0: all tensors of the stream in order, without digests."""
        self._digests, self._told = TensorDigests(), dict[str, str]()  # of rank 0's tensors; of those of other ranks

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors on rank 0, once. Rank 0 holds at most one round of its own, and two of other ranks: while
        one is yielded, the next one arrives."""
        arrivals = self._arrivals()
        for rank, at in self._order:
            if rank == 0:
                for name, tensor in self._rounds[at].tensors:
                    self._digests.add(name, tensor)
                    yield name, tensor
            elif infos := self._everyone[rank].rounds[at]:
                yield from self._unpacked(next(arrivals), infos)

    def digested(self, infos: list[TensorInfo]) -> list[TensorInfo]:
        """Return `infos` with the digests of their tensors, which the stream has already yielded."""
        known = self._told | self._digests.read()
        return [msgspec.structs.replace(info, digest=known[info.name]) for info in infos]

    def hand_over(self, settle: Callable[[], None]) -> int:
        """Send each round to rank 0 as one run of bytes, with the digests of its tensors; called on the other ranks.

        Args:
            settle: see `broadcast`.

        Returns:
            0, the bytes that this rank sent to a sampler.

        Raises:
            WeightSyncError: a tensor differs from its announcement.
        """
        for run, infos in zip(self._rounds, self._everyone[dist.get_rank()].rounds, strict=True):
            digests, octets = TensorDigests(), []
            for name, tensor in as_announced(infos, run.tensors):
                digests.add(name, tensor)
                octets.append(tensor.view(-1).view(torch.uint8))
            if octets:
                told = bytearray.fromhex("".join(digests.read()[info.name] for info in infos))
                dist.send(torch.cat([*octets, torch.frombuffer(told, dtype=torch.uint8).to(self.device)]), 0)
            del octets  # otherwise the bytes of two rounds would be held at once
        settle()
        return 0

    def _arrivals(self) -> Iterator[Tensor]:
        """Yield the bytes of each round of another rank, and receive the next round meanwhile."""
        before: tuple[dist.Work, Tensor] | None = None
        for rank, at in self._order:
            infos = self._everyone[rank].rounds[at]
            if rank == 0 or not infos:
                continue
            count = sum(info.size for info in infos) + _DIGEST_BYTES * len(infos)
            octets = torch.empty(count, dtype=torch.uint8, device=self.device)
            work = dist.irecv(octets, rank)
            assert work is not None  # this rank is in the group
            if before is not None:
                yield _arrived(*before)
            before = work, octets
        if before is not None:
            yield _arrived(*before)

    def _unpacked(self, octets: Tensor, infos: list[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a round of another rank, and note their digests."""
        *pieces, told = octets.split([*(info.size for info in infos), _DIGEST_BYTES * len(infos)])
        for info, digest in zip(infos, told.cpu().view(len(infos), _DIGEST_BYTES), strict=True):
            self._told[info.name] = bytes(digest.tolist()).hex()
        for info, piece in zip(infos, pieces, strict=True):
            # A tensor may start at an offset that is not a multiple of its item size; a view needs an aligned copy
            # then.
            dtype = getattr(torch, info.dtype)
            aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
            yield info.name, aligned.view(dtype).view(info.shape)


def broadcast(
    stream: WeightStream,
    sender: Sender,
    sampler: Recipient,
    part: Callable[..., WeightUpdate],
    settle: Callable[[], None],
) -> int:
    """Send the stream in two parts: the bytes, then their digests.

    Args:
        stream: the tensors of all ranks.
        sender: the trainer's end of the broadcast.
        sampler: receives them.
        part: makes a part of the update from number, final, tensors and source.
        settle: called on all ranks after the last tensor and before the final part; an exception it raises ends the
            update.

    Returns:
        The bytes sent.

    Raises:
        WeightSyncError: with the errors of both ends, since either may have made the other fail. Other errors of the
            sampler are raised as they are.
    """
    sending, refused = _Sending(sender, stream), None
    try:
        sampler.update_weights(part(number=0, final=False, tensors=stream.infos, source=sender.source()))
    except WeightSyncError as error:
        refused = error
    finally:
        failed = sending.stop()
    if failed is not None:
        theirs = f"{refused}. " if refused is not None else ""
        raise WeightSyncError(f"{theirs}The broadcast of weights failed on the trainer: {failed}") from failed
    if refused is not None:
        raise refused
    settle()
    sampler.update_weights(part(number=1, final=True, tensors=stream.digested(stream.infos), source=Received()))
    return sum(info.size for info in stream.infos)


def by_cuda_ipc(
    stream: WeightStream,
    sampler: Recipient,
    part: Callable[..., WeightUpdate],
    bucket_bytes: int,
    settle: Callable[[], None],
) -> int:
    """Send the stream through a buffer on the GPU that rank 0 and the sampler share, one part per filling of the
    buffer.

    Arguments and errors are those of `broadcast`. The sampler has copied the buffer when it answers a call. Never run
    on a GPU.
    """
    # Imported here: vLLM's packed buckets take seconds to import, and only this way needs them.
    from moe_rl.weights.cuda_ipc import packed

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


class _Sending:
    """Runs the broadcast in a thread, while the sampler's call waits for its bytes in the calling thread."""

    def __init__(self, sender: Sender, stream: WeightStream):
        self._sender, self._stream = sender, stream
        self._stopped = threading.Event()
        self._error: Exception | None = None
        # Abandoned if the sampler fails midway: a thread that waits in a collective cannot be interrupted.
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream.device.type == "cuda":
                torch.cuda.set_device(self._stream.device)
                torch.cuda.synchronize()  # wait for kernels that write the weights: vLLM packs on its own stream
            self._sender.send(self._stream.infos, iter(self._stream), self._stopped)
        except Exception as error:
            self._error = error
            self._sender.close()  # otherwise the sampler would keep waiting for bytes

    def stop(self) -> Exception | None:
        """Stop the broadcast after the sampler's call has ended, and return the broadcast's error, if any."""
        self._stopped.set()
        self._thread.join(_LEAVE_SECONDS)
        return self._error


def _arrived(work: dist.Work, octets: Tensor) -> Tensor:
    work.wait()
    return octets


def _info(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype_name(dtype), shape)
