"""Writes values to files that appear complete or not at all, and notices any later change.

A file is the line `<head> <xxh3-128 of the rest>`, followed by the value in the encoding of `messages.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from moe_rl import messages
from moe_rl.disk import write_whole, writing
from moe_rl.errors import DataError


def save(path: Path, head: str, value: object, what: str, *, synced: bool = True) -> None:
    """Write a value. Creates the folder.

    Args:
        head: names the kind of file and the version of its format.
        what: the file's name in error messages, such as "a step's rollouts".
        synced: as in `disk.write_whole`. `load` refuses a file that was cut short.

    Raises:
        DiskError: the write failed; an old file is unchanged.
    """
    with writing(f"the folder for {what} could not be created", path.parent):
        path.parent.mkdir(exist_ok=True)
    payload = messages.encode(value)
    write_whole(path, _first_line(head, payload) + b"\n" + payload, what, synced=synced)


def load[T](path: Path, head: str, kind: type[T], what: str, do: str) -> T:
    """Read the value that `save` wrote.

    Args:
        do: what the user can do about a damaged file.

    Raises:
        DataError: The file is missing, cut short or changed.
    """
    try:
        line, newline, payload = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DataError(f"{what} were not kept", where={"file": path}, got=error.strerror, fault="absent") from error
    if not newline or line != _first_line(head, payload):
        raise DataError(
            f"{what} are damaged",
            where={"file": path},
            got=repr(line[:60]),
            expected=repr(_first_line(head, payload)),
            do=do,
            fault="damaged",
        )
    try:
        return messages.decode(payload, kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(f"{what} were written by another version of moe_rl", where={"file": path}, got=error) from error


def _first_line(head: str, payload: bytes) -> bytes:
    return f"{head} {xxhash.xxh3_128_hexdigest(payload)}".encode()
