"""The trainer's side of a broadcast: the tensors of all ranks as one stream on rank 0, bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import WeightSyncError
from moe_rl.megatron import world
from moe_rl.megatron.export import Round
from moe_rl.rollout.sampler import Sampler
from moe_rl.sync.broadcast import Sender
from moe_rl.sync.digest import dtype_name, tensor_digest
from moe_rl.sync.update import Received, TensorInfo, WeightUpdate

_LEAVE_SECONDS = 5.0


class Announced(msgspec.Struct, frozen=True):
    """What a rank will export, round by round."""

    rounds: list[list[TensorInfo]]


def send(
    sender: Sender | None,
    sampler: Sampler | None,
    part: Callable[..., WeightUpdate],
    rounds: list[Round],
) -> int:
    """Broadcast the rounds of all ranks; rank 0 has `sender` and `sampler`. Returns the bytes sent, 0 on other ranks.

    part: makes a part of the update from number, final, tensors and source. Other ranks hand each round to rank 0,
    which holds one round of one rank beside vLLM's buckets.
    """
    everyone = world.gather(Announced([[_info(*one) for one in run.whole] for run in rounds]), Announced)
    if sampler is None:
        for run in rounds:
            _hand_over(run)
        return 0
    count = max(len(one.rounds) for one in everyone)
    order = [(rank, at) for at in range(count) for rank, one in enumerate(everyone) if at < len(one.rounds)]
    infos = [info for rank, at in order for info in everyone[rank].rounds[at]]
    digests: dict[str, str] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for rank, at in order:
            for name, tensor in rounds[at].tensors if rank == 0 else _taken(rank, everyone[rank].rounds[at]):
                digests[name] = tensor_digest(name, tensor)
                yield name, tensor

    sending = _Sending(sender, infos, stream())
    try:
        sampler.update_weights(part(number=0, final=False, tensors=infos, source=sender.source()))
    finally:
        sending.stop()
    confirmed = [msgspec.structs.replace(info, digest=digests[info.name]) for info in infos]
    sampler.update_weights(part(number=1, final=True, tensors=confirmed, source=Received()))
    return sum(info.size for info in infos)


class _Sending:
    """The broadcast, in a thread: the sampler's call, which waits for the bytes, fails in its own when it does."""

    def __init__(self, sender: Sender, infos: list[TensorInfo], tensors: Iterator[tuple[str, Tensor]]):
        self._sender, self._infos, self._tensors = sender, infos, tensors
        self._stopped, self._error = threading.Event(), None
        self._device = world.device()
        # Left behind when the sampler fails in the middle: nothing can call a thread back that waits in a collective.
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._sender.send(self._infos, self._tensors, self._stopped)
        except Exception as error:
            self._error = error
            self._sender.close()  # else the sampler would wait for the rest

    def stop(self) -> None:
        """The sampler's call is over: so is the broadcast, or it never will be."""
        self._stopped.set()
        self._thread.join(_LEAVE_SECONDS)
        if self._error is not None:
            raise WeightSyncError(f"The broadcast of weights failed on the trainer: {self._error}") from self._error


def _info(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype_name(dtype), shape)


def _hand_over(run: Round) -> None:
    """Send a round to rank 0 as one run of bytes."""
    octets = [tensor.view(-1).view(torch.uint8) for _, tensor in run.tensors]
    if octets:
        dist.send(torch.cat(octets), 0)


def _taken(rank: int, infos: list[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """A round of another rank."""
    if not infos:
        return
    octets = torch.empty(sum(info.size for info in infos), dtype=torch.uint8, device=world.device())
    dist.recv(octets, rank)
    for info, piece in zip(infos, octets.split([info.size for info in infos]), strict=True):
        # Tensors begin at multiples of their own size only where those before are as wide.
        dtype = getattr(torch, info.dtype)
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        yield info.name, aligned.view(dtype).view(info.shape)

