"""New weights for a sampler, as the trainer announces them: plain values, as JSON or MessagePack. Imports no torch.

An update comes in one or more calls of `Sampler.update_weights`, one for each bucket of tensors, numbered from 0; with
the final one the sampler has every tensor of its checkpoint exactly once. The digest of a tensor is of what the trainer
meant, and is confirmed over the memory that the sampler loads (`moe_rl/weights/digest.py`).

    one call           the bytes are checked before the model is touched: refused, it goes on with what it had
    several calls      a refusal after the first one leaves a sampler that answers nothing until a whole update came
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from moe_rl.errors import WeightSyncError, describe

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

ALIGNMENT = 64
"""Tensors in a segment begin at multiples of so many bytes."""

DTypeName = Literal["bfloat16", "float32"]
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor under its Hugging Face name. digest: "" as long as it is not known."""

    name: str
    dtype: DTypeName
    shape: tuple[Natural, ...]
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Files(msgspec.Struct, frozen=True, tag="files", forbid_unknown_fields=True):
    """The tensors lie in these safetensors files, in a folder that both sides see."""

    paths: list[str]


class MemorySegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`size` bytes of memory without a name: descriptor of process `pid` of this host. The next `tensors` tensors of
    the update lie in it, one behind the other, each at the next multiple of ALIGNMENT."""

    pid: Natural
    descriptor: Natural
    size: Natural
    tensors: Natural


class SharedMemory(msgspec.Struct, frozen=True, tag="shared_memory", forbid_unknown_fields=True):
    """The tensors lie in these segments, in order. The trainer writes there again once the call is answered."""

    segments: list[MemorySegment]


class Bucket(msgspec.Struct, frozen=True):
    """Tensors of one trainer rank, and where they lie: a path, a segment, or nowhere when there are none."""

    tensors: list[TensorInfo]
    place: str | MemorySegment | None


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast", forbid_unknown_fields=True):
    """The tensors are broadcast in order while the call is answered, packed into buckets of bucket_bytes or one tensor
    more. The trainer is rank 0 of a group of world_size at address:port; the workers of this sampler follow from
    first_rank. Digests come with the call after this one, as Received."""

    address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]
    first_rank: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Received(msgspec.Struct, frozen=True, tag="received", forbid_unknown_fields=True):
    """The tensors came with the call before: these are their digests."""


class CudaBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of `size` bytes on a GPU as `torch.multiprocessing.reductions.reduce_tensor` describes it."""

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
    """The tensors lie one directly behind the other in a buffer on the GPU that rank 0 and the sampler share."""

    buffer: CudaBuffer


Source = Files | SharedMemory | Broadcast | Received | CudaIpc


class WeightUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call's part of an update.

    version: of the weights once the final part is loaded; everything sampled from then on carries it. replaces: the
    version that the trainer knows the sampler to hold; a sampler that holds another refuses. Versions rise, but for a
    sampler that still holds its checkpoint's, 0, which may be given others under the same number. changed: whether
    the weights are known to differ from those they replace; the same bytes are then refused as stale.
    """

    version: Natural
    replaces: Natural
    number: Natural
    final: bool
    changed: bool
    tensors: list[TensorInfo]
    source: Source


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker of a sampler holds after a call. version, digest: of the last weights that it held as a whole; ""
    of those it started with. whole: whether it still holds them. refused: why the call was refused, or ""."""

    version: Natural
    digest: str
    whole: bool
    refused: str = ""


# Made by the thread that imports: msgspec dies when two threads are the first to decode into a type.
_UPDATE = msgspec.json.Decoder(WeightUpdate)


def encode(update: WeightUpdate) -> bytes:
    return msgspec.json.encode(update)


def decode(data: bytes) -> WeightUpdate:
    """Raises msgspec.MsgspecError for anything that is no update."""
    return _UPDATE.decode(data)


def agreement(answers: list[Holding]) -> Holding:
    """What all workers of a sampler hold, by their own words; when they hold different things, nothing whole."""
    first = answers[0]
    refused = next((answer.refused for answer in answers if answer.refused), "")
    alike = dict.fromkeys((answer.version, answer.digest) for answer in answers)
    if len(alike) > 1:
        refused = describe(
            "The workers of one sampler hold different weights",
            got="; ".join(f"version {version}, digest {digest or 'of the checkpoint'}" for version, digest in alike),
            expected="the same on all",
            do="continue the run with --resume, which takes the sampler anew: no one update replaces both",
        ) + (f". One refused: {refused}" if refused else "")
    whole = len(alike) == 1 and all(answer.whole for answer in answers)
    return Holding(min(answer.version for answer in answers), first.digest, whole, refused)


def refusal(holding: Holding) -> WeightSyncError:
    """Why the last part was refused, or nothing can be sampled; and what the sampler does now."""
    if holding.whole:
        return WeightSyncError(f"{holding.refused}. The sampler goes on with version {holding.version}, which it had")
    return WeightSyncError(
        describe(
            holding.refused or "An update was begun and not ended",
            got="parts of two sets of weights",
            expected="those of one version",
            do="send a whole update again, from its first part: until then nothing is sampled",
        )
    )
