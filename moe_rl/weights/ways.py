"""Updates by disk or by shared memory: a rank puts its tensors, bucket by bucket, where the sampler finds them.

A rank holds one bucket of its own and one tensor at a time; the sampler maps what it reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.digest import dtype_name, tensor_digest
from moe_rl.weights.shared_disk import read_parts, write_part
from moe_rl.weights.shared_memory import SegmentWriter, read_segments
from moe_rl.weights.update import Files, Segment, SharedMemory, Source, TensorInfo, WeightUpdate


class Bucket(msgspec.Struct, frozen=True):
    """Tensors of one rank, and where they lie: a path, a segment, or nowhere when there are none."""

    tensors: list[TensorInfo]
    place: str | Segment | None


def info_of(name: str, tensor: Tensor) -> TensorInfo:
    """A tensor as it is announced, with the digest of what lies in this process's memory."""
    return TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(name, tensor))


def as_announced(infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, for a reader that cuts a run of bytes by their announcement alone. Raises WeightSyncError at the
    first that is another than was announced, or lacks, or is one too many."""
    nothing = ("nothing", torch.empty(0))
    for info, (name, tensor) in zip_longest(infos, tensors, fillvalue=nothing):
        got = (name, dtype_name(tensor.dtype), tuple(tensor.shape))
        expected = (info.name, info.dtype, info.shape) if isinstance(info, TensorInfo) else "nothing"
        if got != expected:
            message = "Another tensor would be sent than was announced"
            raise WeightSyncError(describe(message, got=got, expected=expected))
        yield name, tensor


class Disk:
    """By safetensors files in a folder that is shared. The sampler is called once, when all of them are written: it
    checks everything before it loads anything."""

    one_call = True

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank, self._written = folder / "update", rank, 0

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written = 0

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Take tensors; they are in place when it returns."""
        held = dict(tensors)
        if not held:
            return Bucket([], None)
        path = self._folder / f"rank{self._rank:05d}-{self._written:05d}.safetensors"
        self._written += 1
        infos = [info_of(name, tensor) for name, tensor in held.items()]
        write_part(path, held)
        return Bucket(infos, str(path.absolute()))

    def source(self, buckets: Sequence[Bucket]) -> Source:
        """Where the sampler finds the tensors of the buckets of all ranks, in their order."""
        return Files([bucket.place for bucket in buckets])

    def end(self) -> None:
        """The update is over on all ranks."""
        if self._rank == 0:
            shutil.rmtree(self._folder)


class Shared:
    """By shared memory of one host. The sampler is called for each round of buckets; a rank has one segment, which it
    fills again and again."""

    one_call = False

    def __init__(self):
        self._writer = SegmentWriter()

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """As Disk.bucket, in place of the bucket before, which the sampler has read."""
        infos = []
        self._writer.clear()
        for name, tensor in tensors:
            infos.append(info_of(name, tensor))
            self._writer.append(tensor)
        return Bucket(infos, self._writer.segment() if infos else None)

    def source(self, buckets: Sequence[Bucket]) -> Source:
        """As Disk.source."""
        return SharedMemory([bucket.place for bucket in buckets])

    def end(self) -> None:
        """The segment stays until the sender goes."""


def placed(update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of a part that lies somewhere, mapped. Raises WeightSyncError where it cannot be read."""
    if isinstance(update.source, Files):
        return read_parts([Path(path) for path in update.source.paths])
    return read_segments(update.source.segments, update.tensors)
