"""Reads byte ranges of a store's files, by pread or fsspec's cat_ranges, and writes files durably.

A write is complete and on disk when it returns; otherwise it raises OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.disk import sync
from moe_rl.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Buffer  # Python 3.12

# Adjacent ranges are read together, up to this size, so that memory use does not grow with the file.
_READ = 8 << 20
# Bytes requested from a remote store at once.
_REMOTE = 64 << 20

TMP = ".tmp"

Range = tuple[int, int]


class LocalFolder:
    """Opens files in a local folder."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def open(self, name: str) -> LocalFile:
        """Open a file. Raises OSError if it does not exist."""
        # O_NONBLOCK: a pipe in place of a file must not hang the reader.
        return LocalFile(os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


class LocalFile:
    """Reads without a memory map: if the file is truncated meanwhile, this raises an error instead of SIGBUS."""

    def __init__(self, fd: int):
        self._fd = fd
        status = os.fstat(fd)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else -1
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def fetch(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        for run in _runs(ranges):
            start, end = run[0][0], max(end for _, end in run)
            data = memoryview(self._read(start, end - start))
            for first, last in run:
                yield data[first - start : last - start]

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            while len(data) < size:
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    raise TraceError("file ends too early", got=f"{len(data)} bytes at {offset}", expected=size)
                data += more
        except (OSError, MemoryError) as error:
            raise TraceError(f"bytes {offset} to {offset + size} cannot be read ({error!r})") from error
        return data


class RemoteFolder:
    """Reads files in a folder that fsspec knows by URL; it cannot write."""

    def __init__(self, url: str):
        self._url = url
        try:
            from fsspec.core import url_to_fs  # not needed where stores are local folders

            self._fs, self._path = url_to_fs(url)
        except Exception as error:  # the scheme is unknown or its package is missing; some file systems connect here
            raise TraceError(
                "store cannot be opened",
                where={"folder": url},
                got=error,
                do="install the package of the URL's scheme, or correct the URL",
            ) from error

    def __str__(self) -> str:
        return self._url

    def exists(self) -> bool:
        return self._names() is not None

    def names(self) -> list[str]:
        return self._names() or []

    def open(self, name: str) -> RemoteFile:
        """Open a file. Raises OSError if it does not exist."""
        return RemoteFile(self._fs, f"{self._path.rstrip('/')}/{name}")

    def _names(self) -> list[str] | None:
        """Return the names of the files; None if there is no folder. Raises TraceError."""
        try:
            # fsspec caches listings, but another process may have published since.
            self._fs.invalidate_cache(self._path)
            paths = self._fs.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every file system raises its own errors
            raise TraceError("store cannot be listed", where={"folder": self._url}, got=repr(error)) from error
        # A file lists itself.
        return None if paths == [self._path] else [path.rsplit("/", 1)[-1] for path in paths]


class RemoteFile:
    def __init__(self, fs: Any, path: str):
        self._fs, self._path = fs, path
        info = fs.info(path)
        self.size = info["size"] if info["type"] == "file" else -1
        # File systems describe a version differently (etag, mtime, created, ...), so all of their info is used.
        self.identity = (path, str(info))

    def fetch(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        runs, size = [], 0
        for run in _runs(ranges):
            runs.append(run)
            size += max(end for _, end in run) - run[0][0]
            if size >= _REMOTE:
                yield from self._read(runs)
                runs, size = [], 0
        yield from self._read(runs)

    def close(self) -> None:
        pass

    def _read(self, runs: list[list[Range]]) -> Iterator[memoryview]:
        spans = [(run[0][0], max(end for _, end in run)) for run in runs]
        asked = [span for span in spans if span[0] < span[1]]  # not every file system accepts an empty range
        starts, ends = [start for start, _ in asked], [end for _, end in asked]
        try:
            pieces = iter(self._fs.cat_ranges([self._path] * len(asked), starts, ends, on_error="raise"))
        except Exception as error:  # every file system raises its own errors
            raise TraceError(f"{self._path} cannot be read ({error!r})") from error
        for run, (start, end) in zip(runs, spans, strict=True):
            data = next(pieces) if start < end else b""
            if len(data) != end - start:
                raise TraceError("file ends too early", got=f"{len(data)} bytes at {start}", expected=end - start)
            for first, last in run:
                yield memoryview(data)[first - start : last - start]


File = LocalFile | RemoteFile
"""An open file. `identity` differs after the file is replaced or changed; `size` is in bytes. `fetch` yields the bytes
of each [start, end), sorted by start, and raises TraceError."""


def _runs(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Group ranges that touch or overlap."""
    run: list[Range] = []
    for start, end in ranges:
        if run and (start > run[-1][1] or end - run[0][0] > _READ):
            yield run
            run = []
        run.append((start, end))
    if run:
        yield run


def write_all(fd: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    if view.nbytes:  # cast() refuses an empty view of several dimensions
        left = view.cast("B")
        while left:
            done = os.pwrite(fd, left, offset)
            left, offset = left[done:], offset + done


def create_locked(root: Path, name: str) -> tuple[int, Path]:
    """Create a hidden file, locked while this process lives, so that a collector can tell it from a dead writer's
    file."""
    while True:
        path = root / f".{name}.{secrets.token_hex(4)}{TMP}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A collector may have removed the file between the two calls above.
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
        sync(root.parent)
