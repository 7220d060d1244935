"""Writes the files of a run atomically, and reports a full disk the same way everywhere.

Code that writes a file in another way reports its failure with `refusal`, so that the message names a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_rl.errors import About, DiskError, Problem, describe

# How long a shard may take to be published while nothing is sampled: a disk may sync gigabytes.
PUBLISH_SECONDS = 600.0

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a limit to the size of files is reached",
}


def allow_files() -> int:
    """Let this process open as many files as the system allows it. Returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def is_pointer(file: Path) -> bool:
    """Return whether Git LFS has left a pointer in place of a file, as `git clone` does without it."""
    with open(file, "rb") as stream:
        return stream.read(64).startswith(b"version https://git-lfs")


def refusal(
    error: BaseException,
    what: str,
    path: Path | str,
    *,
    where: About | None = None,
    size: int | None = None,
    do: str = "",
) -> Problem:
    """Describe why a file could not be written: a full disk first, then the file, its size and the free space.

    Args:
        error: the exception that the write raised.
        what: what could not be written, as a clause.
        path: the file.
        where: facts shown instead of the path.
        size: bytes to be written.
        do: what the user can do besides freeing space.
    """
    full, facts, fault = _reason(error, Path(path), size)
    if full:
        what = f"{full}: {what}"
        do = f"free space there, or raise the limit{'; ' if do else ''}{do}"
    return describe(what, where=where or {"file": path}, got=facts, do=do, fault=fault)


def reason(error: BaseException, path: Path) -> str:
    """Describe in half a sentence why a write failed, for a message that lists several failures."""
    full, facts, _ = _reason(error, path, None)
    return f"{full} ({facts})" if full else facts


def _reason(error: BaseException, path: Path, size: int | None) -> tuple[str, str, str]:
    """Return what is full, the facts to report, and the name of the error number if something is full, else ""."""
    cause: BaseException | None = error  # torch's serializer hides the OSError that broke its stream
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    cause = cause or error
    match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
    number = cause.errno if isinstance(cause, OSError) else int(match[1]) if match else None
    full = _FULL.get(number or 0, "")
    facts = [f"{type(cause).__name__}: {cause}"]
    if size is not None:
        facts.append(f"{size:,} bytes to write")
    if full:
        facts.append(_left(path))
    return full, ", ".join(filter(None, facts)), errno.errorcode[number] if number and full else ""


@contextmanager
def writing(what: str, path: Path | str, *, size: int | None = None, do: str = "") -> Iterator[None]:
    """Raise DiskError with `refusal`'s text if the body raises OSError."""
    try:
        yield
    except OSError as error:
        raise DiskError(refusal(error, what, path, size=size, do=do)) from error


def write_whole(path: Path, content: str | bytes, what: str = "", *, synced: bool = True) -> None:
    """Replace a file atomically and sync it to disk. Readers see the old content or the new, even after a power cut.

    Args:
        path: the file to replace. A pipe or device, such as /dev/null, is written to and not replaced.
        content: the new content.
        what: how error messages call the file; default: its name.
        synced: False leaves the syncing to the system. After a power cut the file may then be cut short.

    Raises:
        DiskError: the write failed; the old file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    unfinished = path.with_name(f"{path.name}.tmp")
    with writing(f"{what or path.name} could not be written", path, size=len(data)):
        if path.is_fifo() or path.is_char_device():
            path.write_bytes(data)
            return
        try:
            with unfinished.open("wb", buffering=0) as file:
                write_all(file.fileno(), data)
                if synced:
                    os.fsync(file.fileno())
            unfinished.replace(path)
            if synced:
                sync(path.parent)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()  # a partial file would keep the disk full
            raise


def check_writable(path: Path, option: str) -> None:
    """Raise DiskError if the file that an option names could not be written with `write_whole`."""
    do = "name a file in a folder that exists and that you can write to"
    with writing(f"{option} cannot be written", path, do=do):
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not (path.is_fifo() or path.is_char_device()):
            tempfile.TemporaryFile(dir=path.parent).close()


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON with `write_whole`."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` at the file's current position. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _left(path: Path) -> str:
    """Describe the free space where a file would be written; "" if the system does not report it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        space = os.statvfs(path)
    except OSError:
        return ""
    files = "" if space.f_favail or not space.f_files else ", and no room for another file"
    return f"{space.f_bavail * space.f_frsize:,} bytes free on its disk{files}"
