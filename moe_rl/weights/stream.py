"""Streams the tensors of all ranks through the ranks that send: by broadcast, or by CUDA IPC to one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.broadcast import Sender, packed, unpacked
from moe_rl.weights.digest import TensorDigests, as_announced, dtype_name
from moe_rl.weights.update import Broadcast, Received, SenderAt, TensorInfo, WeightUpdate

_LEAVE_SECONDS = 5.0
_FIRST_TELLS_SECONDS = 20.0
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

    @property
    def infos(self) -> list[TensorInfo]:
        """Return the announcement of the whole tensors, without digests."""
        return [TensorInfo(name, dtype_name(dtype), shape) for name, dtype, shape in self.whole]


class Ranks(Protocol):
    """Lists the operations on the trainer's ranks that an update uses: `megatron.world`."""

    def gather(self, message: object, kind: type) -> list[Any]:
        """Return one value of each rank, in rank order, on all ranks. `kind` is the type to decode to."""

    def device(self) -> torch.device:
        """Return the device of this rank's tensors."""

    def give_back(self) -> None:
        """Give reserved memory of the GPU that is not used to other processes on it."""

    def stage(self) -> int:
        """Return this rank's stage of the pipeline."""


class Recipient(Protocol):
    """Lists the operations of a sampler that an update uses, see `rollout.sampler.Sampler`."""

    @property
    def workers(self) -> list[str]: ...

    @property
    def address(self) -> str: ...

    def update_weights(self, update: WeightUpdate) -> None: ...

    def wake(self, part: str) -> None: ...


class Announced(msgspec.Struct, frozen=True):
    """Lists what a rank will export, round by round, and its stage of the pipeline."""

    rounds: list[list[TensorInfo]]
    stage: int


