"""How a checkpoint is written: planned and copied in the step, put on disk behind it, published in a later one.

    save    the ranks plan who writes what, and each copies its part to host memory     in the step
    writer  a thread of each rank writes, syncs and digests the copies                  while the run goes on
    poll    once every rank's files are written: metadata, digests, the name            after the next sampling

Plan, files and metadata are Megatron's own (its AsyncRequest). What runs the write is not: of Megatron's callers one
forks a process whose other threads, gloo's among them, hold locks that nobody in the fork will release; the other needs
CUDA. A thread shares neither problem; writing files, it mostly waits outside of the interpreter.
"""

from __future__ import annotations

import gc
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from safetensors.torch import save_file

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron import checkpoint, rng, world
from moe_rl.megatron.policy import Policy


class Checkpoints:
    """The checkpoints that a run writes into `folder`, one at a time. All ranks make every call together.

    parallel: the layout of the ranks. keep: complete ones that stay. asynchronous: write behind the run; else `save`
    returns when the checkpoint is published. published: told of each that is, the steps done and the seconds it took to
    begin, to write and to publish.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelConfig,
        *,
        keep: int,
        asynchronous: bool,
        published: Callable[[int, float], None] = lambda step, seconds: None,
    ):
        self.folder, self.parallel, self.keep, self.asynchronous = folder, parallel, keep, asynchronous
        self.published = published
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
        # Results of another process or save must not be taken for this one's.
        filesystem_async._results_queue = queue.Queue()
        gc.freeze()  # Megatron collects garbage twice: only what it makes itself need be searched
        try:
            sharded = checkpoint.sharded(policy, loading=False)
            in_use = _storages(sharded) if self.asynchronous else set()
            request = dist_checkpointing.save(
                sharded,
                str(hidden),
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
        writer = _Writer(request, hidden, own, in_use)
        self._pending = _Pending(step, hidden, json.dumps(described), request, writer, time.perf_counter() - began)
        if self.asynchronous:
            writer.start()
        else:
            writer.run()
            self.finish()

    @property
    def pending(self) -> int | None:
        """Steps done of the checkpoint that is not published yet."""
        return None if self._pending is None else self._pending.step

    def steps(self) -> list[int]:
        """Steps done of the checkpoints that are kept and of the one under way."""
        pending = [] if self._pending is None else [self._pending.step]
        return [done for done, _ in checkpoints.complete(self.folder)] + pending

    def poll(self) -> bool:
        """Publish the pending checkpoint if every rank has written its part; whether it did. Waits for nobody's disk.

        Raises CheckpointError on all ranks when a part could not be written; on rank 0 alone, whose end the others
        hear of, when Megatron's metadata could not.
        """
        if self._pending is None:
            return False
        writer = self._pending.writer
        writing, failed = world.all_reduce([not writer.written.is_set(), writer.failure != ""])
        if failed:
            raise self._failed(self._pending.step, world.gather(writer.failure, str))
        if writing:
            return False
        pending, began = self._pending, time.perf_counter()
        self._publish(pending)
        self._pending = None
        self.published(pending.step, pending.seconds + writer.seconds + time.perf_counter() - began)
        return True

    def finish(self) -> bool:
        """As `poll`, once every rank has written its part."""
        if self._pending is None:
            return False
        self._pending.writer.written.wait()
        return self.poll()

    def _begin(self, step: int) -> Path:
        """The folder to write into, which rank 0 makes."""
        hidden = failure = ""
        if dist.get_rank() == 0:
            try:
                hidden = str(checkpoints.begin(self.folder, step))
            except OSError as error:
                failure = _told(error)
        hidden, failure = world.broadcast((hidden, failure), tuple[str, str])
        if failure:
            raise self._failed(step, [failure])
        return Path(hidden)

    def _publish(self, pending: _Pending) -> None:
        try:
            for finalize in pending.request.finalize_fns:
                finalize()
        except OSError as error:
            # Only rank 0 writes here. The others wait in Megatron's broadcast behind it: they cannot be told.
            raise self._failed(pending.step, [_told(error)]) from error
        digests = world.gather(pending.writer.digests, dict[str, str])
        failure = ""
        if dist.get_rank() == 0:
            try:
                files = {name: digest for one in digests for name, digest in one.items()}
                for path in sorted(pending.hidden.iterdir()):
                    if path.name not in files:  # Megatron's metadata, which is of no rank
                        checkpoints.sync(path)
                        files[path.name] = checkpoint.digest(path)
                state = json.loads(pending.described) | {"files": dict(sorted(files.items()))}
                (pending.hidden / checkpoint.STATE).write_text(checkpoint.sealed(state))
                checkpoints.sync(pending.hidden / checkpoint.STATE)
                checkpoints.publish(pending.hidden, pending.step, keep=self.keep)
            except OSError as error:
                failure = _told(error)
        if failure := world.broadcast(failure, str):
            raise self._failed(pending.step, [failure])

    def _failed(self, step: int, failures: list[str]) -> CheckpointError:
        """What to raise. failures: of the ranks, "" of one that has none."""
        self._pending = None
        run, last = self.folder.parent, checkpoints.complete(self.folder)
        stands = f"--resume {run} goes on from the last one, after step {last[-1][0]}" if last else ""
        return CheckpointError(
            describe(
                "a checkpoint could not be written",
                where=str(self.folder / checkpoints.name_of(step)),
                got="; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure),
                do=f"mend the disk; {stands or f'there is no other: --resume {run} --step 0 begins the run again'}",
            )
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that is being written. described: state.json but for the digests. seconds: that it took to begin."""

    step: int
    hidden: Path
    described: str
    request: AsyncRequest
    writer: _Writer
    seconds: float


