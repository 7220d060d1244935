"""Finds records: opens shards, verifies them, and follows a record to the records that it continues."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_rl.errors import About, TraceError
from moe_rl.trace.files import File, LocalFolder, Range, RemoteFolder
from moe_rl.trace.frame import Frame, Parent, parse_head
from moe_rl.trace.manifest import MANIFEST, ManifestReader
from moe_rl.trace.record import check_name
from moe_rl.trace.shard import MAX_HEADER, MAX_INDEX, SUFFIX, IndexEntry, ShardHeader, parse_header, parse_index
from moe_rl.types import RoutePart

_CACHED_SHARDS = 64
# A frame of at most one page is read whole together with its head.
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Indexes a sealed shard. `start` is the offset of the first frame; `entries` are by digest, in file order."""

    header: ShardHeader
    digest: str
    parents: tuple[str, ...]
    entries: dict[bytes, IndexEntry]
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """Locates a record in its shard. `at` is the frame's file offset; `page` is the whole frame if it was read."""

    shard: ShardIndex
    frame: Frame
    aborted: bool
    at: int
    page: memoryview | None


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Says that rows [first, first + rows) of a sequence are the first `rows` own rows of a record."""

    found: Found
    first: int
    rows: int


class Library:
    """Holds a store's shards. Thread-safe; caches the indexes of the last shards used, but keeps no file open.

    lent: opens shards that are still being written, by name. Only their writer's thread may read through this library.
    """

    def __init__(self, root: Path | str):
        self.lent: dict[str, Callable[[], tuple[File, ShardIndex]]] = {}
        self.folder = RemoteFolder(root) if isinstance(root, str) and "://" in root else LocalFolder(Path(root))
        self._cache: OrderedDict[str, tuple[tuple, ShardIndex]] = OrderedDict()
        self._lock = threading.Lock()
        self._manifest, self._manifest_lock = ManifestReader(), threading.Lock()

    @contextlib.contextmanager
    def manifest(self) -> Iterator[ManifestReader]:
        """Lend the current manifest; it is empty if the file does not exist. Raises TraceError."""
        with self._manifest_lock:
            try:
                with contextlib.closing(self.folder.open(MANIFEST)) as file:
                    self._manifest.read(file)
            except FileNotFoundError:
                self._manifest.read(None)
            except OSError as error:
                raise TraceError(
                    "manifest cannot be read", where={"folder": self.folder}, got=error.strerror
                ) from error
            yield self._manifest

    def index(self, file: File, shard: str) -> ShardIndex:
        """Return the index of an open shard, from the cache if the file is unchanged."""
        with self._lock:
            cached = self._cache.get(shard)
            if cached is not None and cached[0] == file.identity:
                self._cache.move_to_end(shard)
                return cached[1]
        try:
            index = read_index(file, shard)
            with self.manifest() as manifest:
                known = manifest.published.get(shard)
            if known is not None and known.digest != index.digest:
                raise TraceError(f"it has digest {index.digest} where the manifest says {known.digest}")
        except TraceError as error:
            raise TraceError(
                "shard is refused",
                where={"shard": shard, "folder": self.folder},
                got=str(error),
                do="drop its sequences or sample them again, and check the disk",
                fault="damaged shard",
            ) from error
        with self._lock:
            self._cache[shard] = (file.identity, index)
            while len(self._cache) > _CACHED_SHARDS:
                self._cache.popitem(last=False)
        return index

    def forget(self, shard: str) -> None:
        with self._lock:
            self._cache.pop(shard, None)


class Reading:
    """Opens each shard that one call needs once. A context manager, not thread-safe."""

    def __init__(self, library: Library):
        self._library = library
        self._open: dict[str, tuple[File, ShardIndex]] = {}
        self._found: dict[RoutePart, Found] = {}

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        for file, _ in self._open.values():
            file.close()

    def shard(self, name: str, where: About) -> ShardIndex:
        """Open a shard; `where` says what needs it. Raises TraceError."""
        if name not in self._open and (lent := self._library.lent.get(name)) is not None:
            self._open[name] = lent()
        elif name not in self._open:
            try:
                file = self._library.folder.open(check_name(name) + SUFFIX)
            except OSError as error:
                raise TraceError(
                    "shard cannot be opened",
                    where={**where, "folder": self._library.folder},
                    got=error.strerror or type(error).__name__,
                    do="check that the store is the sampler's and that retention has not removed the shard",
                    fault="absent shard",
                ) from error
            try:
                self._open[name] = (file, self._library.index(file, name))
            except BaseException:
                file.close()
                raise
        return self._open[name][1]

    def fetch(self, shard: str, ranges: Iterable[Range]) -> Iterable[memoryview]:
        """Read ranges of a shard that is open, as File.fetch does."""
        try:
            yield from self._open[shard][0].fetch(ranges)
        except TraceError as error:
            raise TraceError(
                "shard cannot be read", where={"shard": shard, "folder": self._library.folder}, got=error
            ) from error

    def find(self, parts: Iterable[tuple[RoutePart, About]], *, follow: bool = True) -> None:
        """Read the heads of these records and, to `follow`, of all records that they continue. `About` says what needs
        a part."""
        needed: list[tuple[RoutePart, About, Found | None]] = [(part, where, None) for part, where in parts]
        while needed:
            wanted: dict[str, dict[RoutePart, IndexEntry]] = defaultdict(dict)
            for part, where, _ in needed:
                if part not in self._found:
                    wanted[part.shard][part] = _entry(self.shard(part.shard, where), part, where)
            for shard, entries in wanted.items():
                self._read_heads(shard, entries)
            for part, where, child in needed:
                if child is not None:
                    _check_continues(child, self._found[part], where)
            new = [part for entries in wanted.values() for part in entries]
            needed = [
                (parent_part(part, record.frame.parent), {"shard": part.shard, "record": record.frame.key}, record)
                for part, record in ((part, self._found[part]) for part in new)
                if follow and record.frame.parent is not None
            ]

    def chain(self, part: RoutePart, rows: int, where: About) -> list[RowSegment]:
        """Return the records that together hold the first `rows` rows of a found record, oldest first."""
        segments = []
        while True:
            record = self._found[part]
            frame = record.frame
            if rows > frame.rows:
                raise TraceError(
                    "record has fewer rows than the reference",
                    where=where,
                    got=f"{frame.rows} rows in shard {part.shard}",
                    expected=rows,
                    do="do not mix shards of different runs; sample the sequence again",
                    fault="rows",
                )
            before = frame.parent.rows if frame.parent else 0
            if rows > before:
                segments.append(RowSegment(record, before, rows - before))
            if frame.parent is None:
                return segments[::-1]
            part, rows = parent_part(part, frame.parent), min(rows, before)

    def records(self, shard: str) -> tuple[ShardIndex, list[tuple[RoutePart, Found]]]:
        """Return a shard's index and all its records, in the order of writing. No chunk is read."""
        index = self.shard(shard, {"shard": shard})
        parts = [RoutePart(shard, digest.hex()) for digest in index.entries]
        self.find((part, {"shard": shard, "record": part.digest}) for part in parts)
        return index, [(part, self.tip(part)) for part in parts]

    def tip(self, part: RoutePart) -> Found:
        """Return a record that `find` has read."""
        return self._found[part]

    def _read_heads(self, shard: str, entries: dict[RoutePart, IndexEntry]) -> None:
        index = self._open[shard][1]
        order = sorted(entries, key=lambda part: entries[part].start)
        ranges = []
        for part in order:
            start = index.start + entries[part].start
            ranges.append(
                (start, start + (entries[part].size if entries[part].size <= _PAGE else entries[part].head_bytes))
            )
        for part, data, (start, _) in zip(order, self.fetch(shard, ranges), ranges, strict=True):
            entry = entries[part]
            try:
                frame = parse_head(index.header, data[: entry.head_bytes])
                if frame.digest.hex() != part.digest:
                    raise TraceError("another record is where the index has this one")
                if frame.size != entry.size:
                    raise TraceError("its sections do not make up the frame")
            except TraceError as error:
                raise damaged(shard, part.digest, start, entry.head_bytes, str(error)) from error
            # Copied: a view would keep the whole read buffer alive.
            page = memoryview(bytes(data)) if entry.size <= _PAGE else None
            self._found[part] = Found(index, frame, entry.aborted, start, page)


