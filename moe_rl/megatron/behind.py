"""Writes folders of all ranks' files in the background: checkpoints, and exported weights.

    start     each rank has copied its part to host memory                            during the step
    writer    a thread per rank writes its part, and hands it in                      while the run continues
    publish   rank 0's thread, after all hand in, completes the folder and names it   at once, whatever the run does
    poll      the ranks agree on the result                                           after the next sampling

The threads of different ranks use no collectives: these belong to the run, which may hang in one. The threads meet in
the hidden folder, which all ranks see. So a folder whose files are complete gets published even if the run never
continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.disk import reason
from moe_rl.errors import CheckpointError
from moe_rl.megatron import world
from moe_rl.whereabouts import HERE

_LOOK_SECONDS, _SIZE_SECONDS = 0.05, 2.0


class StepFolders:
    """Writes folders `step-<n>` into `folder`, one at a time. All ranks call every method but `settle` together.

    Attributes:
        keep: How many complete folders to keep; None keeps all.
        published: Called by `poll` for each published folder, with the seconds it took to begin and to write.
        last: Step of the newest folder that the ranks agree on, or that the run was resumed from; 0 if none.
    """

    what = "a folder"  # how errors name such a folder

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None,
        published: Callable[[float], None] = lambda seconds: None,
        resume_from: Path | None = None,
    ):
        """Args: `resume_from` is the folder of the checkpoints that errors suggest to resume from; None means
        `folder`."""
        self.folder, self.keep, self.published, self.last = folder, keep, published, 0
        self._resume_from = resume_from or folder
        self._pending: _Pending | None = None

    @property
    def pending(self) -> int | None:
        """Return the step whose folder the ranks have not yet agreed on; None if there is none."""
        return None if self._pending is None else self._pending.step

    def poll(self) -> bool:
        """Return whether the pending folder is published, so that another may begin. Does not wait for any disk.

        Raises:
            CheckpointError: A part could not be written, or the folder not completed. Raised on all ranks.
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
        """Wait until every rank has written its part and rank 0 has published the folder, then `poll`."""
        if self._pending is None:
            return False
        writer = self._pending.writer
        writer.wait(writer.written)
        (failed,) = world.all_reduce([writer.failure != ""])
        if not failed:
            writer.wait(writer.done)
        return self.poll()

    def settle(self, seconds: float) -> None:
        """Give the pending folder up to `seconds` to be published before this rank ends with an error.

        It waits for files only, not for other ranks.
        """
        if self._pending is None:
            return
        limit, writer = time.monotonic() + seconds, self._pending.writer
        final = self.folder / checkpoints.name_of(self._pending.step)
        while time.monotonic() < limit and not writer.failure and not final.exists():
            time.sleep(_LOOK_SECONDS)

    def _begin(self, step: int) -> Path:
        """Return the hidden folder to write into, which rank 0 creates."""
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

    def _start(
        self,
        step: int,
        hidden: Path,
        write: Callable[[], bytes],
        complete: Callable[[list[bytes]], None],
        began: float,
        best: int | None = None,
    ) -> None:
        """Start to write into the folder that `_begin` made.

        Args:
            write: Writes and syncs this rank's files, and returns what rank 0 needs to know about them.
            complete: Adds on rank 0 what is still missing, given what the ranks returned, in rank order.
            began: When the preparation began, by time.perf_counter.
            best: Step of the best folder, which is kept besides the newest ones.
        """
        rank, publish = dist.get_rank(), None
        if rank == 0:
            publish = _Publication(hidden, step, dist.get_world_size(), self.keep, best, complete)
        writer = Writer(hidden, write, rank=rank, publish=publish)
        self._pending = _Pending(step, writer, time.perf_counter() - began)
        writer.start()

    def _failed(self, step: int, failures: list[str]) -> CheckpointError:
        """Return the error to raise. `failures` has one entry per rank, "" for a rank without failure."""
        if self._pending is not None:
            self._pending.writer.give_up()
            self._pending = None
        return CheckpointError(
            f"{self.what} could not be written",
            where={"folder": self.folder / checkpoints.name_of(step)},
            got="; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure),
            do=f"fix the cause, then {checkpoints.to_go_on(self._resume_from)}",
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """Holds a folder that is being written. `seconds` is the time it took to begin."""

    step: int
    writer: Writer
    seconds: float


@dataclass(frozen=True, slots=True)
class _Publication:
    """Publishes a folder on rank 0 once all parts are handed in."""

    hidden: Path
    step: int
    ranks: int
    keep: int | None
    best: int | None
    complete: Callable[[list[bytes]], None]

    def due(self) -> bool:
        return bool(checkpoints.handed_in(self.hidden, self.ranks))

    def __call__(self) -> None:
        """Complete the folder, and rename it to its final name. Raises OSError."""
        files = checkpoints.handed_in(self.hidden, self.ranks)
        self.complete([file.read_bytes() for file in files])
        for file in files:
            file.unlink()
        checkpoints.publish(self.hidden, self.step, keep=self.keep, best=self.best)


class Writer(threading.Thread):
    """Runs as the thread that writes this rank's part, and on rank 0 publishes all parts.

    Attributes:
        written: Set when this rank's part is handed in or has failed.
        done: Set at the same time; on rank 0 when publishing is finished or has failed.
        failure: What went wrong; "" if nothing did.
        seconds: Time from start to `done`.
    """

    def __init__(self, hidden: Path, write: Callable[[], bytes], *, rank: int, publish: _Publication | None = None):
        """Args: see `StepFolders._start`."""
        super().__init__(name="behind", daemon=True)
        self.hidden, self.rank, self._publish = hidden, rank, publish
        self.written, self.done, self.failure, self.seconds = threading.Event(), threading.Event(), "", 0.0
        self._given_up = threading.Event()
        self._write: Callable[[], bytes] | None = write

    def run(self) -> None:
        began, write = time.perf_counter(), self._write
        assert write is not None
        self._write = None  # what it holds can be freed once it is written
        try:
            payload = write()
            del write
            checkpoints.hand_in(self.hidden, self.rank, payload)
            self.written.set()
            if self._publish is not None:
                while not self._publish.due():
                    if self._given_up.wait(_LOOK_SECONDS):
                        return
                self._publish()
        except BaseException as error:  # any error that ends the writer must be reported
            self.failure = reason(error, self.hidden)
        finally:
            self.seconds = time.perf_counter() - began
            self.written.set()
            self.done.set()

    def wait(self, event: threading.Event) -> None:
        """Wait for `written` or `done`. While the files grow, this rank moves: a slow disk is no hang."""
        before = -1
        while not event.wait(_SIZE_SECONDS):
            size = 0
            with suppress(OSError):  # rank 0 may be giving the folder its name
                size = sum(file.stat().st_size for file in self.hidden.iterdir())
            if size != before:
                before = size
                HERE.leave()

    def give_up(self) -> None:
        """Stop waiting for other ranks' parts, and do not publish."""
        self._given_up.set()
