"""Writes checkpoints: planned and copied during the step, then written to disk and published in the background.

All ranks plan who writes what, and copy their parts to host memory. The threads of `behind.py` then write, sync and
digest the copies; rank 0's adds metadata, digests and the name.

Plan, files and metadata are Megatron's own (its AsyncRequest). Megatron has two ways to run the write in the
background, and neither is used: one forks a process, in which locks held by other threads, such as gloo's, are never
released; the other needs CUDA. A thread has neither problem, and writing files mostly waits outside the interpreter.

Also writes the weights of a run as Hugging Face checkpoints, in the background.

During the step, the ranks that share a tensor gather it, one weight at a time, and the first of them copies it to host
memory. The threads of `behind.py` then write the copies.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from moe_rl import checkpoint_folder as checkpoints
from moe_rl import messages
from moe_rl.config.training import ParallelConfig
from moe_rl.disk import sync
from moe_rl.errors import ConfigError
from moe_rl.megatron import checkpoint, hf_files, hf_map, rng, world
from moe_rl.megatron.behind import StepFolders
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import ModelFacts


class Exports(StepFolders):
    """Writes the weights of a run into `folder`, one at a time. All ranks call every method but `settle` together.

    The files are those that `moe-rl export` writes from the checkpoint of the same step, in the same layout.

    Attributes:
        model: Folder of the checkpoint from which config, tokenizer and untrained layers are copied.
        dtype: Precision of the exported weights.
    """

    what = "exported weights"

    def __init__(
        self,
        folder: Path,
        facts: ModelFacts,
        model: Path,
        dtype: torch.dtype,
        *,
        keep: int | None,
        resume_from: Path,
        published: Callable[[float], None] = lambda seconds: None,
    ):
        super().__init__(folder, keep=keep, published=published, resume_from=resume_from)
        self.facts, self.model, self.dtype = facts, model, dtype

    def save(self, step: int, policy: Policy) -> None:
        """Begin to write the weights after `step` steps, once the previous ones are published. Weights that already
        exist are not written again.

        Raises:
            CheckpointError: The previous weights could not be written, or these not begun. Raised on all ranks.
        """
        self.finish()
        rank, began = dist.get_rank(), time.perf_counter()
        there = rank == 0 and step in dict(checkpoints.complete(self.folder))
        if world.broadcast(there, bool):
            return
        hidden = self._begin(step)
        dense, experts = world.holds_first_replica()
        whole = hf_map.export(map(unwrap, policy.chunks), self.facts, dense=dense, experts=experts)
        host = deque(hf_files.on_host(whole, self.dtype))

        def write() -> bytes:
            hf_files.write_part(hidden, rank, _taken(host))
            if rank == 0:
                source = hf_files.CheckpointReader(self.model, self.facts)
                hf_files.write_untrained(hidden, self.facts, source, self.dtype)
            return b""

        def complete(payloads: list[bytes]) -> None:
            if problems := hf_files.write_index(hidden, self.facts):
                raise ConfigError(problems)

        self._start(step, hidden, write, complete, began)


def _taken(host: deque[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and drop each from the queue."""
    while host:
        yield host.popleft()


