"""Reads and appends the manifest of a store: published shards with their digests, one JSON object per line.

{"event":"published","shard":"step7","digest":"<16 hex>","bytes":1234,"records":16,"check":"<16 hex>"}
{"event":"removed","shard":"step7","check":"<16 hex>"}

`check` is the xxh3-64 of the line without `check`. The last line that names a shard counts. A writer holds the file's
lock, appends its line, and only then makes the shard visible. So a shard without a line was not published here, and a
shard whose digest differs from its line was replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moe_rl.trace.files import sync_directory, write_all

MANIFEST = "manifest.jsonl"


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

    def __init__(self, fd: int):
        self._fd = fd
        self._end = os.fstat(fd).st_size

    def append(self, event: str, shard: str, **fields: object) -> None:
        """Append one line and sync it; after an OSError the file is unchanged."""
        line = _line({"event": event, "shard": shard, **fields})
        if self._end and os.pread(self._fd, 1, self._end - 1) != b"\n":
            line = b"\n" + line  # a writer died in the middle of a line
        try:
            write_all(self._fd, line, self._end)
            os.fsync(self._fd)
        except OSError:
            self.undo()
            raise

    def undo(self) -> None:
        """Remove the last appended line."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)


@contextlib.contextmanager
def locked_manifest(root: Path) -> Iterator[ManifestFile]:
    """Open and lock the manifest. Raises OSError."""
    path = root / MANIFEST
    new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if new:
            sync_directory(root)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield ManifestFile(fd)
    finally:
        os.close(fd)


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest. Never raises: unreadable lines are listed as damaged."""
    published: dict[str, Published] = {}
    damaged = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            fields = json.loads(line)
            check = fields.pop("check")
            if _line(fields) != line or check != _check(fields):
                raise ValueError(line)
            event, shard = fields.pop("event"), fields.pop("shard")
            # A name that was removed and published again takes its new place in the order.
            published.pop(shard, None)
            if event == "published":
                published[shard] = Published(shard, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged.append(number)
    return Manifest(published, tuple(damaged))


def _line(fields: dict[str, object]) -> bytes:
    return _dump({**fields, "check": _check(fields)}) + b"\n"


def _check(fields: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(_dump(fields))


def _dump(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii")
