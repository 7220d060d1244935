"""Writes that are complete and durable, or an OSError."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

TMP = ".tmp"


def write_all(fd: int, data, at: int) -> None:
    view = memoryview(data)
    if view.nbytes:  # cast() refuses an empty view of several dimensions
        left = view.cast("B")
        while left:
            done = os.pwrite(fd, left, at)
            left, at = left[done:], at + done


def create_locked(root: Path, name: str) -> tuple[int, Path]:
    """A new hidden file, locked while this process lives: so a collector tells it from a dead writer's."""
    while True:
        path = root / f".{name}.{secrets.token_hex(4)}{TMP}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A collector may have taken the file between the two calls above.
            if os.fstat(fd).st_nlink:
                return fd, path
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(fd)


def make_directory(root: Path) -> None:
    if not root.is_dir():
        make_directory(root.parent)
        root.mkdir(exist_ok=True)
        sync_directory(root.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
