"""Reads the parts of an update by any transport, has them confirmed, and passes them on to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_rl.models.peft import PREFIX
from moe_rl.weights.digest import stored_dtype
from moe_rl.weights.intake import Intake
from moe_rl.weights.shared_disk import read_parts
from moe_rl.weights.shared_memory import read_segments
from moe_rl.weights.update import Broadcast, CudaIpc, Files, Merge, Received, SharedMemory, WeightUpdate

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

    from moe_rl.weights.broadcast import Receiver


_BYTES = 1 << 28
"""Bytes of tensors that are made before they are confirmed and loaded."""


def merged(
    checkpoint: Path, merge: Merge, adapters: Mapping[str, Tensor], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield all tensors of `merge`, some at a time: W + scale * B A, computed in float64 and rounded once.

    This is the arithmetic of the trainer's export, so the bits are the same.

    Args:
        checkpoint: folder of the sampler's checkpoint.
        adapters: A [rank, inputs] and B [outputs, rank] under the names of `peft`.
        device: where the tensors are made.

    Raises:
        WeightSyncError: a file of the checkpoint is damaged.
    """
    infos, train = {info.name: info for info in merge.tensors}, getattr(torch, merge.dtype)
    some: dict[str, Tensor] = {}
    for name, stored in read_parts(sorted(checkpoint.glob("*.safetensors"))):
        if name not in infos:  # a layer or a buffer that is not trained
            continue
        weight = stored.to(device).to(stored_dtype(name, train))
        module = PREFIX + name.removesuffix(".weight")
        if (a := adapters.get(f"{module}.lora_A.weight")) is not None:
            b = adapters[f"{module}.lora_B.weight"]
            weight = (weight.double() + merge.scale * (b.to(device).double() @ a.to(device).double())).to(weight.dtype)
        some[name] = weight.to(getattr(torch, infos[name].dtype)).contiguous()
        if sum(tensor.nbytes for tensor in some.values()) >= _BYTES:
            yield some
            some = {}
    if some:
        yield some


class Reader:
    """Reads updates in one worker. It does not depend on the engine; vLLM's transports are imported on first use.

    Args:
        intake: checks the parts.
        checkpoint: folder of the sampler's checkpoint.
        load: called with the tensors of a part, or of a broadcast bucket; it may keep them.
        device: where the worker's tensors live.
        rank: the worker's rank among the workers of its sampler.
        on_tensor: called after each confirmed tensor.
        before_load: called with the tensors before `load` is.
    """

    def __init__(
        self,
        intake: Intake,
        checkpoint: Path,
        load: Callable[[dict[str, Tensor]], None],
        device: torch.device,
        *,
        rank: int = 0,
        on_tensor: Callable[[], None] = lambda: None,
        before_load: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    ):
        self._before_load = before_load
        self._intake, self._checkpoint, self._give, self._device = intake, checkpoint, load, device
        self._adapters: dict[str, Tensor] = {}
        self._rank, self.on_tensor = rank, on_tensor
        self._link: Receiver | None = None
        self._importer: PackedBufferImporter | None = None

    def take(self, update: WeightUpdate) -> None:
        """Read, confirm and load one part.

        Raises:
            WeightSyncError: the part is refused. Nothing of it has been loaded, unless it is a broadcast, which is
                loaded bucket by bucket and confirmed by the part after it. Where adapters are sent, they are confirmed
                first, and what they make is confirmed and loaded bucket by bucket.
        """
        self._intake.admit(update)
        if isinstance(update.source, Broadcast):
            self._receive(update, update.source)
        elif isinstance(update.source, Received):
            self._intake.confirm_received()
        else:
            source = update.source
            tensors = self._unpacked(update, source) if isinstance(source, CudaIpc) else dict(placed(update))
            if isinstance(update.source, SharedMemory) and not (update.final and update.number == 0):
                # vLLM loads a layer when it is complete. By then the trainer may have overwritten the segment.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self._intake.confirm(tensors, self.on_tensor)
            self._load(tensors)
        if update.final and self._intake.merge is not None:
            for tensors in merged(self._checkpoint, self._intake.merge, self._adapters, self._device):
                self._intake.confirm_merged(tensors, self.on_tensor)
                self._into_model(tensors)

    def release(self) -> None:
        """Release the trainer's memory: this update has no more parts."""
        self._adapters = {}
        if self._importer is not None:
            self._importer.close()

    def close(self) -> None:
        """Also leave the broadcast's groups. A peer that still waits in a broadcast gets an error."""
        self.release()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _unpacked(self, update: WeightUpdate, source: CudaIpc) -> dict[str, Tensor]:
        from moe_rl.weights import cuda_ipc

        if self._importer is None:
            self._importer = cuda_ipc.PackedBufferImporter()
        return dict(cuda_ipc.unpacked(source, update.tensors, self._device, self._importer))

    def _receive(self, update: WeightUpdate, source: Broadcast) -> None:
        from moe_rl.weights.broadcast import Receiver

        def take(tensors: list[tuple[str, Tensor]]) -> None:
            self._intake.received(tensors, self.on_tensor)
            self._load(dict(tensors))

        if self._link is None or not self._link.reaches(source):
            self.close()
            self._link = Receiver(source, source.first_rank + self._rank, self._device)
        try:
            self._link.receive(source, update.tensors, take)
        except BaseException:
            self.close()  # bytes still in flight belong to no update
            raise

    def _load(self, tensors: dict[str, Tensor]) -> None:
        if self._intake.merge is not None:
            self._adapters |= tensors
        else:
            self._into_model(tensors)

    def _into_model(self, tensors: dict[str, Tensor]) -> None:
        self._intake.touch()
        self._before_load(tensors)
        self._give(tensors)


def placed(update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, mapped tensor) of a part in files or shared memory. Raises WeightSyncError if it cannot be read."""
    match update.source:
        case Files(paths):
            return read_parts([Path(path) for path in paths])
        case SharedMemory(segments):
            return read_segments(segments, update.tensors)
    raise TypeError(f"{update.source!r} is no place")
