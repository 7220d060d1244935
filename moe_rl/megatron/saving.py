"""Writes checkpoints: planned and copied during the step, then written to disk and published in the background.

    save      all ranks plan who writes what, and copy their parts to host memory     during the step
    writer    a thread per rank writes, syncs and digests its copies, and hands in    while the run continues
    publish   rank 0's thread, after all hand in, writes metadata, digests, the name  at once, whatever the run does
    poll      the ranks agree on the result                                           after the next sampling

The threads of different ranks use no collectives: these belong to the run, which may hang in one. The threads meet in
the hidden folder, which all ranks see. So a checkpoint whose files are complete gets published even if the run never
continues.

Plan, files and metadata are Megatron's own (its AsyncRequest). Megatron has two ways to run the write in the
background, and neither is used: one forks a process, in which locks held by other threads, such as gloo's, are never
released; the other needs CUDA. A thread has neither problem, and writing files mostly waits outside the interpreter.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
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
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from moe_rl import checkpoint_folder as checkpoints
from moe_rl import messages
from moe_rl.config.training import ParallelConfig
from moe_rl.disk import reason, sync
from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron import checkpoint, rng, world
from moe_rl.megatron.policy import Policy

_LOOK_SECONDS = 0.05


class Checkpoints:
    """Writes the checkpoints of a run into `folder`, one at a time. All ranks call every method but `settle`
    together.

    Attributes:
        parallel: The layout of the ranks.
        keep: How many complete checkpoints to keep.
        asynchronous: Write in the background; otherwise `save` returns when the checkpoint is published.
        published: Called by `poll` for each published checkpoint, with the seconds it took to begin and to write.
        last: Last step of the newest checkpoint that the ranks agree on, or that the run was resumed from; 0 if none.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelConfig,
        *,
        keep: int,
        asynchronous: bool,
        published: Callable[[float], None] = lambda seconds: None,
    ):
        self.folder, self.parallel, self.keep, self.asynchronous = folder, parallel, keep, asynchronous
        self.published, self.last = published, 0
        self._pending: _Pending | None = None

    def save(self, step: int, policy: Policy, state: dict, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Begin the checkpoint after `step` steps, once the previous one is published.

        Args:
            state: JSON values that `load` returns.
            tensors: Tensors of the run for `run_tensors`, equal on all ranks. Both may change once this returns.

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
        gc.freeze()  # Megatron collects garbage twice: with this, only the objects that it creates are searched
        try:
            sharded = checkpoint.sharded(policy, loading=False)
            in_use = _storages(sharded) if self.asynchronous else set()
            request = dist_checkpointing.save(
                sharded,
                str(hidden),
                strategy,
                content_metadata=dict(checkpoint.CONTENT),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        finally:
            gc.unfreeze()
        del sharded  # free what was gathered for planning before the write
        own = {f"rng-rank{rank}.safetensors": rng.state()}
        if rank == 0 and tensors:
            own[checkpoint.RUN_TENSORS] = {name: tensor.clone() for name, tensor in tensors.items()}
        described = {
            **state,
            "step": step,
            "updates": policy.updates,
            "optimizer_step": checkpoint.optimizer_step(policy),
            "layout": checkpoint.layout(self.parallel),
        }
        publish = _Publication(hidden, dist.get_world_size(), described, strategy, self.keep) if rank == 0 else None
        writer = _Writer(request, hidden, own, in_use, rank=rank, publish=publish)
        self._pending = _Pending(step, writer, time.perf_counter() - began)
        writer.start()
        if not self.asynchronous:
            self.finish()

    @property
    def pending(self) -> int | None:
        """Return the last step of the checkpoint that the ranks have not agreed on yet; None if there is none."""
        return None if self._pending is None else self._pending.step

    def steps(self) -> list[int]:
        """Return the last steps of the kept checkpoints and of the pending one."""
        pending = [] if self._pending is None else [self._pending.step]
        return [done for done, _ in checkpoints.complete(self.folder)] + pending

    def poll(self) -> bool:
        """Return whether the pending checkpoint is published, so that another may begin. Does not wait for any disk.

        Raises:
            CheckpointError: A part or the metadata could not be written. Raised on all ranks.
        """
        if self._pending is None:
            return False
        pending, writer = self._pending, self._pending.writer
        under_way, failed = world.all_reduce([not writer.done.is_set(), writer.failure != ""])
        if failed:
            raise self._failed(pending.step, world.gather(writer.failure, str))
        if under_way:
            return False
        self._pending, self.last = None, pending.step
        self.published(pending.seconds + writer.seconds)
        return True

    def finish(self) -> bool:
        """Wait until every rank has written its part and rank 0 has published the checkpoint, then `poll`."""
        if self._pending is None:
            return False
        writer = self._pending.writer
        writer.written.wait()
        (failed,) = world.all_reduce([writer.failure != ""])
        if not failed:
            writer.done.wait()
        return self.poll()

    def settle(self, seconds: float) -> None:
        """Give the pending checkpoint up to `seconds` to be published before this rank ends with an error.

        It waits for files only, not for other ranks.
        """
        if self._pending is None:
            return
        limit, writer = time.monotonic() + seconds, self._pending.writer
        final = self.folder / checkpoints.name_of(self._pending.step)
        while time.monotonic() < limit and not writer.failure and not final.exists():
            time.sleep(_LOOK_SECONDS)

    def _begin(self, step: int) -> Path:
        """Return the folder to write into, which rank 0 creates."""
        hidden = failure = ""
        if dist.get_rank() == 0:
            try:
                hidden = str(checkpoints.begin(self.folder, step))
            except OSError as error:
                failure = reason(error, self.folder)
        hidden, failure = world.broadcast((hidden, failure), tuple[str, str])
        if failure:
            raise self._failed(step, [failure])
        return Path(hidden)

    def _failed(self, step: int, failures: list[str]) -> CheckpointError:
        """Return the error to raise. `failures` has one entry per rank, "" for a rank without failure."""
        if self._pending is not None:
            self._pending.writer.give_up()
            self._pending = None
        return CheckpointError(
            describe(
                "a checkpoint could not be written",
                where={"folder": self.folder / checkpoints.name_of(step)},
                got="; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure),
                do=f"fix the cause, then {checkpoints.to_go_on(self.folder)}",
            )
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """Holds a checkpoint that is being written. `seconds` is the time it took to begin."""

    step: int
    writer: _Writer
    seconds: float


@dataclass(frozen=True, slots=True)
class _Lying:
    """Says where a tensor, or a piece of one, is stored: Megatron's WriteResult in plain values."""

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    size: int
    file: str
    at: int
    length: int

    @classmethod
    def of(cls, written: WriteResult) -> _Lying:
        index, place = written.index, written.storage_data
        offset = None if index.offset is None else tuple(index.offset)
        return cls(
            index.fqn, offset, index.index, written.size_in_bytes, place.relative_path, place.offset, place.length
        )

    def result(self) -> WriteResult:
        index = MetadataIndex(self.name, self.offset, self.index)
        return WriteResult(index, self.size, _StorageInfo(self.file, self.at, self.length))


@dataclass(frozen=True, slots=True)
class _HandedIn:
    """Holds what a rank hands in: the digest of each of its files, and the items in Megatron's files."""

    digests: dict[str, str]
    items: list[_Lying]


class _Planning(TorchDistSaveShardedStrategy):
    """Extends Megatron's save strategy by access to the arguments of its last step, which would need all ranks at
    once."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


@dataclass(frozen=True, slots=True)
class _Publication:
    """Publishes a checkpoint on rank 0 once all parts are handed in. `described` is state.json without the digests."""

    hidden: Path
    ranks: int
    described: dict
    strategy: _Planning
    keep: int

    def due(self) -> bool:
        return bool(checkpoints.handed_in(self.hidden, self.ranks))

    def __call__(self) -> None:
        """Write the metadata and state.json, and rename the folder to the checkpoint's name. Raises OSError."""
        files = checkpoints.handed_in(self.hidden, self.ranks)
        parts = [messages.decode(file.read_bytes(), _HandedIn) for file in files]
        self.strategy.writer.finish(self.strategy.metadata, [[item.result() for item in part.items] for part in parts])
        save_config(CheckpointingConfig(self.strategy.backend, self.strategy.version), str(self.hidden))
        for file in files:
            file.unlink()
        digests = {name: digest for part in parts for name, digest in part.digests.items()}
        for path in sorted(self.hidden.iterdir()):
            if path.name not in digests:  # Megatron's metadata, which no rank handed in
                sync(path)
                digests[path.name] = checkpoint.digest(path)
        state = self.hidden / checkpoint.STATE
        state.write_text(checkpoint.sealed(self.described | {"files": dict(sorted(digests.items()))}))
        sync(state)
        checkpoints.publish(self.hidden, self.described["step"], keep=self.keep)


class _Writer(threading.Thread):
    """Runs as the thread that writes this rank's part, and on rank 0 publishes all parts.

    Attributes:
        written: Set when this rank's part is handed in or has failed.
        done: Set at the same time; on rank 0 when publishing is finished or has failed.
        failure: What went wrong; "" if nothing did.
        seconds: Time from start to `done`.
    """

    def __init__(
        self,
        request: AsyncRequest,
        hidden: Path,
        own: dict[str, dict[str, torch.Tensor]],
        in_use: set[int],
        *,
        rank: int,
        publish: _Publication | None = None,
    ):
        """Args: `own` are files that are not Megatron's; `in_use` are addresses of storages that the run keeps writing
        to."""
        super().__init__(name="checkpoint", daemon=True)
        self.hidden, self.own, self.rank, self._publish = hidden, own, rank, publish
        self.written, self.done, self.failure, self.seconds = threading.Event(), threading.Event(), "", 0.0
        self._given_up = threading.Event()
        # Megatron gives nothing to write to a rank that holds no first replica of any tensor.
        buckets = request.async_fn_args[1] if request.async_fn_args else []
        self.transforms = request.async_fn.args[0] if buckets else []
        self.buckets = [(path, key, (blobs, _on_host(tensors, in_use))) for path, key, (blobs, tensors) in buckets]

    def run(self) -> None:
        began = time.perf_counter()
        try:
            checkpoints.hand_in(self.hidden, self.rank, messages.encode(self._write()))
            self.buckets = []
            self.written.set()
            if self._publish is not None:
                while not self._publish.due():
                    if self._given_up.wait(_LOOK_SECONDS):
                        return
                self._publish()
        except BaseException as error:  # any error that ends the writer must be reported
            self.failure = reason(error, self.hidden)
        finally:
            self.buckets, self.seconds = [], time.perf_counter() - began
            self.written.set()
            self.done.set()

    def give_up(self) -> None:
        """Stop waiting for other ranks' parts, and do not publish."""
        self._given_up.set()

    def _write(self) -> _HandedIn:
        items = []
        for at, bucket in enumerate(self.buckets):
            # Megatron's async_fn calls this too, but would report only the class of an error.
            _, outcome = FileSystemWriterAsync.write_preloaded_data(self.transforms, at, bucket, None, None, True)
            if isinstance(outcome, Exception):
                raise outcome
            items += [_Lying.of(one) for one in outcome]
        for name, tensors in self.own.items():
            save_file(tensors, self.hidden / name)
            sync(self.hidden / name)
        names = [Path(path).name for path, *_ in self.buckets] + list(self.own)
        return _HandedIn({name: checkpoint.digest(self.hidden / name) for name in names}, items)


def _on_host(tensors: list, in_use: set[int]) -> list:
    """Return (Megatron's item, its tensor on the host in memory that nobody else writes to) for each tensor.

    On a CPU most of these tensors are copies already: Megatron copies each part of a larger storage. They are removed
    from `tensors`, because Megatron would keep its own until the checkpoint is published.
    """
    taken = []
    for at, (item, tensor) in enumerate(tensors):
        host = tensor.cpu()
        taken.append((item, host.clone() if host.untyped_storage().data_ptr() in in_use else host))
        tensors[at] = None
    return taken


def _storages(sharded: dict) -> set[int]:
    """Return the addresses of the storages of all tensors in a sharded state dict."""
    tensors = (one.data for one in nested_values(sharded) if torch.is_tensor(one.data))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
