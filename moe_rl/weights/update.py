"""Defines how the trainer announces new weights to a sampler: plain values, as JSON or MessagePack. Imports no torch.

An update is one or more calls of `Sampler.update_weights`, one per bucket of tensors, numbered from 0. After the final
call the sampler has received every tensor of its checkpoint exactly once, or every adapter. The trainer computes each
tensor's digest, and the sampler confirms it over the memory that it loads (`moe_rl/weights/digest.py`).

    one call           the bytes are checked before the model is touched; after a refusal the old weights stay in use
    several calls      after a refusal of a later call, the sampler answers nothing until a whole update has come
"""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from moe_rl.errors import WeightSyncError, describe


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host. Sends nothing. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reached_by_all(others: Iterable[tuple[str, int]]) -> str:
    """Return an address of this host that all of the given (host, port) can reach.

    Some of them may be this host itself. The address is a loopback address only if all are. Raises OSError as
    `own_address` does.
    """
    addresses = [own_address(*other) for other in others]
    return next((address for address in addresses if not is_loopback(address)), addresses[0])


def is_loopback(address: str) -> bool:
    """Return whether an address is reached only from its own host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

ALIGNMENT = 64
"""Tensors in a segment start at multiples of this many bytes."""

DTypeName = Literal["bfloat16", "float32"]
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes one tensor under its Hugging Face name. `digest` is "" while unknown."""

    name: str
    dtype: DTypeName
    shape: tuple[Natural, ...]
    digest: str = ""

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Files(msgspec.Struct, frozen=True, tag="files", forbid_unknown_fields=True):
    """Says that the tensors are in these safetensors files, in a folder that both sides see."""

    paths: list[str]


class MemorySegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes `size` bytes of nameless memory: a descriptor of process `pid` on this host.

    It holds the next `tensors` tensors of the update in order, each at the next multiple of ALIGNMENT.
    """

    pid: Natural
    descriptor: Natural
    size: Natural
    tensors: Natural


class SharedMemory(msgspec.Struct, frozen=True, tag="shared_memory", forbid_unknown_fields=True):
    """Says that the tensors are in these segments, in order. The trainer overwrites them after the call is answered."""

    segments: list[MemorySegment]


class Bucket(msgspec.Struct, frozen=True):
    """Lists tensors of one trainer rank, and their place: a path, a segment, or None if there are no tensors."""

    tensors: list[TensorInfo]
    place: str | MemorySegment | None


class SenderAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Gives the address of a trainer rank that broadcasts."""

    rank: Natural
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast", forbid_unknown_fields=True):
    """Says that the tensors are broadcast in order during the call, bucket by bucket.

    The digests follow in the next call, as Received.

    Attributes:
        senders: ranks of the trainer. Each is rank 0 of a group of `world_size`, and all groups have the same workers.
        buckets: for each bucket, which of the senders has it, and how many tensors it brings.
        first_rank: the rank of this sampler's first worker in every group.
    """

    senders: Annotated[list[SenderAt], msgspec.Meta(min_length=1)]
    buckets: list[tuple[Natural, Natural]]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]
    first_rank: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Received(msgspec.Struct, frozen=True, tag="received", forbid_unknown_fields=True):
    """Says that the tensors came with the previous call, and that this call brings their digests."""


class CudaBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a GPU buffer of `size` bytes as `torch.multiprocessing.reductions.reduce_tensor` does."""

    gpu_uuid: str
    size: Natural
    device: Natural
    storage_handle: bytes
    storage_bytes: Natural
    storage_offset: Natural
    counter_handle: bytes
    counter_offset: Natural
    event_handle: bytes
    event_sync: bool


class CudaIpc(msgspec.Struct, frozen=True, tag="cuda_ipc", forbid_unknown_fields=True):
    """Says that the tensors are packed without gaps in a buffer on the GPU of each engine, which a rank shares with
    it."""

    buffers: Annotated[list[CudaBuffer], msgspec.Meta(min_length=1)]


Source = Files | SharedMemory | Broadcast | Received | CudaIpc


class Merge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says how a sampler makes all tensors of its model from its own checkpoint and the adapters that an update brings.

    Attributes:
        scale: alpha / rank of the adapters.
        dtype: the training's precision. The checkpoint is rounded to it before an adapter is added, and the sum after.
        adapters: all adapters of the version, without digests.
        tensors: all tensors of the model, with the digests of what the trainer has.
    """

    scale: float
    dtype: DTypeName
    adapters: list[TensorInfo]
    tensors: list[TensorInfo]


class WeightUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds one call's part of an update.

    Attributes:
        version: version of the weights once the final part is loaded; all later samples carry it.
        replaces: version that the trainer expects the sampler to hold; any other sampler refuses. Versions rise, with
            one exception: a sampler that still holds its checkpoint, version 0, may be sent other weights as version 0.
        number: index of this part, from 0.
        final: whether this is the last part.
        changed: whether the weights are known to differ from the old ones; identical bytes are then refused as stale.
        tensors: the tensors of this part, in order.
        source: where the tensors are.
        merge: with part 0 of an update that brings only adapters.
    """

    version: Natural
    replaces: Natural
    number: Natural
    final: bool
    changed: bool
    tensors: list[TensorInfo]
    source: Source
    merge: Merge | None = None


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what a sampler's worker holds after a call.

    Attributes:
        version, digest: those of the last complete weights that it held; the digest of its first weights is "".
        whole: whether it still holds them.
        refused: why the call was refused, or "".
    """

    version: Natural
    digest: str
    whole: bool
    refused: str = ""


# Created at import time, by one thread: msgspec crashes when two threads are the first to decode a type.
_UPDATE = msgspec.json.Decoder(WeightUpdate)


def encode(update: WeightUpdate) -> bytes:
    return msgspec.json.encode(update)


def decode(data: bytes) -> WeightUpdate:
    """Decode a WeightUpdate. Raises msgspec.MsgspecError for anything else."""
    return _UPDATE.decode(data)


def agreement(answers: list[Holding]) -> Holding:
    """Combine the answers of a sampler's workers. If they differ, the result is not whole."""
    first = answers[0]
    refused = next((answer.refused for answer in answers if answer.refused), "")
    alike = dict.fromkeys((answer.version, answer.digest) for answer in answers)
    if len(alike) > 1:
        refused = describe(
            "The workers of one sampler hold different weights",
            got="; ".join(f"version {version}, digest {digest or 'of the checkpoint'}" for version, digest in alike),
            expected="the same on all",
            do="continue the run with --resume, which restarts the sampler: one update cannot replace both",
        ) + (f". One refused: {refused}" if refused else "")
    whole = len(alike) == 1 and all(answer.whole for answer in answers)
    return Holding(min(answer.version for answer in answers), first.digest, whole, refused)


def refusal(holding: Holding) -> WeightSyncError:
    """Return the error for a refused part, or for incomplete weights; it says what the sampler does now."""
    if holding.whole:
        return WeightSyncError(f"{holding.refused}. The sampler continues with version {holding.version}, which it had")
    return WeightSyncError(
        holding.refused or "An update was started and not finished",
        got="no whole set of weights",
        expected="weights of one version",
        do="send a whole update again, from its first part: until then nothing is sampled",
    )
