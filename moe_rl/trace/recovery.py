"""Recovers the complete records of an unsealed file from a dead writer into a new shard."""

from __future__ import annotations

import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from moe_rl.errors import TraceError
from moe_rl.trace.files import TMP, LocalFile
from moe_rl.trace.frame import Frame, FrameSection, checksum, head_size, parse_head
from moe_rl.trace.library import read_header
from moe_rl.trace.primitives import unpack_ints
from moe_rl.trace.shard import ShardHeader
from moe_rl.trace.writer import ShardWriter
from moe_rl.types import RouteRef

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Recovered:
    """Reports a recovery.

    Attributes:
        records: references to the new shard's records, in the order of writing.
        left: bytes of the file that were not recovered.
        fault: why recovery stopped; "" if it reached the end of the file.
    """

    path: Path
    records: tuple[RouteRef, ...]
    left: int
    fault: str


def recover(path: Path | str, name: str) -> Recovered:
    """Publish the records of an unsealed shard file, up to the first damaged one, as shard `name` in the same folder.

    Every checksum is verified. A file has no marks of aborted records before it is sealed, so the new records have
    none. The old file is not changed; collect_garbage() removes it.

    Args:
        path: a hidden .tmp file of a store.
        name: name of the new shard.

    Raises:
        TraceError: the file's header is damaged, its writer is still alive, or the new shard cannot be written.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise TraceError(
            "file to recover cannot be opened", where={"file": path}, got=error.strerror, fault="absent file"
        ) from error
    file = LocalFile(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TraceError(
                "file to recover is still being written",
                where={"file": path},
                do="let its writer publish it",
                fault="unfinished",
            ) from error
        try:
            header, _, offset = read_header(file)
        except TraceError as error:
            raise TraceError(
                "file cannot be recovered", where={"file": path}, got=str(error), fault="damaged file"
            ) from error
        end = offset + header.frame_bytes if header.sealed else file.size
        refs, fault = [], ""
        with ShardWriter(
            path.parent,
            name,
            header.spec,
            layers=header.layers,
            layer_group=header.layer_group,
            token_block=header.token_block,
            keep_order=header.keep_order,
        ) as writer:
            while offset < end:
                try:
                    frame, data = _frame(file, header, offset, end)
                    refs.append(writer.adopt(frame, data))
                except TraceError as error:
                    if writer.closed:  # writing the new shard failed
                        raise
                    fault = str(error)
                    break
                offset += frame.size
            published = writer.publish()
    finally:
        file.close()
    return Recovered(published, tuple(refs), file.size - offset, fault)


def unsealed(root: Path) -> dict[Path, str]:
    """Return the files that hold unpublished shards of the store at `root`, and the names of these shards."""
    pattern = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}{re.escape(TMP)}")
    return {path: match[1] for path in root.glob(f".*{TMP}") if (match := pattern.fullmatch(path.name))}


def recover_shard(root: Path, name: str, seconds: float) -> bool:
    """Publish what a dead writer left of shard `name` in the store at `root`, of its parts and of its pipeline stages,
    under the same names. Does nothing where nothing can be recovered: a reader then finds no such shard.

    Args:
        seconds: how long to wait for a writer to die. A living one keeps its file.

    Returns:
        Whether no file of it is left.
    """
    deadline, left = time.monotonic() + seconds, False
    for path, whole in unsealed(root).items():
        while whole == name or whole.startswith(f"{name}."):
            try:
                recover(path, whole)
                path.unlink(missing_ok=True)  # its lock is free again, so a collector may have taken it
                break
            except TraceError as error:
                if error.message.fault != "unfinished" or time.monotonic() > deadline:
                    left = True
                    break
            time.sleep(_POLL_SECONDS)
    return not left


def _frame(file: LocalFile, header: ShardHeader, offset: int, end: int) -> tuple[Frame, bytes]:
    """Read the frame at `offset` and check all of it. Raises TraceError."""
    (start,) = file.fetch([(offset, min(offset + 14, end))])
    size = head_size(start)
    if offset + size > end:
        raise TraceError("the file ends within a frame's header")
    (head,) = file.fetch([(offset, offset + size)])
    frame = parse_head(header, head)
    if offset + frame.size > end:
        raise TraceError("the file ends within a frame")
    (data,) = file.fetch([(offset, offset + frame.size)])
    block = header.token_block
    for number, section in enumerate(frame.tokens):
        rows = min(block, frame.own_rows - number * block)
        _check(checksum(unpack_ints(section.kind, section.of(data), rows)), section)
    aux = [array.section for array in frame.aux]
    for section in [*frame.chunks, *([frame.counts] if frame.counts else []), *aux]:
        _check(checksum(section.of(data)), section)
    return frame, bytes(data)


def _check(got: int, section: FrameSection) -> None:
    if got != section.checksum:
        raise TraceError(f"the checksum of a frame's bytes {section.start} to {section.start + section.size} differs")
