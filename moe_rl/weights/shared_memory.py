"""An update through memory that trainer and sampler share: segments without a name, which no process leaves behind.

A segment is a memfd: it lives as long as a process holds its descriptor or a mapping, and shows nowhere in /dev/shm.
The sampler opens it through /proc, so it must run on the same host, under the same user, and see the trainer's
processes.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.digest import info_of
from moe_rl.weights.update import ALIGNMENT, Bucket, MemorySegment, SharedMemory, TensorInfo


class MemoryWay:
    """By shared memory of one host. The sampler is called for each round of buckets; a rank has one segment, which it
    fills again and again."""

    one_call = False

    def __init__(self):
        self._writer = SegmentWriter()

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """As DiskWay.bucket, in place of the bucket before, which the sampler has read."""
        infos = []
        self._writer.clear()
        for name, tensor in tensors:
            infos.append(info_of(name, tensor))
            self._writer.append(tensor)
        return Bucket(infos, self._writer.segment() if infos else None)

    def source(self, buckets: Sequence[Bucket]) -> SharedMemory:
        """As DiskWay.source."""
        return SharedMemory([bucket.place for bucket in buckets if isinstance(bucket.place, MemorySegment)])

    def end(self) -> None:
        """The segment stays until the sender goes."""


class SegmentWriter:
    """A segment that tensors are appended to. It goes with the writer, or before it with `close`.

    Memory that was used before is written several times as fast as what the kernel has yet to find.
    """

    def __init__(self):
        self._descriptor = os.memfd_create("moe_rl-weights", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._end = self._tensors = 0

    def append(self, tensor: Tensor) -> None:
        """Copy a host tensor behind the others. Raises WeightSyncError when there is no memory left."""
        octets = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        self._end += -self._end % ALIGNMENT
        try:
            while octets:
                written = os.pwrite(self._descriptor, octets, self._end)
                octets, self._end = octets[written:], self._end + written
        except OSError as error:
            do = "free memory, or make rollout.weight_bucket_mib smaller"
            message = describe("Weights cannot be written to shared memory", got=error, do=do)
            raise WeightSyncError(message) from error
        self._tensors += 1

    def segment(self) -> MemorySegment:
        """What was appended."""
        return MemorySegment(os.getpid(), self._descriptor, self._end, self._tensors)

    def clear(self) -> None:
        """Begin anew. Only when nobody reads what was written before."""
        self._end = self._tensors = 0


def read_segments(segments: Sequence[MemorySegment], tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor); mapped, not copied: a segment's memory is freed when its last tensor is.

    Raises WeightSyncError for a segment that cannot be opened, or that is not as long as its tensors.
    """
    held = sum(segment.tensors for segment in segments)
    if held != len(tensors):
        raise WeightSyncError(describe("Segments do not hold what was announced", got=held, expected=len(tensors)))
    infos = iter(tensors)
    for segment in segments:
        if not segment.tensors:
            continue
        memory, start = _mapped(segment), 0
        for _ in range(segment.tensors):
            info = next(infos)
            dtype = getattr(torch, info.dtype)
            start += -start % ALIGNMENT
            end = start + math.prod(info.shape) * dtype.itemsize
            if end > segment.size:
                where = f"descriptor {segment.descriptor} of process {segment.pid}"
                got = f"{segment.size} bytes, tensor {info.name} to byte {end}"
                raise WeightSyncError(describe("A segment is shorter than its tensors", where=where, got=got))
            yield info.name, memory[start:end].view(dtype).view(info.shape)
            start = end


def _mapped(segment: MemorySegment) -> Tensor:
    """The bytes of a segment, uint8."""
    where = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Private: writable for torch, but nothing written reaches the trainer.
            mapping = mmap.mmap(descriptor, segment.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            describe(
                "Shared memory of the trainer cannot be mapped",
                where=where,
                got=error,
                expected="a trainer that runs, on this host, under this user",
                do="set rollout.weight_transfer to disk where they share no host",
            )
        ) from error
    return torch.frombuffer(mapping, dtype=torch.uint8)