def damaged(shard: str, record: str, offset: int, size: int, got: str) -> TraceError:
    """Return the error for `size` bytes at `offset` that are not what the record, by key or digest, says of them."""
    return TraceError(
        "record is damaged",
        where={"shard": shard, "record": record, "bytes": f"{offset} to {offset + size}"},
        got=got,
        do="drop the sequence or sample it again, and check the disk; other records stay readable",
        fault="damaged record",
    )


def read_index(file: File, shard: str) -> ShardIndex:
    """Read the header and index of a sealed shard. Raises TraceError with the fault; the caller adds the place."""
    header, digest, start = read_header(file)
    if not header.sealed:
        raise TraceError("it was never sealed; recover() saves its complete records")
    if header.name != shard:
        raise TraceError("it was published under another name", got=header.name, fault="another name")
    offset, size = start + header.frame_bytes, header.index_bytes
    if offset + size != file.size:
        raise TraceError(f"it has {file.size} bytes where its header says {offset + size}")
    if size > MAX_INDEX:
        raise TraceError(f"its index has {size} bytes, at most {MAX_INDEX} are allowed")
    (raw,) = file.fetch([(offset, offset + size)])
    parents, entries = parse_index(header, bytes(raw))
    return ShardIndex(header, digest, parents, entries, start, file.size)


