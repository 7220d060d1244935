"""Updates that rank 0 sends alone, by broadcast or CUDA IPC: the tensors of all ranks as one stream."""

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
from moe_rl.weights.digest import as_announced, dtype_name, tensor_digest
from moe_rl.weights.update import Received, TensorInfo, WeightUpdate

_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Round:
    """A part of what this rank gives. whole: name, dtype and shape of each tensor, known before any is made. tensors:
    (name, tensor), one at a time. Ranks that share tensors make them together: all must exhaust it."""

    whole: list[tuple[str, torch.dtype, tuple[int, ...]]]
    tensors: Iterator[tuple[str, Tensor]]


class Ranks(Protocol):
    """What an update asks of the trainer's ranks: `megatron.world`."""

    def gather(self, message: object, kind: type) -> list[Any]:
        """One value of each rank, in their order, on all of them. kind: the type to decode to."""
        ...

    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...


class Recipient(Protocol):
    """What an update asks of a sampler, see `rollout.sampler.Sampler`."""

    @property
    def workers(self) -> int: ...

    @property
    def address(self) -> str: ...

    def update_weights(self, update: WeightUpdate) -> None: ...

    def wake(self, part: str) -> None: ...


class Announced(msgspec.Struct, frozen=True):
    """What a rank will export, round by round."""

    rounds: list[list[TensorInfo]]


class WeightStream:
    """What all ranks will give, as one stream on rank 0: round by round, rank by rank. All ranks make one together."""

    def __init__(self, rounds: list[Round], ranks: Ranks):
        self.device = ranks.device()
        everyone = ranks.gather(Announced([[_info(*one) for one in run.whole] for run in rounds]), Announced)
        count = max((len(one.rounds) for one in everyone), default=0)
        self._order = [(rank, at) for at in range(count) for rank, one in enumerate(everyone) if at < len(one.rounds)]
        self._rounds, self._everyone = rounds, everyone
        self.infos = [info for rank, at in self._order for info in everyone[rank].rounds[at]]
        """On rank 0: what will come, without digests."""
        self._digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """On rank 0, once. It holds one round of one rank."""
        for rank, at in self._order:
            infos = self._everyone[rank].rounds[at]
            for name, tensor in self._rounds[at].tensors if rank == 0 else self._taken(rank, infos):
                self._digests[name] = tensor_digest(name, tensor)
                yield name, tensor

    def digested(self, infos: list[TensorInfo]) -> list[TensorInfo]:
        """These of `infos`, which have been given, with their digests."""
        return [msgspec.structs.replace(info, digest=self._digests[info.name]) for info in infos]

    def hand_over(self, settle: Callable[[], None]) -> int:
        """On the other ranks: give rank 0 every round, as one run of bytes. Returns 0, the bytes that a sampler got.

        settle: see `broadcast`.

        Raises WeightSyncError for a tensor that rank 0 would take for another.
        """
        for run, infos in zip(self._rounds, self._everyone[dist.get_rank()].rounds, strict=True):
            octets = [tensor.view(-1).view(torch.uint8) for _, tensor in as_announced(infos, run.tensors)]
            if octets:
                dist.send(torch.cat(octets), 0)
            del octets  # else they would lie beside those of the next round
        settle()
        return 0

    def _taken(self, rank: int, infos: list[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """A round of another rank."""
        if not infos:
            return
        octets = torch.empty(sum(info.size for info in infos), dtype=torch.uint8, device=self.device)
        dist.recv(octets, rank)
        for info, piece in zip(infos, octets.split([info.size for info in infos]), strict=True):
            # Tensors begin at multiples of their own size only where those before are as wide.
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
    """Send the stream in two parts: the bytes, then their digests. Returns the bytes sent.

    part: makes a part of the update from number, final, tensors and source. settle: called, on all ranks, when all
    tensors have been given and before the part that makes the update final; what it raises ends the update.
    Raises what the sampler does; of a WeightSyncError both ends tell, since either may have brought the other down.
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
    """As `broadcast`, in one part for each filling of a buffer on the GPU that rank 0 and the sampler share. The one
    before has been copied when its call is answered.

    Never run on a GPU.
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
    """The broadcast, in a thread: the sampler's call, which waits for the bytes, fails in its own when it does."""

    def __init__(self, sender: Sender, stream: WeightStream):
        self._sender, self._stream = sender, stream
        self._stopped = threading.Event()
        self._error: Exception | None = None
        # Left behind when the sampler fails in the middle: nothing can call a thread back that waits in a collective.
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream.device.type == "cuda":
                torch.cuda.set_device(self._stream.device)
                torch.cuda.synchronize()  # what still writes the weights: vLLM packs them on a stream of its own
            self._sender.send(self._stream.infos, iter(self._stream), self._stopped)
        except Exception as error:
            self._error = error
            self._sender.close()  # else the sampler would wait for the rest

    def stop(self) -> Exception | None:
        """The sampler's call is over: so is the broadcast, or it never will be. Returns what it failed of."""
        self._stopped.set()
        self._thread.join(_LEAVE_SECONDS)
        return self._error


def _info(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype_name(dtype), shape)
