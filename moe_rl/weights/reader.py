"""The parts of an update as they come, whatever the way: read, confirmed, then handed over to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_rl.weights.intake import Intake
from moe_rl.weights.shared_disk import read_parts
from moe_rl.weights.shared_memory import read_segments
from moe_rl.weights.update import Broadcast, CudaIpc, Files, Received, SharedMemory, WeightUpdate

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

    from moe_rl.weights.broadcast import Receiver


class Reader:
    """One worker's. load: is given the tensors of a part, or of a bucket that was broadcast, and may keep them. rank:
    of the worker among those of its sampler. on_tensor: called after each that was confirmed.

    It knows no engine. It imports the code of vLLM's own ways when the first such part comes.
    """

    def __init__(
        self,
        intake: Intake,
        load: Callable[[dict[str, Tensor]], None],
        device: torch.device,
        *,
        rank: int = 0,
        on_tensor: Callable[[], None] = lambda: None,
    ):
        self._intake, self._give, self._device = intake, load, device
        self._rank, self._on_tensor = rank, on_tensor
        self._link: Receiver | None = None
        self._importer: PackedBufferImporter | None = None

    def take(self, update: WeightUpdate) -> None:
        """Work on one part. Raises WeightSyncError for one that is refused; nothing of it is loaded then, except that a
        broadcast is loaded bucket by bucket, and the part after it tells whether it was right."""
        self._intake.admit(update)
        if isinstance(update.source, Broadcast):
            self._receive(update, update.source)
        elif isinstance(update.source, Received):
            self._intake.confirm_received()
        else:
            source = update.source
            tensors = self._unpacked(update, source) if isinstance(source, CudaIpc) else dict(placed(update))
            if isinstance(update.source, SharedMemory) and not (update.final and update.number == 0):
                # A layer that is not complete yet is loaded when the trainer has written there again.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self._intake.confirm(tensors, self._on_tensor)
            self._load(tensors)

    def release(self) -> None:
        """No more parts of this update will come: let go of the trainer's memory."""
        if self._importer is not None:
            self._importer.close()

    def close(self) -> None:
        """Leave the trainer as well. Whoever still waits in a broadcast gets an error."""
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
            self._intake.received(tensors, self._on_tensor)
            self._load(dict(tensors))

        if self._link is None or self._link.source != source:
            self.close()
            self._link = Receiver(source, source.first_rank + self._rank, self._device)
        try:
            self._link.receive(update.tensors, take)
        except BaseException:
            self.close()  # what is still on its way belongs to nothing
            raise

    def _load(self, tensors: dict[str, Tensor]) -> None:
        self._intake.touch()
        self._give(tensors)


def placed(update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of a part that lies somewhere, mapped. Raises WeightSyncError where it cannot be read."""
    match update.source:
        case Files(paths):
            return read_parts([Path(path) for path in paths])
        case SharedMemory(segments):
            return read_segments(segments, update.tensors)
    raise TypeError(f"{update.source!r} is no place")
