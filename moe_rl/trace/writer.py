"""Writing a shard: whole or not at all, never over another one.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from moe_rl.errors import TraceError, describe
from moe_rl.trace.record import (
    MAX_ROWS,
    TraceSpec,
    check_key,
    check_name,
    check_weight_version,
    record_checksum,
    spec_digest,
    token_digest,
)
from moe_rl.trace.shard import INDEX, SUFFIX, Layout, header_bytes
from moe_rl.trace.validator import check_routes
from moe_rl.types import RouteRef

TMP = ".tmp"


class ShardWriter:
    """Writes one shard. Records go to a hidden temporary file as they come; publish() makes it a shard.

    As a context manager it publishes at a clean exit (unless that was done) and abandons on an exception. Raises
    TraceError on bad names and on every failure of the file system, after which nothing of the shard is left. Not for
    several threads at once.
    """

    def __init__(self, root: Path, name: str, spec: TraceSpec):
        self._root, self._name, self._spec = Path(root), check_name(name), spec
        self._spec_digest = spec_digest(spec)
        self._final = self._root / (name + SUFFIX)
        self._index: list[tuple[int, int, int, int, int]] = []
        self._start = self._end = len(header_bytes(Layout(name, spec, 0, 0, 0, "0" * 16)))
        self._keys: dict[str, None] = {}
        self._fd: int | None = None
        if os.path.lexists(self._final):
            raise self._exists()
        try:
            _make_directory(self._root)
            self._fd, self._tmp = _create_locked(self._root, name)
        except OSError as error:
            raise self._failed(error) from error

    def add(self, key: str, routes: np.ndarray, token_ids, weight_version: int) -> RouteRef:
        """Append one sequence. routes [T, L, K] uint8 or uint16: logical expert ids of the T forwarded token_ids [T].

        Returns the reference by which TraceStore.read finds it once the shard is published. Raises RouteValidationError
        when the routes could not be trained on and TraceError on a repeated key; the shard then stays as it was.
        """
        fd = self._open_fd()
        key_bytes = check_key(key).encode("ascii")
        if key in self._keys:
            raise TraceError(
                describe(
                    "record key is used twice",
                    where=f"shard {self._name}, record {key}",
                    do="give every sequence its own key",
                )
            )
        where = f"request {key}, shard {self._name}"
        tokens = token_digest(token_ids, where=where)
        check_routes(routes, self._spec, rows=len(token_ids), where=where)
        version = check_weight_version(weight_version, key)
        rows = len(routes)
        if rows > MAX_ROWS:
            raise TraceError(
                describe("sequence is too long to store", where=where, got=rows, expected=f"at most {MAX_ROWS} tokens")
            )
        data = np.ascontiguousarray(routes, dtype=self._spec.dtype)
        checksum = record_checksum(self._spec_digest, key_bytes, rows, int(tokens, 16), version, data)
        try:
            _write(fd, data, self._end)
        except OSError as error:
            raise self._failed(error) from error
        self._end += data.nbytes
        self._keys[key] = None
        self._index.append((checksum, int(tokens, 16), version, rows, len(key_bytes)))
        return RouteRef(self._name, key, rows, f"{checksum:016x}")

    def publish(self) -> Path:
        """Make the shard visible, complete and durable, and return its path. Never overwrites: raises TraceError."""
        fd = self._open_fd()
        keys = "".join(self._keys).encode("ascii")
        tail = np.array(self._index, dtype=INDEX).tobytes() + keys
        rows = (self._end - self._start) // self._spec.row_bytes
        layout = Layout(self._name, self._spec, rows, len(self._index), len(keys), xxhash.xxh3_64_hexdigest(tail))
        linked = False
        try:
            _write(fd, tail, self._end)
            # An add() that was interrupted may have left bytes behind the last record.
            os.ftruncate(fd, self._end + len(tail))
            _write(fd, header_bytes(layout), 0)
            os.fsync(fd)
            # A link, unlike a rename, fails when the name is taken, also by a writer that came between.
            os.link(self._tmp, self._final)
            linked = True
            os.unlink(self._tmp)
            _sync_directory(self._root)
        except BaseException as error:
            if linked:
                with contextlib.suppress(OSError):
                    os.unlink(self._final)
            self.abandon()
            if isinstance(error, FileExistsError):
                raise self._exists() from error
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        self._close()
        return self._final

    def abandon(self) -> None:
        """Leave nothing behind. Does nothing after publish() or abandon()."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._tmp)
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            self.abandon()
        elif self._fd is not None:
            self.publish()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise TraceError(
                describe(
                    "shard is closed",
                    where=f"shard {self._name}",
                    got="published or abandoned",
                    do="open a writer with a new name",
                )
            )
        return self._fd

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _failed(self, error: OSError) -> TraceError:
        self.abandon()
        return TraceError(
            describe(
                "shard could not be written, nothing of it was published",
                where=f"shard {self._name} in {self._root}",
                got=f"{type(error).__name__}: {error.strerror or error}",
                do="free space or mend the file system (it needs hard links and flock), then sample them again",
            )
        )

    def _exists(self) -> TraceError:
        return TraceError(
            describe(
                "shard exists already and shards are never overwritten",
                where=f"shard {self._name} in {self._root}",
                do="choose a new name, or remove the old shard first",
            )
        )


def _write(fd: int, data, at: int) -> None:
    view = memoryview(data)
    if view.nbytes:  # cast() refuses an empty view of several dimensions
        left = view.cast("B")
        while left:
            done = os.pwrite(fd, left, at)
            left, at = left[done:], at + done


def _create_locked(root: Path, name: str) -> tuple[int, Path]:
    """A new hidden file, locked while this process lives: so collect_garbage tells it from a dead writer's."""
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


def _make_directory(root: Path) -> None:
    if not root.is_dir():
        _make_directory(root.parent)
        root.mkdir(exist_ok=True)
        _sync_directory(root.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
