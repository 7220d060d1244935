"""Reads the routing-trace store: immutable shard files in one folder, each published whole or not at all.

with ShardWriter(root, "step7-worker0", spec) as writer:
    ref = writer.add("step7/prompt3:1", routes, token_ids, [Span(len(token_ids), 7, Provenance.DECODE)])
record = TraceStore(root).read(ref)
validate(record, token_ids=token_ids, spec=spec, weight_version=7, ref=ref)

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import batched
from pathlib import Path

import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.files import TMP, LocalFolder
from moe_rl.trace.library import Found, Library, Reading, RowSegment, parent_part
from moe_rl.trace.manifest import LOCK_POLL_SECONDS, MANIFEST, Manifest, locked_manifest
from moe_rl.trace.primitives import unpack_bytes, unpack_ints
from moe_rl.trace.ranked import count_experts
from moe_rl.trace.readout import Joined, Readout, join, unpacked
from moe_rl.trace.record import RecordInfo, RouteRecord, check_name
from moe_rl.trace.shard import SUFFIX
from moe_rl.trace.spans import cut_spans
from moe_rl.types import RouteRef

# How many shards are removed while other writers wait.
_REMOVED_AT_ONCE = 100

Rows = tuple[int, int]


class TraceStore:
    """Reads published shards. Thread-safe; keeps no file open.

    The indexes of the last 64 shards are cached. A read touches only the bytes of its own rows and layers, and checks
    every byte that it uses against the digest in the reference.

    Args:
        root: a local folder, or any URL that fsspec reads (shards cannot be removed there); a writer passes its own
            Library, which also has the shard that it writes.
    """

    def __init__(self, root: Path | str | Library):
        self._library = root if isinstance(root, Library) else Library(root)

    def read(self, ref: RouteRef, *, layers: Sequence[int] | None = None, rows: Rows | None = None) -> RouteRecord:
        """Return the record that `ref` names, exactly as it was added.

        Args:
            ref: the reference.
            layers: increasing global numbers of the wanted layers; None: all MoE layers of the model.
            rows: the wanted rows [first, last); None: all rows of the reference.

        Raises:
            TraceError: the record cannot be read; names shard and record.
        """
        (record,) = self.read_each([(ref, rows)], layers=layers)
        return record

    def read_each(
        self, items: Sequence[tuple[RouteRef, Rows | None]], *, layers: Sequence[int] | None = None
    ) -> list[RouteRecord]:
        """Return a record for each item, as read() does. All reads are planned together, as in read_batch()."""
        wanted = None if layers is None else tuple(layers)
        spans = [check_rows(ref, rows) for ref, rows in items]
        records = []
        with Reading(self._library) as reading:
            readout = Readout(reading)
            joins = join(reading, [ref for ref, _ in items], wanted)
            for (ref, _), (first, last), joined in zip(items, spans, joins, strict=True):
                routes = _empty((last - first, len(joined.layers), joined.spec.top_k), joined.spec.dtype, ref.key)
                token_ids = np.empty(last - first, "<i4")
                readout.tokens(joined.parts[0].segments, (first, last), token_ids)
                for part in joined.parts:
                    readout.routes(part.segments, joined.columns, (first, last), routes)
                trimmed = cut_spans(joined.spans, first, last)
                records.append(
                    RouteRecord(ref.key, routes, token_ids, trimmed, joined.aborted, joined.spec, first, joined.layers)
                )
            readout.run()
        for record in records:
            record.routes.flags.writeable = record.token_ids.flags.writeable = False
        return records

    def read_batch(
        self, items: Sequence[tuple[RouteRef, Rows | None]], out: np.ndarray, *, layers: Sequence[int] | None = None
    ) -> None:
        """Fill out [sum T, L, K] with the rows of all items, one item after the other.

        All reads are planned together: adjacent bytes are read together, and rows that items share are decoded once.
        Token ids are not read, so check a microbatch against its tokens elsewhere.

        Args:
            items: references, each with the wanted rows [first, last), or None for all.
            out: the spec's dtype or a wider integer type, any strides. Its content is undefined after an error.
            layers: as in read(); L is their number.

        Raises:
            TraceError: a record cannot be read.
        """
        wanted = None if layers is None else tuple(layers)
        spans = [check_rows(ref, rows) for ref, rows in items]
        _check_out(out, sum(last - first for first, last in spans))
        start = 0
        with Reading(self._library) as reading:
            readout = Readout(reading)
            for joined, (first, last) in zip(join(reading, [ref for ref, _ in items], wanted), spans, strict=True):
                _check_out(out, len(out), joined)
                for part in joined.parts:
                    readout.routes(part.segments, joined.columns, (first, last), out[start : start + last - first])
                start += last - first
            readout.run()

    def info(self, ref: RouteRef) -> RecordInfo:
        """Return what is known of the record without decoding any of its chunks. Raises TraceError."""
        with Reading(self._library) as reading:
            (joined,) = join(reading, [ref], None, complete=False)
            tips, parent = [reading.tip(part) for part in ref.parts], _parent(reading, ref)
            before = [tip.frame.parent.rows if tip.frame.parent else 0 for tip in tips]
        return RecordInfo(
            key=ref.key,
            rows=ref.rows,
            held_rows=min(tip.frame.rows for tip in tips),
            own_rows=max(0, ref.rows - min(before)),
            spans=joined.spans,
            aborted=joined.aborted,
            stored_bytes=sum(tip.frame.size for tip in tips),
            parent=parent,
            aux=tuple(dict.fromkeys(array.name for tip in tips for array in tip.frame.aux)),
            layers=joined.layers,
            spec=joined.spec,
        )

    def parents(self, refs: Sequence[RouteRef]) -> list[RouteRef | None]:
        """Return the record that each record continues, as info() does. All are read together. Raises TraceError."""
        with Reading(self._library) as reading:
            join(reading, refs, None, complete=False)
            return [_parent(reading, ref) for ref in refs]

    def expert_counts(self, ref: RouteRef) -> np.ndarray:
        """Count how often each expert was chosen in the reference's rows: int64 [L, E], L all layers of its parts.

        Long records have stored counts; the routes of short ones are decoded. Raises TraceError.
        """
        with Reading(self._library) as reading:
            (joined,) = join(reading, [ref], None, complete=False)
            counts = np.zeros((len(joined.layers), joined.spec.num_experts), np.int64)
            for part in joined.parts:
                columns = [joined.columns[layer] for layer in part.layers]
                for segment in part.segments:
                    counts[columns] += _count(reading, segment)
        return counts

    def aux(self, ref: RouteRef, name: str) -> np.ndarray:
        """Return an array stored with the record, read-only. Raises TraceError if the record has no array `name`."""
        with Reading(self._library) as reading:
            join(reading, [ref], None, complete=False)
            for part in ref.parts:
                record = reading.tip(part)
                for array in record.frame.aux:
                    if array.name == name:
                        size = math.prod(array.shape) * array.dtype.itemsize
                        unpack = partial(unpack_bytes, bool(array.section.kind), size=size)
                        raw = unpacked(reading, record, array.section, f"array {name!r}", unpack)
                        return np.frombuffer(raw, array.dtype).reshape(array.shape)
            names = [array.name for part in ref.parts for array in reading.tip(part).frame.aux]
        raise TraceError(
            "record has no such array",
            where={"shard": ref.parts[0].shard, "record": ref.key},
            got=repr(name),
            expected=f"one of {names}",
            fault="no array",
        )

    def records(self, shard: str) -> list[RouteRef]:
        """Return references to all records of a shard, in the order of writing. Raises TraceError."""
        with Reading(self._library) as reading:
            _, records = reading.records(shard)
        return [RouteRef(tip.frame.key, tip.frame.rows, (part,)) for part, tip in records]

    def shards(self) -> list[str]:
        """Return the names of the published shards, sorted."""
        names = self._library.folder.names()
        return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and not name.startswith("."))

    def manifest(self) -> Manifest:
        """Return the manifest: shards that were published and not removed.

        If a shard is in the folder but not in the manifest, someone copied it there, or its line is damaged.
        """
        with self._library.manifest() as manifest:
            return manifest.manifest()

    def unpublished(self) -> list[str]:
        """Return the shards in the folder that have no line in the manifest, sorted."""
        known = self.manifest().published
        return [name for name in self.shards() if name not in known]

    def check_published(self, shards: Iterable[str]) -> None:
        """Raise TraceError for the first of these shards that has no line in the manifest.

        A writer's line is on disk before its shard appears, so either the line was lost or the shard was copied there.
        """
        with self._library.manifest() as reader:
            lost = next((name for name in shards if name not in reader.published), None)
            manifest = reader.manifest() if lost is not None else None
        if manifest is not None:
            damaged = f", and lines {', '.join(map(str, manifest.damaged))} are damaged" if manifest.damaged else ""
            raise TraceError(
                "the manifest of the trace has lost the line of a shard",
                where={"shard": lost, "file": f"{self._library.folder}/{MANIFEST}"},
                got=f"lines of {len(manifest.published)} other shards{damaged}",
                do="sample its sequences again; a resumed run does",
            )

    def remove(self, *shards: str) -> None:
        """Delete shards. Their records, and records that continue them, can then no longer be read.

        A shard that the manifest lists but that has no file, left by a removal or a writer that was killed, loses its
        line. Raises TraceError for the first shard that does not exist; those before it are deleted.
        """
        for number, names in enumerate(batched(shards, _REMOVED_AT_ONCE)):
            if number:
                time.sleep(LOCK_POLL_SECONDS * 4)  # a writer that waits asks this often
            self._remove(names)

    def _remove(self, shards: Sequence[str]) -> None:
        root, removed = self._local(), list[str]()
        paths = [root / (check_name(shard) + SUFFIX) for shard in shards]
        try:
            with locked_manifest(root) as manifest:
                try:
                    for shard, path in zip(shards, paths, strict=True):
                        try:
                            os.unlink(path)
                        except FileNotFoundError:
                            with self._library.manifest() as read:
                                if shard not in read.published:
                                    raise
                        self._library.forget(shard)
                        removed.append(shard)
                finally:
                    # The shards are gone even if the lines cannot be written, which is likely on a full disk.
                    with contextlib.suppress(OSError, TraceError):
                        manifest.append("removed", removed)
                        with self._library.manifest() as read:
                            mostly_removed = read.mostly_removed
                        if mostly_removed:
                            manifest.compact()
        except OSError as error:
            where: About = {"shard": shards[len(removed)], "folder": root}
            raise TraceError("shard could not be removed", where=where, got=error.strerror) from error

    def collect_garbage(self) -> list[str]:
        """Delete the files of dead writers and return their names. Files of living writers, on any host, are kept.

        A writer holds a lock on its file, which the kernel releases when the writer dies. Files that cannot be locked
        or removed stay. Records that recover() could have saved are lost.
        """
        removed = []
        for path in sorted(self._local().glob(f".*.????????{TMP}")):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                    removed.append(path.name)
                finally:
                    os.close(fd)
        return removed

    def _local(self) -> Path:
        if isinstance(self._library.folder, LocalFolder):
            return self._library.folder.path
        raise TraceError(
            "store can only be read",
            where={"folder": self._library.folder},
            do="remove shards where they are local",
            fault="read-only",
        )


def _parent(reading: Reading, ref: RouteRef) -> RouteRef | None:
    """Return the record that a record continues, if its parts continue the same rows of one record."""
    links = [reading.tip(part).frame.parent for part in ref.parts]
    parts = tuple(parent_part(part, link) for part, link in zip(ref.parts, links, strict=True) if link)
    rows, keys = {link.rows for link in links if link}, {reading.tip(part).frame.key for part in parts}
    whole = len(parts) == len(links) and len(rows) == len(keys) == 1
    return RouteRef(keys.pop(), rows.pop(), parts) if whole else None


def _count(reading: Reading, segment: RowSegment) -> np.ndarray:
    """Count the experts [L, E] of a segment."""
    record, frame, header = segment.found, segment.found.frame, segment.found.shard.header
    shape = (len(header.layers), header.spec.num_experts)
    # Stored counts cover all rows. The rows that a segment omits are decoded and subtracted: the last row of a whole
    # record, the completion of a parent. If the segment is shorter than these rows, it is decoded instead.
    if frame.counts is None or segment.rows < frame.own_rows - segment.rows:
        return _decode_and_count(reading, record, 0, segment.rows)
    unpack = partial(unpack_ints, frame.counts.kind, count=math.prod(shape))
    counts = unpacked(reading, record, frame.counts, "expert counts", unpack).astype(np.int64).reshape(shape)
    return counts - _decode_and_count(reading, record, segment.rows, frame.own_rows)


def _decode_and_count(reading: Reading, record: Found, first: int, last: int) -> np.ndarray:
    header = record.shard.header
    shape = (last - first, len(header.layers), header.spec.top_k)
    routes = _empty(shape, header.spec.dtype, record.frame.key)
    readout = Readout(reading)
    columns = {layer: column for column, layer in enumerate(header.layers)}
    readout.routes([RowSegment(record, 0, record.frame.own_rows)], columns, (first, last), routes)
    readout.run()
    return count_experts(routes, header.spec.num_experts)


def _empty(shape: tuple[int, ...], dtype: np.dtype, key: str) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise TraceError(
            "record is too large for memory", where={"record": key}, got=f"routes of shape {shape}"
        ) from error


def check_rows(ref: RouteRef, rows: Rows | None) -> Rows:
    """Return the wanted rows [first, last), all for None. Raises TraceError if the reference has fewer."""
    first, last = (0, ref.rows) if rows is None else rows
    if not 0 <= first <= last <= ref.rows:
        raise TraceError(
            "rows are not in the record",
            where={"record": ref.key},
            got=f"rows {first} to {last}",
            expected=f"0 to {ref.rows}",
            fault="rows",
        )
    return first, last


def _check_out(out: np.ndarray, total: int, record: Joined | RouteRecord | None = None) -> None:
    shape = (total, *out.shape[1:]) if record is None else (total, len(record.layers), record.spec.top_k)
    if out.shape != shape or (record is not None and not np.can_cast(record.spec.dtype, out.dtype)):
        raise TraceError(
            "array cannot take the routes",
            got=f"{out.dtype} of shape {out.shape}",
            expected=f"{record.spec.dtype if record else 'integers'} or wider of shape {shape}",
            fault="array",
        )
