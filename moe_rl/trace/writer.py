"""Writes a shard: whole or not at all, and never over an existing one.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from moe_rl.disk import refusal, sync
from moe_rl.errors import About, TraceDiskError, TraceError
from moe_rl.trace.files import LocalFile, create_locked, make_directory, write_all
from moe_rl.trace.frame import MAX_DEPTH, Frame, Parent, build_frame, digest_of, head_size
from moe_rl.trace.library import Library, Reading, ShardIndex
from moe_rl.trace.manifest import locked_manifest
from moe_rl.trace.record import MAX_ROWS, TraceSpec, as_token_ids, check_key, check_name
from moe_rl.trace.shard import MAX_PARENTS, MAX_RECORDS, SUFFIX, IndexEntry, ShardHeader, header_bytes, index_bytes
from moe_rl.trace.spans import check_spans, merge_spans
from moe_rl.trace.store import TraceStore
from moe_rl.trace.validator import check_routes
from moe_rl.types import RoutePart, RouteRef, Span


class ShardWriter:
    """Writes one shard. Records go to a hidden temporary file as they arrive; publish() turns it into a shard.

    As a context manager it publishes on a clean exit (unless already published) and abandons the shard on an exception.
    Not thread-safe.

    Attributes:
        store: reads the store, and the records of this shard before they are published.

    Args:
        root: folder of the store.
        name: name of the shard.
        spec: the model.
        layers: global numbers of the MoE layers that this writer records, e.g. one pipeline stage; None: all.
        layer_group, token_block: layers and tokens of a chunk, the smallest unit that is read. If the layer group
            divides the trainer's pipeline stages, each stage is one contiguous range.
        keep_order: keep the order of the experts in a set; otherwise sets are stored ascending, which is smaller.

    Raises:
        TraceError: a name is not allowed.
        TraceDiskError: (a TraceError) the file system failed; nothing of the shard is left.
    """

    def __init__(
        self,
        root: Path | str,
        name: str,
        spec: TraceSpec,
        *,
        layers: Sequence[int] | None = None,
        layer_group: int = 12,
        token_block: int = 512,
        keep_order: bool = False,
    ):
        check_name(name)
        layers = spec.moe_layers if layers is None else tuple(layers)
        self._root = Path(root)
        self._header = ShardHeader(name, spec, layers, layer_group, token_block, keep_order)
        self._final = self._root / (name + SUFFIX)
        self._library = Library(self._root)
        head, _ = header_bytes(self._header)
        self._start = self._end = len(head)
        self._frames: dict[bytes, IndexEntry] = {}  # by digest
        self._keys: dict[str, bytes] = {}  # to digest
        self._parents: set[str] = set()
        self._library.lent[name] = self._unsealed
        self.store = TraceStore(self._library)
        self._fd: int | None = None
        if os.path.lexists(self._final):
            raise self._exists()
        try:
            make_directory(self._root)
            self._fd, self._tmp = create_locked(self._root, name)
            # recover() starts with this header, so it holds what a reader must know of an unsealed file.
            write_all(self._fd, head, 0)
        except OSError as error:
            raise self._failed(error, len(head)) from error

    @property
    def name(self) -> str:
        return self._header.name

    @property
    def closed(self) -> bool:
        """Return whether the shard was published or abandoned."""
        return self._fd is None

    def add(
        self,
        key: str,
        routes: np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
        spans: Sequence[Span],
        *,
        parent: RouteRef | None = None,
        aux: Mapping[str, np.ndarray] | None = None,
    ) -> RouteRef:
        """Append one sequence, or the part of a sequence that continues another record.

        Args:
            key: the record's key, unique in the shard.
            routes: [T, L, K] uint8 or uint16, logical expert ids of the T forwarded tokens in this writer's layers.
            token_ids: [T].
            spans: cover the T rows.
            parent: a record of this shard, or published in this store with the same layers. The sequence is then the
                first parent.rows rows of the parent followed by these rows. A reader follows at most 64 records, so
                after 64 the sequence is stored whole again.
            aux: named arrays (a-z and _) stored with the record: bool, integers, float16/32 of 0 to 3 dimensions.

        Returns:
            The reference to parent.rows + T rows. TraceStore.read takes it once the shard is published.

        Raises:
            RouteValidationError: the routes could not be trained on.
            TraceError: the key is repeated, or the parent or an aux array is impossible. The shard is then unchanged.
        """
        header = self._header
        self._open_fd()
        self._check_new(check_key(key))
        where: About = {"request": key, "shard": header.name}
        ids = as_token_ids(token_ids, where=where)
        # The coder finds any set that is none, but not one that its narrower type would hide. Then the check names it.
        hidden = getattr(routes, "dtype", None) != header.spec.dtype
        check = partial(check_routes, routes, header.spec, rows=len(ids), where=where, layers=header.layers)
        check(sets=hidden)
        spans = check_spans(spans, rows=len(ids), where=where)
        link = self._link(parent, where) if parent is not None else None
        if parent is not None and link is not None and link.depth > MAX_DEPTH:
            part = RoutePart(link.shard or header.name, link.digest.hex())
            before = self.store.read(RouteRef(parent.key, parent.rows, (part,)), layers=header.layers)
            routes, ids = np.concatenate([before.routes, routes]), np.concatenate([before.token_ids, ids])
            spans, link = merge_spans([*before.spans, *spans]), None
        rows = len(ids) + (link.rows if link else 0)
        if rows > MAX_ROWS:
            raise TraceError(
                "sequence is too long to store", where=where, got=rows, expected=f"at most {MAX_ROWS} tokens"
            )
        try:
            data = build_frame(header, key, routes, ids, spans, link, aux or {})
        except TraceError:
            check()
            raise
        head = head_size(data)
        return self._append(key, digest_of(data, head), rows, head, link.shard if link else "", data)

    def adopt(self, frame: Frame, data: bytes) -> RouteRef:
        """Append a frame of another file unchanged, for recover(). The caller has verified its checksums.

        Raises TraceError if the frame continues a record that this writer does not have.
        """
        self._check_new(frame.key)
        parent = frame.parent
        if parent is not None and not parent.shard:
            with Reading(self._library) as reading:
                part = RoutePart(self._header.name, parent.digest.hex())
                reading.find([(part, {"record": frame.key})], follow=False)
                before = reading.tip(part).frame
            if before.depth + 1 != parent.depth or before.rows < parent.rows:
                raise TraceError("it continues a missing record")
        return self._append(frame.key, frame.digest, frame.rows, frame.head_bytes, parent.shard if parent else "", data)

    def _append(self, key: str, digest: bytes, rows: int, head_bytes: int, parent_shard: str, data: bytes) -> RouteRef:
        fd = self._open_fd()
        try:
            write_all(fd, data, self._end)
        except OSError as error:
            raise self._failed(error, len(data)) from error
        self._keys[key] = digest
        self._frames[digest] = IndexEntry(self._end - self._start, len(data), head_bytes, aborted=False)
        self._end += len(data)
        if parent_shard:
            self._parents.add(parent_shard)
        return RouteRef(key, rows, (RoutePart(self._header.name, digest.hex()),))

    def mark_aborted(self, key: str) -> None:
        """Mark a record as aborted by the sampler. Raises TraceError if the record does not exist."""
        self._open_fd()
        if key not in self._keys:
            raise TraceError(
                "record to mark as aborted was not added", where={"shard": self._header.name, "record": key}
            )
        digest = self._keys[key]
        self._frames[digest] = self._frames[digest]._replace(aborted=True)

    def publish(self) -> Path:
        """Make the shard visible, complete and durable, and return its path. Raises TraceError instead of
        overwriting."""
        fd = self._open_fd()
        index = index_bytes(
            self._parents,
            ((entry.size, entry.head_bytes, entry.aborted, digest) for digest, entry in self._frames.items()),
        )
        sealed = replace(
            self._header,
            sealed=True,
            records=len(self._frames),
            frame_bytes=self._end - self._start,
            index_bytes=len(index),
            index_checksum=xxhash.xxh3_64_hexdigest(index),
        )
        head, digest = header_bytes(sealed)
        size, linked = self._end + len(index), False
        try:
            write_all(fd, index, self._end)
            # An interrupted add() may have left bytes after the last frame.
            os.ftruncate(fd, size)
            write_all(fd, head, 0)
            os.fsync(fd)
            with locked_manifest(self._root) as manifest:
                # Under the lock and before the line: a line must never describe another shard than the one in the
                # folder.
                if os.path.lexists(self._final):
                    raise FileExistsError
                manifest.append("published", [sealed.name], digest=digest, bytes=size, records=sealed.records)
                try:
                    # Unlike a rename, a link fails if the name is taken, even by a writer that published a moment ago.
                    os.link(self._tmp, self._final)
                    linked = True
                    os.unlink(self._tmp)
                    sync(self._root)
                except BaseException:
                    if linked:
                        with contextlib.suppress(OSError):
                            os.unlink(self._final)
                    manifest.undo()
                    raise
        except BaseException as error:
            self.abandon()
            if isinstance(error, FileExistsError):
                raise self._exists() from error
            if isinstance(error, OSError):
                raise self._failed(error, len(index)) from error
            raise
        self._close()
        return self._final

    def abandon(self) -> None:
        """Remove the temporary file. Does nothing after publish() or abandon()."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._tmp)
            self._close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is not None:
            self.abandon()
        elif self._fd is not None:
            self.publish()

    def _check_new(self, key: str) -> None:
        where: About = {"shard": self._header.name, "record": key}
        if key in self._keys:
            raise TraceError(
                "record key is used twice", where=where, do="give every sequence its own key", fault="key twice"
            )
        if len(self._frames) >= MAX_RECORDS:
            raise TraceError(
                "shard is full", where=where, got=f"{MAX_RECORDS} records", do="publish it and begin another"
            )

    def _link(self, ref: RouteRef, where: About) -> Parent:
        """Return the parent as a frame names it, after checking that a reader will find it."""
        link = None
        for part in ref.parts:
            link = link or self._parent(ref, part)
        if link is None:
            raise TraceError(
                "parent has no part with this writer's model, layers and order",
                where=where,
                got=f"record {ref.key} in {', '.join(part.shard for part in ref.parts)}",
                do="give the reference that a writer of the same layers returned",
                fault="parent",
            )
        parent, rows = link
        shards = self._parents | {parent.shard}
        if not 0 <= ref.rows <= rows or len(shards) > MAX_PARENTS:
            raise TraceError(
                "parent cannot be continued",
                where=where,
                got=f"{ref.rows} of its {rows} rows, {len(shards)} shards",
                expected=f"at most {rows} rows and {MAX_PARENTS} shards",
                do="store the whole sequence as a record without a parent",
                fault="parent",
            )
        return parent

    def _parent(self, ref: RouteRef, part: RoutePart) -> tuple[Parent, int] | None:
        where: About = {"shard": part.shard, "record": ref.key}
        header = self._header
        with Reading(self._library) as reading:
            other = reading.shard(part.shard, where).header
            if (header.spec, header.layers, header.keep_order) != (other.spec, other.layers, other.keep_order):
                return None
            reading.find([(part, where)], follow=False)
            frame = reading.tip(part).frame
        if frame.key != ref.key:
            return None
        shard = "" if part.shard == header.name else part.shard
        return Parent(shard, frame.digest, ref.rows, frame.depth + 1), frame.rows

    def _unsealed(self) -> tuple[LocalFile, ShardIndex]:
        """Open this shard for reading."""
        file = LocalFile(os.dup(self._open_fd()))
        return file, ShardIndex(self._header, "", (), self._frames, self._start, self._end)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise TraceError(
                "shard is closed",
                where={"shard": self._header.name},
                got="published or abandoned",
                do="open a writer with a new name",
                fault="closed",
            )
        return self._fd

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        self._library.lent.pop(self._header.name, None)
        if fd is not None:
            os.close(fd)

    def _failed(self, error: OSError, size: int | None = None) -> TraceDiskError:
        """Return the error to raise. `size` is the number of bytes to be written."""
        self.abandon()
        return TraceDiskError(
            refusal(
                error,
                "shard could not be written, nothing of it was published",
                self._root,
                where={"shard": self._header.name, "folder": self._root},
                size=size,
                do="the file system needs hard links and flock",
            )
        )

    def _exists(self) -> TraceError:
        return TraceError(
            "shard exists already and shards are never overwritten",
            where={"shard": self._header.name, "folder": self._root},
            do="choose a new name, or remove the old shard first",
            fault="exists",
        )