def read_header(file: File) -> tuple[ShardHeader, str, int]:
    """Read the header, its digest and the offset of the first frame. Raises TraceError with the fault."""
    size = file.size
    if size < 0:
        raise TraceError("it is not a regular file", fault="no regular file")
    length = size
    if size >= 8:
        (raw,) = file.fetch([(0, 8)])
        length = int.from_bytes(raw, "little")
    if length > min(MAX_HEADER, size - 8):
        raise TraceError(f"it is truncated or not a shard: header of {length} bytes in a file of {size}")
    (raw,) = file.fetch([(0, 8 + length)])
    return *parse_header(bytes(raw)), 8 + length


def _entry(index: ShardIndex, part: RoutePart, where: About) -> IndexEntry:
    try:
        entry = index.entries.get(bytes.fromhex(part.digest))
    except (ValueError, TypeError):
        entry = None
    if entry is None:
        raise TraceError(
            "record is not in its shard",
            where=where,
            got=f"{len(index.entries)} records, none with digest {str(part.digest)[:40]}",
            do="do not mix shards of different runs; sample the sequence again",
            fault="absent record",
        )
    return entry


def parent_part(part: RoutePart, parent: Parent) -> RoutePart:
    """Locate the record that the record at `part` continues."""
    return RoutePart(parent.shard or part.shard, parent.digest.hex())


def _check_continues(child: Found, parent: Found, where: About) -> None:
    header, other, link = child.shard.header, parent.shard.header, child.frame.parent
    assert link is not None, "it was followed to the parent"
    if (header.spec, header.layers, header.keep_order) != (other.spec, other.layers, other.keep_order):
        raise TraceError(
            "record continues a record of another model or of other layers",
            where=where,
            got=f"shard {other.name}",
            expected=f"the model, layers and order of shard {header.name}",
        )
    if link.depth != parent.frame.depth + 1 or link.rows > parent.frame.rows:
        raise TraceError(
            "record does not match the record that it continues",
            where=where,
            got=f"{parent.frame.rows} rows at depth {parent.frame.depth} in shard {other.name}",
            expected=f"{link.rows} rows at depth {link.depth - 1}",
        )
