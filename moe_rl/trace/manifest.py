"""Reads and writes the manifest of a store: published shards with their digests, one JSON object per line.

{"event":"published","shard":"step7","digest":"<16 hex>","bytes":1234,"records":16,"check":"<16 hex>"}
{"event":"removed","shard":"step7","check":"<16 hex>"}

`check` is the xxh3-64 of the line without `check`. The last line that names a shard counts. A writer holds the file's
lock, appends its line, and only then makes the shard visible. So a shard without a line was not published here, and a
shard whose digest differs from its line was replaced.

The cost of a line does not grow with the lines before it. A reader continues where it stopped. When most lines are
those of removed shards, the file is replaced by one without them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moe_rl.disk import sync
from moe_rl.trace.files import File, create_locked, write_all

MANIFEST = "manifest.jsonl"
# A manifest is replaced when its lines exceed twice the lines it needs by more than this.
_SPARE_LINES = 64
# A writer holds the lock for a few disk writes. A writer that hangs must not block all others forever.
_LOCK_SECONDS = 20.0
LOCK_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Published:
    """Describes one published shard. `bytes` is its file size."""

    shard: str
    digest: str
    bytes: int
    records: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Lists the shards.

    Attributes:
        published: the shards that were published and not removed, oldest first.
        damaged: numbers, from 1, of incomplete or foreign lines, which are ignored.
    """

    published: dict[str, Published]
    damaged: tuple[int, ...]


class ManifestFile:
    """Holds a local store's manifest open and locked, so that no other writer can publish or remove meanwhile."""

    def __init__(self, root: Path, fd: int):
        self._root, self._fd = root, fd
        self._end = os.fstat(fd).st_size

    def append(self, event: str, shards: Sequence[str], **fields: object) -> None:
        """Append a line for each shard and sync them; after an OSError the file is unchanged."""
        lines = b"".join(_line({"event": event, "shard": shard, **fields}) for shard in shards)
        if self._end and os.pread(self._fd, 1, self._end - 1) != b"\n":
            lines = b"\n" + lines  # a writer died in the middle of a line
        try:
            write_all(self._fd, lines, self._end)
            os.fsync(self._fd)
        except OSError:
            self.undo()
            raise

    def undo(self) -> None:
        """Remove the last appended lines."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)

    def compact(self) -> None:
        """Replace the file by one without the lines of removed shards, and hold the new file. Damaged lines stay.

        The new file is complete and on disk before it takes the name. Raises OSError; the old file is then unchanged.
        """
        data = bytearray()
        while more := os.pread(self._fd, 1 << 20, len(data)):
            data += more
        kept: dict[object, bytes] = {}  # by shard, or by the number of a damaged line
        for number, (line, shard, published) in enumerate(_parsed(bytes(data))):
            kept.pop(shard, None)
            if shard is None or published is not None:
                kept[number if shard is None else shard] = line
        new = b"".join(kept.values())
        fd, path = create_locked(self._root, MANIFEST)
        try:
            write_all(fd, new, 0)
            os.fsync(fd)
            os.replace(path, self._root / MANIFEST)
            os.dup2(fd, self._fd, inheritable=False)
            self._end = len(new)
            sync(self._root)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)  # exists only if the replacement failed


@contextlib.contextmanager
def locked_manifest(root: Path) -> Iterator[ManifestFile]:
    """Open and lock the manifest. Raises OSError, including when another process holds the lock for too long."""
    path = root / MANIFEST
    while True:
        new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if new:
                sync(root)
            _lock(fd)
            if _named(path, fd):  # another writer may have replaced the file between the two calls above
                yield ManifestFile(root, fd)
                return
        finally:
            os.close(fd)


def _named(path: Path, fd: int) -> bool:
    """Return whether the open file still has this name.

    The name is opened again, because NFS looks it up anew only then; and there a replaced file that a process has open
    keeps a link.
    """
    try:
        again = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(again))
    finally:
        os.close(again)


def _lock(fd: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                held = f"another process has held the lock of {MANIFEST} for {_LOCK_SECONDS:g} s: it may hang"
                raise OSError(errno.ETIMEDOUT, held) from None
            time.sleep(LOCK_POLL_SECONDS)


class ManifestReader:
    """Holds the content of a manifest, and reads only what was appended. Not thread-safe.

    Attributes:
        published: as in `Manifest`; later reads change it.
        lines: number of lines, damaged ones included.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.published: dict[str, Published] = {}
        self.lines = self._size = self._end = 0
        self._identity: tuple | None = None  # of the file as it was read
        self._damaged: list[int] = []
        self._last = b""  # the last whole line, which ends at `_end`
        self._torn = False  # whether a partial line follows

    def manifest(self) -> Manifest:
        """Return a copy of what was read."""
        return Manifest(dict(self.published), (*self._damaged, *([self.lines] if self._torn else [])))

    @property
    def mostly_removed(self) -> bool:
        """Return whether the file is worth replacing."""
        needed = len(self.published) + len(self._damaged)
        return self.lines > 2 * needed + _SPARE_LINES

    def read(self, file: File | None) -> None:
        """Bring this up to date with an open manifest; None: there is none. Raises TraceError.

        If the file only grew and its last known line is unchanged, earlier lines are not read again: each was checked
        when it was read.
        """
        if file is None:
            self._begin()
        elif file.identity != self._identity:
            size, known = max(0, file.size), len(self._last)
            tail: bytes | None = None
            if known and size > self._size:
                (data,) = file.fetch([(self._end - known, size)])
                tail = bytes(data[known:]) if data[:known] == self._last else None
            if tail is None:
                (data,) = file.fetch([(0, size)])
                self._begin()
                tail = bytes(data)
            self._take(tail)
            self._identity, self._size = file.identity, size

    def _take(self, data: bytes) -> None:
        """Parse what follows the last whole line. A partial line at the end is parsed again when it has grown."""
        self.lines -= self._torn
        whole = data.rfind(b"\n") + 1
        for line, shard, published in _parsed(data[:whole]):
            self.lines += 1
            self._last = line
            if shard is None:
                self._damaged.append(self.lines)
                continue
            # A name that was removed and published again takes its new place in the order.
            self.published.pop(shard, None)
            if published is not None:
                self.published[shard] = published
        self._end += whole
        self._torn = whole < len(data)
        self.lines += self._torn


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest. Never raises: unreadable lines are listed as damaged."""
    reader = ManifestReader()
    reader._take(data)
    return reader.manifest()


def _parsed(data: bytes) -> Iterator[tuple[bytes, str | None, Published | None]]:
    """Yield every line including its line end, the shard that it names, and what was published: None for a removed
    shard. A damaged line yields None for both."""
    for line in data.splitlines(keepends=True):
        try:
            fields = json.loads(line)
            check = fields.pop("check")
            if _line(fields) != line or check != _check(fields):
                raise ValueError(line)
            event, shard = fields.pop("event"), str(fields.pop("shard"))
            yield line, shard, Published(shard, **fields) if event == "published" else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield line, None, None


def _line(fields: dict[str, object]) -> bytes:
    return _dump({**fields, "check": _check(fields)}) + b"\n"


def _check(fields: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(_dump(fields))


def _dump(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")
