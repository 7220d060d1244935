"""How a checkpoint is written: planned and copied in the step, put on disk and published behind it.

    save      the ranks plan who writes what, and each copies its part to host memory    in the step
    writer    a thread of each rank writes, syncs and digests the copies, and hands in   while the run goes on
    publish   rank 0's thread, once all have: metadata, digests, the name                at once, whatever the run does
    poll      the ranks agree on what became of it                                       after the next sampling

The threads of different ranks make no collective: those belong to the run, which may hang in one. They meet in the
hidden folder, which all ranks see. So a checkpoint whose files are whole is one, also when the run never goes on.

Plan, files and metadata are Megatron's own (its AsyncRequest). What runs the write is not: of Megatron's callers one
forks a process whose other threads, gloo's among them, hold locks that nobody in the fork will release; the other needs
CUDA. A thread shares neither problem; writing files, it mostly waits outside of the interpreter.
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
    """The checkpoints that a run writes into `folder`, one at a time. All ranks make every call but `settle` together.

    parallel: the layout of the ranks. keep: complete ones that stay. asynchronous: write behind the run; else `save`
    returns when the checkpoint is published. published: told by `poll` of each that is, the seconds it took to begin
    and to write. last: steps done of the newest one that the ranks agree on, as of which the run goes on; 0: none.
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
        """Begin the checkpoint after `step` steps, once the one before is published.

        state: JSON values to give back on load. tensors: of the run, equal on all ranks, for `run_tensors`. Either may
        change once this returns. Raises CheckpointError on all ranks when the one before could not be written, or this
        one not begun.
        """
        self.finish()
        rank, began = dist.get_rank(), time.perf_counter()
        hidden = self._begin(step)
        strategy = _Planning()
        # Megatron would start a process to hold a queue, which nothing here reads and which outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()
        gc.freeze()  # Megatron collects garbage twice: only what it makes itself need be searched
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
        del sharded  # what was gathered for it is not needed beside what is written
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
        """Steps done of the checkpoint that the ranks have not agreed on yet."""
        return None if self._pending is None else self._pending.step

    def steps(self) -> list[int]:
        """Steps done of the checkpoints that are kept and of the one under way."""
        pending = [] if self._pending is None else [self._pending.step]
        return [done for done, _ in checkpoints.complete(self.folder)] + pending

    def poll(self) -> bool:
        """Whether the pending checkpoint is published; then another may begin. Waits for nobody's disk.

        Raises CheckpointError on all ranks when a part, or the metadata, could not be written.
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
        """As `poll`, once every rank has written its part and rank 0 has published them."""
        if self._pending is None:
            return False
        writer = self._pending.writer
        writer.written.wait()
        (failed,) = world.all_reduce([writer.failure != ""])
        if not failed:
            writer.done.wait()
        return self.poll()

    def settle(self, seconds: float) -> None:
        """Let the checkpoint under way be published before this rank ends with an error, for so long at most. Waits
        for no rank, only for files."""
        if self._pending is None:
            return
        limit, writer = time.monotonic() + seconds, self._pending.writer
        final = self.folder / checkpoints.name_of(self._pending.step)
        while time.monotonic() < limit and not writer.failure and not final.exists():
            time.sleep(_LOOK_SECONDS)

    def _begin(self, step: int) -> Path:
        """The folder to write into, which rank 0 makes."""
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
        """What to raise. failures: of the ranks, "" of one that has none."""
        if self._pending is not None:
            self._pending.writer.give_up()
            self._pending = None
        return CheckpointError(
            describe(
                "a checkpoint could not be written",
                where=str(self.folder / checkpoints.name_of(step)),
                got="; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure),
                do=f"mend that; then {checkpoints.to_go_on(self.folder)}",
            )
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that is being written. seconds: that it took to begin."""

    step: int
    writer: _Writer
    seconds: float


@dataclass(frozen=True, slots=True)
class _Lying:
    """Where a tensor, or a piece of one, lies: Megatron's WriteResult in plain values."""

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
    """What a rank hands in: the digest of each of its files, and what Megatron's hold."""

    digests: dict[str, str]
    items: list[_Lying]


class _Planning(TorchDistSaveShardedStrategy):
    """Megatron's way to save, which shows what its own last step would take: that step needs all ranks at once."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


@dataclass(frozen=True, slots=True)
class _Publication:
    """What rank 0 does once all parts are handed in. described: state.json but for the digests."""

    hidden: Path
    ranks: int
    described: dict
    strategy: _Planning
    keep: int

    def due(self) -> bool:
        return bool(checkpoints.handed_in(self.hidden, self.ranks))

    def __call__(self) -> None:
        """Write the metadata and state.json, and give the checkpoint its name. Raises OSError."""
        files = checkpoints.handed_in(self.hidden, self.ranks)
        parts = [messages.decode(file.read_bytes(), _HandedIn) for file in files]
        self.strategy.writer.finish(self.strategy.metadata, [[item.result() for item in part.items] for part in parts])
        save_config(CheckpointingConfig(self.strategy.backend, self.strategy.version), str(self.hidden))
        for file in files:
            file.unlink()
        digests = {name: digest for part in parts for name, digest in part.digests.items()}
        for path in sorted(self.hidden.iterdir()):
            if path.name not in digests:  # Megatron's metadata, which is of no rank
                sync(path)
                digests[path.name] = checkpoint.digest(path)
        state = self.hidden / checkpoint.STATE
        state.write_text(checkpoint.sealed(self.described | {"files": dict(sorted(digests.items()))}))
        sync(state)
        checkpoints.publish(self.hidden, self.described["step"], keep=self.keep)


class _Writer(threading.Thread):
    """Writes this rank's part, then on rank 0 publishes all of them.

    `written` is set when the part is handed in, or was not. `done` then, or where this rank publishes, when that is
    done, or was not. `failure` says what went wrong, if anything did, `seconds` how long it took.
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
        """own: the files that are not Megatron's. in_use: addresses of storages that the run goes on writing to."""
        super().__init__(name="checkpoint", daemon=True)
        self.hidden, self.own, self.rank, self._publish = hidden, own, rank, publish
        self.written, self.done, self.failure, self.seconds = threading.Event(), threading.Event(), "", 0.0
        self._given_up = threading.Event()
        # Megatron has nothing for a rank to write that holds no first replica of any tensor.
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
        except BaseException as error:  # noqa: BLE001 - whatever ends a writer must be heard of
            self.failure = reason(error, self.hidden)
        finally:
            self.buckets, self.seconds = [], time.perf_counter() - began
            self.written.set()
            self.done.set()

    def give_up(self) -> None:
        """Publish nothing that has not been begun to be."""
        self._given_up.set()

    def _write(self) -> _HandedIn:
        items = []
        for at, bucket in enumerate(self.buckets):
            # What Megatron's async_fn calls too, but of what goes wrong it would tell no more than the class.
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
    """(what Megatron calls it, tensor on the host that nobody else writes to). On a CPU most of what Megatron gives are
    copies already: it makes one of each part of a larger storage.

    They are taken out of the list: Megatron would keep its own until the checkpoint is published.
    """
    taken = []
    for at, (item, tensor) in enumerate(tensors):
        host = tensor.cpu()
        taken.append((item, host.clone() if host.untyped_storage().data_ptr() in in_use else host))
        tensors[at] = None
    return taken


def _storages(sharded: dict) -> set[int]:
    """Addresses of the storages of all tensors in a sharded state dict."""
    tensors = (one.data for one in nested_values(sharded) if torch.is_tensor(one.data))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
