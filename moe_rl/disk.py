"""Writes the files of a run, so that none is seen half written, and names the file when the disk is full or refuses.

Whoever writes a file in another way says what went wrong by `refusal`, so that a full disk is called that everywhere.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_rl.errors import DiskError, describe

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a limit to the size of files is reached",
}


def refusal(
    error: BaseException, what: str, path: Path | str, *, where: str = "", size: int | None = None, do: str = ""
) -> str:
    """Lay out why a file could not be written: a full disk first, then the file, its size and the space left there.

    what: could not be written. size: bytes that were to be written. where: shown instead of the path. do: what to do
    besides making room.
    """
    full, facts = _reason(error, Path(path), size)
    if full:
        what = f"{full}: {what}"
        do = f"free space there, or raise the limit{'; ' if do else ''}{do}"
    return describe(what, where=where or str(path), got=facts, do=do)


def reason(error: BaseException, path: Path) -> str:
    """The same in half a sentence, for a message of several."""
    full, facts = _reason(error, path, None)
    return f"{full} ({facts})" if full else facts


def _reason(error: BaseException, path: Path, size: int | None) -> tuple[str, str]:
    """What is full, "" if nothing is, and the facts."""
    cause: BaseException | None = error  # torch's serializer, whose stream broke off, hides what the system said
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    cause = cause or error
    told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
    number = cause.errno if isinstance(cause, OSError) else int(told[1]) if told else None
    full = _FULL.get(number or 0, "")
    facts = [f"{type(cause).__name__}: {cause}"]
    if size is not None:
        facts.append(f"{size:,} bytes to write")
    if full:
        facts.append(_left(path))
    return full, ", ".join(filter(None, facts))


@contextmanager
def writing(what: str, path: Path | str, *, size: int | None = None, do: str = "") -> Iterator[None]:
    """Raise DiskError, with `refusal`, where the system refuses something within it."""
    try:
        yield
    except OSError as error:
        raise DiskError(refusal(error, what, path, size=size, do=do)) from error


def write_whole(path: Path, content: str | bytes, what: str = "") -> None:
    """Replace a file in one step: a reader, or a power cut, sees the old or the new one, never a part. Durable on
    return. what: the file is called in the message. Raises DiskError; the old file then is as it was."""
    data = content.encode() if isinstance(content, str) else content
    unfinished = path.with_name(f"{path.name}.tmp")
    with writing(f"{what or path.name} could not be written", path, size=len(data)):
        try:
            with unfinished.open("wb", buffering=0) as file:
                write_all(file.fileno(), data)
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync(path.parent)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()  # what there is of it fills the disk
            raise


def write_all(fd: int, data: bytes) -> None:
    """Write all of it where the file is now. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _left(path: Path) -> str:
    """What is free where a file would be; "" when the system does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        space = os.statvfs(path)
    except OSError:
        return ""
    files = "" if space.f_favail or not space.f_files else ", and no room for another file"
    return f"{space.f_bavail * space.f_frsize:,} bytes free on its disk{files}"