class WeightStream:
    """Merges the exports of all ranks into one stream, which some ranks send. All ranks create it together.

    The stream goes stage by stage, then round by round, then rank by rank. A worker of a sampler keeps the tensors of a
    layer until it has all of them, so few layers may be incomplete at a time; those of several stages would be.
    Successive ranks with tensors share a sender, the first of them: the others hand their rounds over to it. A round of
    a rank travels as one bucket.

    Attributes:
        infos: all tensors of the stream in order, without digests.
        senders: the ranks that send. The first one is rank 0.
        buckets: for each bucket in order, which of the senders has it, and the number of its tensors.
    """

    def __init__(self, rounds: list[Round], ranks: Ranks, *, senders: int = 1):
        """Plan the stream.

        Args:
            rounds: what this rank exports.
            ranks: the trainer's ranks.
            senders: how many ranks send, at most.
        """
        self.device = ranks.device()
        announced = Announced([run.infos for run in rounds], ranks.stage())
        everyone = ranks.gather(announced, Announced)
        self.rank = dist.get_rank() if len(everyone) > 1 else 0
        exporting = [rank for rank, export in enumerate(everyone) if rank == 0 or any(export.rounds)]
        blocks = [number * min(senders, len(exporting)) // len(exporting) for number in range(len(exporting))]
        self.senders = [exporting[blocks.index(block)] for block in range(blocks[-1] + 1)]
        # Ranks without tensors may have rounds, in which they give other ranks parts of tensors.
        self._sender = dict.fromkeys(range(len(everyone)), 0) | dict(zip(exporting, blocks, strict=True))
        places = [(rank, index) for rank, export in enumerate(everyone) for index in range(len(export.rounds))]
        order = sorted(places, key=lambda place: (everyone[place[0]].stage, place[1], place[0]))
        full = [(rank, everyone[rank].rounds[index]) for rank, index in order if everyone[rank].rounds[index]]
        self.infos = [info for _, infos in full for info in infos]
        self.buckets = [(self._sender[rank], len(infos)) for rank, infos in full]
        self.sends = self.rank in self.senders
        self.own = [infos for rank, infos in full if self.senders[self._sender[rank]] == self.rank]
        """The tensors of each bucket that this rank sends."""
        self._passing = [
            (rank, index, everyone[rank].rounds[index])
            for rank, index in order
            if rank == self.rank or (everyone[rank].rounds[index] and self.senders[self._sender[rank]] == self.rank)
        ]
        self._rounds = rounds
        self._digests, self._told = TensorDigests(), dict[str, str]()  # of this rank's tensors; of those of other ranks

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `own` on a rank that sends, once. It holds at most one own tensor, and two rounds of
        other ranks: while one round is yielded, the next arrives, unless this rank must make a round before.

        Another rank may need this one's part in that round before it can send its own. A receive that is asked for
        earlier runs on the GPU until then, and a cudaFree in this rank would wait for it: both would wait for ever.
        """
        for is_own, run in groupby(self._passing, key=lambda passed: passed[0] == self.rank):
            if is_own:
                for _, index, _ in run:
                    for name, tensor in self._rounds[index].tensors:
                        self._digests.add(name, tensor)
                        yield name, tensor
                continue
            rounds = list(run)
            arrivals = self._arrivals(rounds)
            for _, _, infos in rounds:
                yield from self._handed_over(next(arrivals), infos)

    def digested(self, infos: list[TensorInfo]) -> list[TensorInfo]:
        """Return `infos` with the digests of their tensors, which this rank has already yielded."""
        known = self._told | self._digests.read()
        return [msgspec.structs.replace(info, digest=known[info.name]) for info in infos]

    def all_digested(self, ranks: Ranks) -> list[TensorInfo]:
        """Return `infos` with the digests of all tensors, after all are sent. All ranks call this together."""
        digested = self.digested([info for infos in self.own for info in infos]) if self.sends else []
        known = {info.name: info for infos in ranks.gather(digested, list[TensorInfo]) for info in infos}
        return [known[info.name] for info in self.infos]

    def hand_over(self) -> None:
        """Send each round to this rank's sender as one run of bytes, with the digests of its tensors; called on ranks
        that do not send.

        Raises:
            WeightSyncError: a tensor differs from its announcement.
        """
        for run, (_, _, infos) in zip(self._rounds, self._passing, strict=True):
            digests = TensorDigests()
            tensors = _noted(as_announced(infos, run.tensors), digests)
            octets = packed(infos, tensors, self.device, after=_DIGEST_BYTES * len(infos))
            if infos:
                digest_bytes = bytearray.fromhex("".join(digests.read()[info.name] for info in infos))
                octets[-len(digest_bytes) :] = torch.frombuffer(digest_bytes, dtype=torch.uint8)
                dist.send(octets, self.senders[self._sender[self.rank]])
            del octets  # otherwise the bytes of two rounds would be held at once

    def _arrivals(self, rounds: list[tuple[int, int, list[TensorInfo]]]) -> Iterator[Tensor]:
        """Yield the bytes of each of these rounds of other ranks, and receive the next one meanwhile."""
        before: tuple[int, dist.Work, Tensor] | None = None
        for rank, _, infos in rounds:
            count = sum(info.size for info in infos) + _DIGEST_BYTES * len(infos)
            octets = torch.empty(count, dtype=torch.uint8, device=self.device)
            work = dist.irecv(octets, rank)
            assert work is not None  # this rank is in the group
            if before is not None:
                yield _arrived(*before)
            before = rank, work, octets
        if before is not None:
            yield _arrived(*before)

    def _handed_over(self, octets: Tensor, infos: list[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a round of another rank, and note their digests."""
        digests = octets[-_DIGEST_BYTES * len(infos) :].cpu().view(len(infos), _DIGEST_BYTES)
        self._told |= {info.name: bytes(digest.tolist()).hex() for info, digest in zip(infos, digests, strict=True)}
        yield from unpacked(octets, infos)


def broadcast(
    stream: WeightStream,
    sender: Sender,
    senders: list[SenderAt],
    sampler: Recipient,
    ranks: Ranks,
    part: Callable[..., WeightUpdate],
    settle: Callable[[], None],
) -> int:
    """Send the stream from rank 0 and `senders` in two parts: the bytes, then their digests.

    Args:
        stream: the tensors of all ranks.
        sender: rank 0's end of the broadcast.
        senders: where the workers reach each rank of `stream.senders`.
        sampler: receives them.
        ranks: the trainer's ranks. The others call `take_part` meanwhile.
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
        source = Broadcast(senders, stream.buckets, world_size=sender.workers + 1, first_rank=1)
        sampler.update_weights(part(number=0, final=False, tensors=stream.infos, source=source))
    except WeightSyncError as error:
        refused = error
    finally:
        failed = sending.stop()
    if failed is not None:
        refusal = f"{refused}. " if refused is not None else ""
        raise WeightSyncError(f"{refusal}The broadcast of weights failed on the trainer: {failed}") from failed
    if refused is not None:
        raise refused
    settle()
    sampler.update_weights(part(number=1, final=True, tensors=stream.all_digested(ranks), source=Received()))
    return sum(info.size for info in stream.infos)


def take_part(stream: WeightStream, sender: Sender | None, ranks: Ranks, settle: Callable[[], None]) -> None:
    """Do the part of a rank other than 0 in `broadcast`, with the same arguments.

    Args:
        sender: this rank's end, if it sends. Otherwise it hands its tensors over.

    Raises:
        WeightSyncError: a tensor differs from its announcement, or the workers are gone.
    """
    if sender is None:
        stream.hand_over()
    else:
        try:
            sender.send(stream.own, iter(stream), threading.Event())
        except Exception as error:
            sender.close()  # otherwise the workers would keep waiting for bytes
            if isinstance(error, ConnectionError):
                # Rank 0, whose call fails too, knows which workers are gone. torchrun ends all ranks when one ends.
                time.sleep(_FIRST_TELLS_SECONDS)
            message = f"The broadcast of weights failed on rank {stream.rank} of the trainer: {error}"
            raise WeightSyncError(message) from error
    settle()
    stream.all_digested(ranks)


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
                torch.cuda.synchronize()  # wait for kernels that write the weights, on whatever stream
            self._sender.send(self._stream.own, iter(self._stream), self._stopped)
        except Exception as error:
            self._error = error
            self._sender.close()  # otherwise the sampler would keep waiting for bytes

    def stop(self) -> Exception | None:
        """Stop the broadcast after the sampler's call has ended, and return the broadcast's error, if any."""
        self._stopped.set()
        self._thread.join(_LEAVE_SECONDS)
        return self._error


def _arrived(rank: int, work: dist.Work, octets: Tensor) -> Tensor:
    try:
        work.wait()
    except RuntimeError as error:
        message = describe("A rank did not hand its weights over", where={"rank": rank}, got=str(error).splitlines()[0])
        raise WeightSyncError(message) from error
    return octets


def _noted(tensors: Iterator[tuple[str, Tensor]], digests: TensorDigests) -> Iterator[Tensor]:
    for name, tensor in tensors:
        digests.add(name, tensor)
        yield tensor
