"""The manifest of a store: which shards were published, with their digests. One JSON object a line, only ever appended.

{"event":"published","shard":"step7","digest":"<16 hex>","bytes":1234,"records":16,"check":"<16 hex>"}
{"event":"removed","shard":"step7","check":"<16 hex>"}

`check` is xxh3-64 of the line without it. The last line that names a shard counts. A writer appends its line before the
shard becomes visible and while it holds the file's lock, so a shard in the folder that has no line was not published
here, and one whose digest differs is not the one that was.
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
    """One published shard. bytes: of its file."""

    shard: str
    digest: str
    bytes: int
    records: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """published: the shards that were published and not removed, oldest first. damaged: numbers, from 1, of lines that
    no writer wrote or that were not written to their end; they count for nothing."""

    published: dict[str, Published]
    damaged: tuple[int, ...]


class ManifestFile:
    """The manifest of a local store, open and locked: no other writer publishes or removes meanwhile."""

    def __init__(self, fd: int):
        self._fd = fd
        self._end = os.fstat(fd).st_size

    def append(self, event: str, shard: str, **fields: object) -> None:
        """Add one line and make it durable; on OSError the file is as it was."""
        line = _line({"event": event, "shard": shard, **fields})
        if self._end and os.pread(self._fd, 1, self._end - 1) != b"\n":
            line = b"\n" + line  # a writer died in the middle of its line
        try:
            write_all(self._fd, line, self._end)
            os.fsync(self._fd)
        except OSError:
            self.undo()
            raise

    def undo(self) -> None:
        """Take back what was appended."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)


@contextlib.contextmanager
def locked_manifest(root: Path) -> Iterator[ManifestFile]:
    """Raises OSError."""
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
    """Never raises: what cannot be read is listed as damaged."""
    published: dict[str, Published] = {}
    damaged = []
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            fields = json.loads(line)
            check = fields.pop("check")
            if _line(fields) != line or check != _check(fields):
                raise ValueError(line)
            event, shard = fields.pop("event"), fields.pop("shard")
            # A shard of an earlier life of the name must not keep its place in the order.
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
