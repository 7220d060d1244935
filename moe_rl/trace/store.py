"""The routing-trace store: immutable shard files in one directory, each published whole or not at all.

with ShardWriter(root, "step7-worker0", spec) as writer:
    ref = writer.add("step7/prompt3:1", routes, token_ids, weight_version=7)
record = TraceStore(root).read(ref)
validate(record, token_ids=token_ids, spec=spec, weight_version=7, ref=ref)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from moe_rl.errors import TraceError, describe
from moe_rl.trace.record import (
    RouteRecord,
    TraceSpec,
    check_key,
    check_name,
    record_checksum,
    spec_digest,
    token_digest,
)
from moe_rl.trace.shard import MAX_HEADER, SUFFIX, Entry, Layout, parse_header, parse_index
from moe_rl.trace.validator import check_routes, validate
from moe_rl.trace.writer import TMP, ShardWriter
from moe_rl.types import RouteRef

__all__ = ["RouteRecord", "ShardWriter", "TraceSpec", "TraceStore", "token_digest", "validate"]

_CACHED_SHARDS = 64


class TraceStore:
    """Reads published shards. Safe to share between threads; holds no file open.

    A shard's index is read once and kept (of the last 64 shards used); then a read touches the record's own bytes only.
    """

    def __init__(self, root: Path):
        self._root = Path(root)
        self._cache: OrderedDict[str, tuple[tuple, Layout, dict[str, Entry], int]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, ref: RouteRef) -> RouteRecord:
        """The record that `ref` names, exactly as it was added; else TraceError naming shard and record."""
        where = f"shard {check_name(ref.shard)}, record {check_key(ref.key)}"
        with self._open(ref.shard, where) as fd:
            layout, entries, start = self._load(fd, ref.shard)
            entry = entries.get(ref.key)
            if entry is None:
                raise TraceError(
                    describe(
                        "record is not in its shard",
                        where=where,
                        got=f"{len(entries)} others",
                        do="sample the sequence again",
                    )
                )
            if (ref.rows, ref.digest) != (entry.rows, f"{entry.checksum:016x}"):
                raise TraceError(
                    describe(
                        "shard holds another record under this key than the one referred to",
                        where=where,
                        got=f"{entry.rows} rows, checksum {entry.checksum:016x}",
                        expected=f"{ref.rows} rows, checksum {ref.digest}",
                        do="do not mix shards of different runs; sample the sequence again",
                    )
                )
            spec, at = layout.spec, start + entry.start
            data = _read(fd, at, entry.rows * spec.row_bytes, where)
        key = ref.key.encode("ascii")
        checksum = record_checksum(spec_digest(spec), key, entry.rows, entry.token_digest, entry.weight_version, data)
        if checksum != entry.checksum:
            raise TraceError(
                describe(
                    "record is damaged",
                    where=f"{where}, bytes {at} to {at + len(data)}",
                    got=f"checksum {checksum:016x}",
                    expected=f"{entry.checksum:016x}",
                    do="drop the sequence or sample it again, and check the disk; other records stay readable",
                )
            )
        routes = np.frombuffer(data, spec.dtype).reshape(entry.rows, *spec.row_shape)
        check_routes(routes, spec, rows=entry.rows, where=where)
        return RouteRecord(ref.key, routes, f"{entry.token_digest:016x}", entry.weight_version, spec)

    def shards(self) -> list[str]:
        """Names of the published shards, sorted."""
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and not name.startswith("."))

    def remove(self, shard: str) -> None:
        """Delete a shard that no one will read again. Raises TraceError when it is not there."""
        try:
            os.unlink(self._root / (check_name(shard) + SUFFIX))
        except OSError as error:
            raise TraceError(
                describe("shard could not be removed", where=f"shard {shard} in {self._root}", got=error.strerror)
            ) from error
        with self._lock:
            self._cache.pop(shard, None)

    def collect_garbage(self) -> list[str]:
        """Delete what dead writers have left, and return the file names. Files of living ones, on any host, are kept.

        A writer holds a lock on its file that the kernel drops when it dies; what cannot be locked and removed stays.
        """
        removed = []
        for path in sorted(self._root.glob(f".*.????????{TMP}")):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                    removed.append(path.name)
                finally:
                    os.close(fd)
        return removed

    @contextlib.contextmanager
    def _open(self, shard: str, where: str):
        try:
            # O_NONBLOCK: a pipe in the place of a shard must not hang the reader.
            fd = os.open(self._root / (shard + SUFFIX), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TraceError(
                describe(
                    "shard cannot be opened",
                    where=f"{where} in {self._root}",
                    got=error.strerror,
                    do="check that the store is the sampler's and that retention has not removed the shard",
                )
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _load(self, fd: int, shard: str) -> tuple[Layout, dict[str, Entry], int]:
        """Layout, index and the offset of the data, from the cache when the file is still the same one."""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            cached = self._cache.get(shard)
            if cached is not None and cached[0] == identity:
                self._cache.move_to_end(shard)
                return cached[1:]
        try:
            loaded = _load_index(fd, status, shard)
        except TraceError as error:
            raise TraceError(
                describe(
                    "shard is refused",
                    where=f"{shard}{SUFFIX} in {self._root}",
                    got=str(error),
                    do="drop its sequences or sample them again, and check the disk",
                )
            ) from error
        with self._lock:
            self._cache[shard] = (identity, *loaded)
            while len(self._cache) > _CACHED_SHARDS:
                self._cache.popitem(last=False)
        return loaded


def _load_index(fd: int, status: os.stat_result, shard: str) -> tuple[Layout, dict[str, Entry], int]:
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise TraceError("it is not a regular file")
    length = int.from_bytes(_read(fd, 0, 8, "header length"), "little") if size >= 8 else size
    if length > min(MAX_HEADER, size - 8):
        raise TraceError(f"it is cut short or no shard: header of {length} bytes in a file of {size}")
    layout = parse_header(_read(fd, 0, 8 + length, "header"))
    start = 8 + length
    if layout.shard != shard:
        raise TraceError(f"it was published as {layout.shard!r}")
    if start + layout.data_bytes != size:
        raise TraceError(f"it has {size} bytes where its header says {start + layout.data_bytes}")
    at = start + layout.index_start
    return layout, parse_index(layout, _read(fd, at, size - at, "index")), start


def _read(fd: int, at: int, size: int, where: str) -> bytes:
    """Exactly size bytes. Plain reads, no memory map: a file cut short under us is an error here, no SIGBUS later."""
    try:
        data = os.pread(fd, size, at)
        while len(data) < size:
            more = os.pread(fd, size - len(data), at + len(data))
            if not more:
                raise TraceError(
                    describe("file ends too early", where=where, got=f"{len(data)} bytes at {at}", expected=size)
                )
            data += more
    except (OSError, MemoryError) as error:
        raise TraceError(
            describe("file cannot be read", where=f"{where}, bytes {at} to {at + size}", got=repr(error))
        ) from error
    return data
