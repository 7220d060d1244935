"""Sends an update through shared memory, in nameless segments that cannot outlive the processes.

A segment is a memfd: it lives as long as a process holds its descriptor or a mapping, and does not appear in /dev/shm.
The sampler opens it through /proc. It must therefore run on the same host, as the same user, and see the trainer's
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

from moe_rl.errors import About, WeightSyncError, describe
from moe_rl.weights.digest import info_of
from moe_rl.weights.update import ALIGNMENT, Bucket, MemorySegment, SharedMemory, TensorInfo


class MemoryWay:
    """Sends tensors through the shared memory of one host.

    The sampler is called for each round of buckets. A rank has one segment and refills it in each round.
    """

    one_call, on_host = False, True

    def __init__(self):
        self._writer = SegmentWriter()

    def begin(self) -> None:
        """Do nothing: no preparation is needed."""

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Copy the tensors into the segment, replacing the previous bucket, which the sampler has read."""
        infos = []
        self._writer.clear()
        for name, tensor in tensors:
            infos.append(info_of(name, tensor))
            self._writer.append(tensor)
        return Bucket(infos, self._writer.segment() if infos else None)

    def spread(self, buckets: Sequence[Bucket]) -> None:
        """Do nothing: the sampler can read all segments."""

    def source(self, buckets: Sequence[Bucket]) -> SharedMemory:
        """Tell the sampler where to find the buckets of all ranks, in order."""
        return SharedMemory([bucket.place for bucket in buckets if isinstance(bucket.place, MemorySegment)])

    def end(self) -> None:
        """Do nothing: the segment stays until the sender is gone."""


class SegmentWriter:
    """Appends tensors to one segment. The segment is closed with `close`, or when the writer is freed.

    Refilling the same memory is several times as fast as writing to fresh pages.
    """

    def __init__(self):
        self._descriptor = os.memfd_create("moe_rl-weights", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._end = self._tensors = 0

    def append(self, tensor: Tensor) -> None:
        """Append a copy of a host tensor. Raises WeightSyncError when no memory is left."""
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
        """Describe what was appended."""
        return MemorySegment(os.getpid(), self._descriptor, self._end, self._tensors)

    def clear(self) -> None:
        """Start again at offset 0. Call it only when the old content is no longer read."""
        self._end = self._tensors = 0


def read_segments(segments: Sequence[MemorySegment], tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor); mapped, not copied: a segment's memory is freed with its last tensor.

    Raises:
        WeightSyncError: a segment cannot be opened, or is shorter than its tensors.
    """
    held = sum(segment.tensors for segment in segments)
    if held != len(tensors):
        raise WeightSyncError(
            "The segments hold too many or too few tensors", got=held, expected=len(tensors), fault="count"
        )
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
                where: About = {"tensor": info.name, "pid": segment.pid, "file": f"descriptor {segment.descriptor}"}
                got = f"{segment.size} bytes, a tensor to byte {end}"
                raise WeightSyncError("A segment is shorter than its tensors", where=where, got=got, fault="short")
            yield info.name, memory[start:end].view(dtype).view(info.shape)
            start = end


def _mapped(segment: MemorySegment) -> Tensor:
    """Map a segment as a tensor of bytes, uint8."""
    file = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A private mapping: torch may write to it, but writes do not reach the trainer.
            mapping = mmap.mmap(descriptor, segment.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            "Shared memory of the trainer cannot be mapped",
            where={"file": file},
            got=error,
            expected="a running trainer on this host, of the same user",
            do="set rollout.weight_transfer to disk if trainer and sampler run on different hosts",
            fault="unmapped",
        ) from error
    return torch.frombuffer(mapping, dtype=torch.uint8)