class _Writer(threading.Thread):
    """Writes this rank's part. `written` is set at the end, then `failure` says what went wrong, if anything did,
    `digests` what each file holds, `seconds` how long it took."""

    def __init__(self, request: AsyncRequest, hidden: Path, own: dict[str, dict[str, torch.Tensor]], in_use: set[int]):
        """own: the files that are not Megatron's. in_use: addresses of storages that the run goes on writing to."""
        super().__init__(name="checkpoint", daemon=True)
        self.hidden, self.own = hidden, own
        self.written, self.failure, self.seconds = threading.Event(), "", 0.0
        self.digests: dict[str, str] = {}
        # Megatron has nothing for a rank to write that holds no first replica of any tensor.
        given: tuple[int, list, Any] = request.async_fn_args or (0, [], None)
        _, buckets, self.results = given
        self.transforms = request.async_fn.args[0] if buckets else []
        self.buckets = [(path, key, (blobs, _on_host(tensors, in_use))) for path, key, (blobs, tensors) in buckets]

    def run(self) -> None:
        began = time.perf_counter()
        try:
            written = {}
            for at, bucket in enumerate(self.buckets):
                # What Megatron's async_fn calls too, but of what goes wrong it would tell no more than the class.
                _, outcome = FileSystemWriterAsync.write_preloaded_data(self.transforms, at, bucket, None, None, True)
                if isinstance(outcome, Exception):
                    raise outcome
                written[at] = outcome
            if self.buckets:
                self.results.put(written)  # which Megatron's finalisation collects
            for name, tensors in self.own.items():
                save_file(tensors, self.hidden / name)
                checkpoints.sync(self.hidden / name)
            names = [Path(path).name for path, *_ in self.buckets] + list(self.own)
            self.digests = {name: checkpoint.digest(self.hidden / name) for name in names}
        except BaseException as error:  # noqa: BLE001 - whatever ends a writer must be heard of
            self.failure = _told(error)
        finally:
            self.buckets, self.seconds = [], time.perf_counter() - began
            self.written.set()


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


def _told(error: BaseException) -> str:
    """What went wrong, in words: of torch's serializer, whose stream broke off, what the system said."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return f"{type(cause or error).__name__}: {cause or error}"