class Checkpoints(StepFolders):
    """Writes the checkpoints of a run into `folder`, one at a time. All ranks call every method but `settle`
    together.

    Attributes:
        parallel: The layout of the ranks.
        asynchronous: Write in the background; otherwise `save` returns when the checkpoint is published.
    """

    what = "a checkpoint"

    def __init__(
        self,
        folder: Path,
        parallel: ParallelConfig,
        *,
        keep: int,
        asynchronous: bool,
        published: Callable[[float], None] = lambda seconds: None,
    ):
        super().__init__(folder, keep=keep, published=published)
        self.parallel, self.asynchronous, self._pinned = parallel, asynchronous, _Pinned()

    def save(
        self,
        step: int,
        policy: Policy,
        state: dict,
        tensors: dict[str, torch.Tensor] | None = None,
        best: int | None = None,
    ) -> None:
        """Begin the checkpoint after `step` steps, once the previous one is published.

        Args:
            state: JSON values that `load` returns.
            tensors: Tensors of the run for `run_tensors`, equal on all ranks. Both may change once this returns.
            best: Step of the best checkpoint, which is kept besides the newest ones.

        Raises:
            CheckpointError: The previous checkpoint could not be written, or this one not begun. Raised on all ranks.
        """
        self.finish()
        rank, began = dist.get_rank(), time.perf_counter()
        hidden = self._begin(step)
        strategy = _Planning()
        # Megatron would start a process for this queue. Nothing here reads the queue, and the process would outlive a
        # killed rank.
        filesystem_async._results_queue = queue.Queue()
        sharded = checkpoint.sharded(policy, loading=False)
        sums = checkpoint.totals(checkpoint.optimizer_sums(sharded))
        in_use = _storages(sharded) if self.asynchronous else set()
        request = dist_checkpointing.save(
            sharded,
            str(hidden),
            FullyParallelSaveStrategyWrapper(strategy),  # each replica writes a share of what all hold
            content_metadata=dict(checkpoint.CONTENT),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        del sharded  # or copies in it would lie beside those of the request
        files = {f"rng-rank{rank}.safetensors": rng.state()}
        if rank == 0 and tensors:
            files[checkpoint.RUN_TENSORS] = {name: tensor.clone() for name, tensor in tensors.items()}
        described = {
            **state,
            "step": step,
            "updates": policy.updates,
            "optimizer_step": checkpoint.optimizer_step(policy),
            "optimizer": sums,
            "layout": checkpoint.layout(self.parallel),
        }
        part = _RankPart(request, hidden, files, in_use, self._pinned)
        self._start(step, hidden, part, _Completion(hidden, described, strategy), began, best=best)
        if not self.asynchronous:
            self.finish()

    def steps(self) -> list[int]:
        """Return the last steps of the kept checkpoints and of the pending one."""
        pending = [] if self._pending is None else [self._pending.step]
        return [done for done, _ in checkpoints.complete(self.folder)] + pending


@dataclass(frozen=True, slots=True)
class _Lying:
    """Says where a tensor or a piece of it is stored: Megatron's WriteResult in plain values."""

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    size: int
    file: str
    at: int
    length: int
    digest: str

    @classmethod
    def of(cls, written: WriteResult, folder: Path) -> _Lying:
        index, place = written.index, written.storage_data
        offset = None if index.offset is None else tuple(index.offset)
        file, begin, length = place.relative_path, place.offset, place.length
        digest = checkpoint.digest(folder / file, begin, begin + length)
        return cls(index.fqn, offset, index.index, written.size_in_bytes, file, begin, length, digest)

    def result(self) -> WriteResult:
        index = MetadataIndex(self.name, self.offset, self.index)
        return WriteResult(index, self.size, _StorageInfo(self.file, self.at, self.length))


@dataclass(frozen=True, slots=True)
class _HandedIn:
    """Holds what a rank hands in: the digests of its own files, and the items in Megatron's files."""

    digests: dict[str, str]
    items: list[_Lying]


class _Planning(TorchDistSaveShardedStrategy):
    """Extends Megatron's save strategy: it keeps the arguments of the last step, which would need all ranks at once."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


@dataclass(frozen=True, slots=True)
class _Completion:
    """Completes a checkpoint on rank 0. `described` is state.json without the digests."""

    hidden: Path
    described: dict
    strategy: _Planning

    def __call__(self, payloads: list[bytes]) -> None:
        """Write the metadata and state.json. Raises OSError."""
        parts = [messages.decode(payload, _HandedIn) for payload in payloads]
        self.strategy.writer.finish(self.strategy.metadata, [[item.result() for item in part.items] for part in parts])
        save_config(CheckpointingConfig(self.strategy.backend, self.strategy.version), str(self.hidden))
        digests = {name: digest for part in parts for name, digest in part.digests.items()}
        pieces: dict[str, dict[str, str]] = {}
        for item in (item for part in parts for item in part.items):
            pieces.setdefault(item.file, {})[f"{item.at}-{item.at + item.length}"] = item.digest
        for path in sorted(self.hidden.iterdir()):
            # Megatron's metadata, which no rank handed in
            if path.name not in digests.keys() | pieces.keys() and path.suffix != ".part":
                sync(path)
                digests[path.name] = checkpoint.digest(path)
        state, files = self.hidden / checkpoint.STATE, dict(sorted(digests.items()))
        state.write_text(checkpoint.sealed(self.described | {"files": files, "pieces": pieces}))
        sync(state)


class _RankPart:
    """Holds a rank's part of a checkpoint on the host. A call writes and syncs it, and returns a `_HandedIn`."""

    def __init__(
        self,
        request: AsyncRequest,
        hidden: Path,
        own: dict[str, dict[str, torch.Tensor]],
        in_use: set[int],
        pinned: _Pinned,
    ):
        """Args: `own` are files that are not Megatron's; `in_use` are addresses of storages that the run keeps writing
        to; `pinned` takes what is on a GPU."""
        pinned.reuse()
        self.hidden, self.own = hidden, own
        # Megatron gives nothing to a rank that writes no tensor.
        buckets = request.async_fn_args[1] if request.async_fn_args else []
        self.transforms = request.async_fn.args[0] if buckets else []
        self.buckets = [
            (path, key, (blobs, _on_host(tensors, in_use, pinned))) for path, key, (blobs, tensors) in buckets
        ]
        world.await_device()

    def __call__(self) -> bytes:
        items = []
        for index, bucket in enumerate(self.buckets):
            # Megatron's async_fn calls this too, but would report only the class of an error.
            _, outcome = FileSystemWriterAsync.write_preloaded_data(self.transforms, index, bucket, None, None, True)
            if isinstance(outcome, Exception):
                raise outcome
            items += [_Lying.of(written, self.hidden) for written in outcome]
        for name, tensors in self.own.items():
            save_file(tensors, self.hidden / name)
            sync(self.hidden / name)
        return messages.encode(_HandedIn({name: checkpoint.digest(self.hidden / name) for name in self.own}, items))


class _Pinned:
    """Copies tensors of a GPU into pinned memory, one save at a time.

    It keeps this memory for the next save: to pin it takes longer than to copy. It packs the tensors into blocks,
    because torch rounds each piece of pinned memory up to a power of two.
    """

    BLOCK = 1 << 30  # bytes

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self.reuse()

    def reuse(self) -> None:
        """Begin a save. Nobody may still need the copies of the last."""
        self._block = self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is complete when the GPU has done its work so far. It has a storage of its own."""
        size = -(-tensor.nbytes // 64) * 64
        while self._block < len(self._blocks) and self._used + size > self._blocks[self._block].nbytes:
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(torch.empty(max(size, self.BLOCK), dtype=torch.uint8, pin_memory=True))
        octets = self._blocks[self._block].numpy()
        host = torch.frombuffer(octets, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += size
        return host.view(tensor.shape).copy_(tensor, non_blocking=True)


def _on_host(tensors: list, in_use: set[int], pinned: _Pinned) -> list:
    """Return (Megatron's item, its tensor on the host in memory that nobody else writes to) for each tensor. The caller
    waits for the copies from a GPU.

    On a CPU most of these tensors are copies already: Megatron copies each part of a larger storage. They are removed
    from `tensors`, because Megatron would keep its own until the checkpoint is published.
    """
    taken = []
    for index, (item, tensor) in enumerate(tensors):
        if tensor.device.type != "cpu":
            tensor = pinned.copy(tensor)
        elif tensor.untyped_storage().data_ptr() in in_use:
            tensor = tensor.clone()
        taken.append((item, tensor))
        tensors[index] = None
    return taken


def _storages(sharded: dict) -> set[int]:
    """Return the addresses of the storages of all tensors in a sharded state dict."""
    tensors = (entry.data for entry in nested_values(sharded) if torch.is_tensor(entry.data))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
