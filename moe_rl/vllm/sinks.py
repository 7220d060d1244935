"""Fills trace shards: takes the rows of finished requests and returns references.

A sink is one unpublished shard, or is published in parts, each a shard of its own. Records are appended in the order in
which requests finish, in parallel to the engine's steps: a step only copies the rows, and one thread encodes, writes
and publishes them. Two things of each record stay in memory until its reference is returned: its tokens, to verify that
they are those of the sequence, and each row's checksum from the engine's buffer, for the reference.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.disk import allow_files
from moe_rl.errors import DiskError, EngineError, MoeRLError, RequestRefused, TraceError
from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.trace.source_sum import rows_total, total
from moe_rl.trace.spans import cut_spans, spans_of_rows, versions_of_rows
from moe_rl.types import RouteRef
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.slots import Recorded, Rows


class WritingThread:
    """Runs one piece of work after another in its own thread.

    Attributes:
        waits: how often a caller had to wait for room.

    Args:
        limit: bytes that waiting work may hold. A larger piece waits until no other work is left.
    """

    def __init__(self, limit: int):
        self._limit, self._bytes, self.waits = limit, 0, 0
        self._room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "trace-writing")  # starts its thread at the first piece of work

    def submit[T](self, work: Callable[[], T], size: int) -> Future[T]:
        """Run `work`, which holds `size` bytes, after all earlier work. Waits until there is room for it."""

        def there_is_room() -> bool:
            return not self._bytes or self._bytes + size <= self._limit

        with self._room:
            if not there_is_room():
                self.waits += 1
                self._room.wait_for(there_is_room)
            self._bytes += size
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self._leave(size))
        return future

    def _leave(self, size: int) -> None:
        with self._room:
            self._bytes -= size
            self._room.notify()


# In an asynchronous run each group that is being sampled has a shard.
_MAX_OPEN = 4096
_MAX_REFUSALS = 1024
# Bytes of ids that a record must share with its group's first record to refer to it: a reference costs bytes too.
_MIN_SHARED_BYTES = 64
# Most recent prompts whose rows are remembered for sharing: their number, and bytes of rows.
_MAX_FAMILIES, _FAMILY_BYTES = 256, 1 << 30
# Number of most recent records whose tokens and versions are remembered for the records that continue them.
_MAX_RECENT = 256
# Bytes of rows that may wait to be written, over all shards, enough for 250 requests of 10,000 tokens, 48 layers and
# top 8.
_MAX_WAITING_BYTES = 1 << 30
# Bytes of rows that are collected before the writing thread gets them.
_GATHERED_BYTES = 1 << 20


@dataclass(slots=True)
class _Sink:
    """Holds one unpublished shard.

    Attributes:
        begin: creates the file of a part, by its number.
        writer: writes the present part.
        part: its number, from 0.
        cut: whether it is published, so that the next record begins another.
        records: key -> reference to all stored rows, token ids and sums of all rows, first row to refer to. A record
            is left out once its reference is returned, or nobody awaits it.
        families: prompt -> a record that begins with this prompt, and the prompt's rows.
        family_bytes: of these rows.
        recent: digest of a record -> token ids and weight versions of all its rows.
        last: the writing thread's last work. Until it is done, only that thread uses the fields above.
        dropped: whether waiting rows need not be written.
    """

    begin: Callable[[int], ShardWriter]
    writer: ShardWriter
    part: int = 0
    cut: bool = False
    records: dict[str, tuple[RouteRef, np.ndarray, np.ndarray, int]] = field(default_factory=dict)
    families: OrderedDict[bytes, tuple[RouteRef, Rows]] = field(default_factory=OrderedDict)
    family_bytes: int = 0
    recent: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=OrderedDict)
    last: Future[Any] | None = None
    dropped: bool = False

    def remember(self, prompt: bytes, ref: RouteRef, rows: Rows) -> None:
        """Add to `families`, and forget the oldest ones beyond the bounds."""
        _, before = self.families.pop(prompt, (None, None))
        self.families[prompt] = ref, rows
        self.family_bytes += rows.nbytes - (0 if before is None else before.nbytes)
        while len(self.families) > _MAX_FAMILIES or self.family_bytes > _FAMILY_BYTES:
            _, (_, oldest) = self.families.popitem(last=False)
            self.family_bytes -= oldest.nbytes

    def forget(self) -> None:
        """Forget all records of the present part."""
        for known in (self.records, self.families, self.recent):
            known.clear()
        self.family_bytes = 0

    def wait(self) -> None:
        """Wait until all rows of this shard are written."""
        if self.last is not None:
            self.last.exception()  # `publish` reports it


class Sinks:
    """Holds all shards that one worker fills.

    Args:
        root: folder of the store, or of several stores, one per run that a server samples for.
        spec: the model.
        layers: the layers that this worker sees.
        suffix: suffix of this worker's shard names.
    """

    def __init__(self, root: Path, spec: TraceSpec, *, layers: tuple[int, ...], suffix: str):
        allow_files()  # each shard takes one
        self._root, self._spec, self._layers, self._suffix = root, spec, layers, suffix
        self._open: dict[str, _Sink] = {}
        self._refused: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lost: dict[str, DiskError] = {}
        self._lock = threading.Lock()  # guards the two above, which both threads change
        self._thread = WritingThread(_MAX_WAITING_BYTES)
        self._gathered: list[tuple[_Sink, Callable[[], None]]] = []
        self._gathered_bytes = 0
        self._broken: tuple[RecordingRequest, Exception] | None = None

    @property
    def waits(self) -> int:
        """Return how often a step waited because too many rows were still unwritten."""
        return self._thread.waits

    def open(self, name: str, folder: str = "") -> _Sink:
        """Begin or restart the shard `name` of the store in `folder` below the root. Raises TraceError if it exists."""
        self.abandon(name)
        if len(self._open) >= _MAX_OPEN:
            raise TraceError(
                "too many shards are being filled",
                where={"shard": name},
                got=f"{len(self._open)} unpublished ones: {', '.join(sorted(self._open))[:120]}",
                do="publish or abandon them",
            )

        def begin(part: int) -> ShardWriter:
            file = name + (f".part{part}" if part else "") + self._suffix
            return ShardWriter(self._root / folder, file, self._spec, layers=self._layers)

        sink = self._open[name] = _Sink(begin, begin(0))
        return sink

    def add(self, request: Recorded, ask: RecordingRequest, rows: Rows, aux: Mapping[str, np.ndarray]) -> None:
        """Append the rows of a finished request to the sink that `ask` names, while the engine's steps continue.

        The sink is created if necessary. `hand_over` gives the writing thread the rows of several requests at once.
        `publish` reports why a request has no record. Raises TraceError if the sink cannot be created.
        """
        sink = self._open.get(ask.sink) or self.open(ask.sink)
        self._gathered.append((sink, partial(self._write, sink, request, ask, rows, aux)))
        self._gathered_bytes += rows.nbytes + sum(array.nbytes for array in aux.values())
        if self._gathered_bytes >= _GATHERED_BYTES:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the writing thread the added records. It gets many short ones as one piece of work, because two threads
        that both run Python slow each other down."""
        if not self._gathered:
            return
        writes = [write for _, write in self._gathered]
        work = self._thread.submit(lambda: [write() for write in writes], self._gathered_bytes)
        for sink, _ in self._gathered:
            sink.last = work
        self._gathered, self._gathered_bytes = [], 0

    def _write(
        self, sink: _Sink, request: Recorded, ask: RecordingRequest, rows: Rows, aux: Mapping[str, np.ndarray]
    ) -> None:
        """Append one record, in the writing thread."""
        if sink.dropped:
            return
        try:
            self._append(sink, request, ask, rows, aux)
        except MoeRLError as error:
            self.refuse(ask.sink, ask.key, error)
        except Exception as error:
            if self._broken is None:
                self._broken = (ask, error)

    def check(self) -> None:
        """Raise EngineError if a record failed for a reason other than its request or a disk."""
        if self._broken is not None:
            ask, error = self._broken
            raise EngineError(
                "A record could not be written",
                where={"request": ask.key, "shard": ask.sink},
                got=f"{type(error).__name__}: {error}",
                do="report it: this is a fault in moe_rl, or the host is out of memory",
                fault="writing",
            ) from error

    def _append(
        self, sink: _Sink, request: Recorded, ask: RecordingRequest, rows: Rows, aux: Mapping[str, np.ndarray]
    ) -> None:
        if sink.cut:
            sink.writer = sink.begin(sink.part + 1)
            sink.part, sink.cut = sink.part + 1, False
        parent: RouteRef | None
        sums = rows.sums
        if ask.parent is not None:
            parent = self._mine(ask.parent)
            inherited = _check_parent(sink, parent, rows, ask.key)
            sums = _with_sum_of(ask.parent, rows, first_stage=parent.parts[0] == ask.parent.parts[0])
        else:
            parent = self._relative(sink, request, rows) if not ask.start else None
            inherited = np.empty(0, np.int64)
        _check_fresh(rows, request.began, inherited, ask.key)
        start = parent.rows if parent is not None else ask.start
        spans = spans_of_rows(rows.weight_versions, cached=request.cached, prompt=len(request.prompt))
        ref = sink.writer.add(
            ask.key,
            rows.routes[start:],
            rows.token_ids[start:],
            cut_spans(spans, start, len(rows)),
            parent=parent,
            aux=aux,
        )
        sink.records[ask.key] = (ref, rows.token_ids, sums, ask.start)
        if not ask.start:
            versions = np.concatenate([inherited, rows.weight_versions[len(inherited) :]])
            sink.recent[ref.parts[0].digest] = (rows.token_ids, versions)
            if len(sink.recent) > _MAX_RECENT:
                sink.recent.popitem(last=False)
        if parent is None and not ask.start:
            sink.remember(request.prompt.tobytes(), ref, rows.first(len(request.prompt)))

    def refuse(self, name: str, key: str, error: MoeRLError) -> None:
        """Remember why a request, or a whole shard on a failed disk, has no record."""
        with self._lock:
            if isinstance(error, DiskError):
                self._lost.setdefault(name, error)
            self._refused[name, key] = str(error)
            if len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def publish(
        self,
        name: str,
        sequences: Mapping[str, Sequence[int]],
        aborted: Sequence[str] = (),
        keep_open: bool = False,
        cut: bool = False,
    ) -> Future[dict[str, RouteRef]]:
        """Begin publishing a shard, see Recorder.publish. The writing thread does it after the shard's records."""
        if (sink := self._open.get(name)) is None:
            self.check()
            if (lost := self._lost.get(name)) is not None:
                raise lost
            with self._lock:
                reasons = [reason for (shard, _), reason in self._refused.items() if shard == name]
            raise RequestRefused(
                "Routes were requested but nothing was recorded",
                where={"shard": name},
                got=reasons[:1] or None,
                fault="nothing",
            )
        self.hand_over()
        work = partial(self._publish, name, sink, sequences, aborted, keep_open, cut)
        sink.last = publication = self._thread.submit(work, 0)
        return publication

    def _publish(
        self,
        name: str,
        sink: _Sink,
        sequences: Mapping[str, Sequence[int]],
        aborted: Sequence[str],
        keep_open: bool,
        cut: bool,
    ) -> dict[str, RouteRef]:
        """Publish a shard or its records so far, or return references only, in the writing thread, after all its
        records are written."""
        self.check()
        if (lost := self._lost.get(name)) is not None:
            if cut:  # the disk may have room for another part
                with self._lock:
                    del self._lost[name]
                sink.forget()
                sink.cut = True
            raise lost
        claims = [(key, np.asarray(ids, np.int64)) for key, ids in sequences.items() if len(ids)]
        refs = {key: self._claim(name, sink, key, ids) for key, ids in claims}
        for key in aborted:
            if not sink.cut and refs[key].parts[0].shard == sink.writer.name:  # a published part cannot be marked
                sink.writer.mark_aborted(key)
        if keep_open and not cut:
            for key in sequences:
                sink.records.pop(key, None)
            return refs
        try:
            if not sink.cut:
                sink.writer.publish()
            sink.cut = True
        except DiskError as error:
            self.refuse(name, "", error)  # a writer whose disk failed leaves nothing behind
            raise
        finally:
            if not keep_open:
                del self._open[name]
        return refs

    def abandon_all(self) -> None:
        """Drop all unpublished shards."""
        for name in list(self._open):
            self.abandon(name)

    def abandon(self, name: str) -> None:
        """Drop an unpublished shard, if it exists."""
        if (sink := self._open.get(name)) is not None:
            sink.dropped = True
            sink.wait()
            sink.writer.abandon()  # has no effect on a shard that was being published
            self._open.pop(name, None)
        self._lost.pop(name, None)

    def _claim(self, name: str, sink: _Sink, key: str, wanted: np.ndarray) -> RouteRef:
        """Return the record of a sequence after checking its tokens. An engine may have forwarded one extra token."""
        if key not in sink.records:
            reason = self._refused.get((name, key))
            raise RequestRefused(
                "A sequence was not recorded",
                where={"request": key, "shard": name},
                got=reason or "no rows",
                fault="not recorded",
            )
        ref, token_ids, sums, start = sink.records[key]
        if len(token_ids) < len(wanted):
            raise RequestRefused(
                "The engine did not record every forwarded token",
                where={"request": key},
                got=f"{len(token_ids)} rows",
                expected=len(wanted),
                do="check the patch series: moe-rl patch --check",
            )
        wrong = np.flatnonzero(token_ids[: len(wanted)] != wanted)
        if wrong.size:
            raise RequestRefused(
                "The engine recorded another token than it returned",
                where={"request": key, "position": wrong[0]},
                got=int(token_ids[wrong[0]]),
                expected=int(wanted[wrong[0]]),
                do="check the patch series: moe-rl patch --check",
                fault="another token",
            )
        return RouteRef(key, len(wanted) - start, ref.parts, start, total(key, sums[start : len(wanted)]))

    def _relative(self, sink: _Sink, request: Recorded, rows: Rows) -> RouteRef | None:
        """Return the leading rows that this sequence shares with a record of the same prompt, so that they are stored
        once.

        Not used with pipeline stages: each stage sees only its own layers, but all must share the same rows.
        """
        if self._suffix:
            return None
        family = sink.families.get(request.prompt.tobytes())
        if family is None:
            return None
        ref, theirs = family
        most = min(len(rows), len(theirs))
        same = (
            (rows.token_ids[:most] == theirs.token_ids[:most])
            & (rows.weight_versions[:most] == theirs.weight_versions[:most])
            & (rows.routes[:most] == theirs.routes[:most]).all((1, 2))
        )
        shared = most if same.all() else int(np.argmin(same))
        # Every record must store at least one row.
        shared = min(shared, len(rows) - 1)
        return RouteRef(ref.key, shared, ref.parts) if shared * self._spec.row_bytes >= _MIN_SHARED_BYTES else None

    def _mine(self, parent: RouteRef) -> RouteRef:
        """Return the reference to this worker's part of a record: each pipeline stage continues its own part."""
        parts = [part for part in parent.parts if part.shard.endswith(self._suffix)]
        if len(parts) != 1:
            raise TraceError(
                "the parent of a request was recorded with a different pipeline layout",
                where={"record": parent.key},
                got=", ".join(part.shard for part in parent.parts),
                expected=f"one shard that ends in {self._suffix!r}",
            )
        return RouteRef(parent.key, parent.rows, tuple(parts))


def _with_sum_of(parent: RouteRef, rows: Rows, *, first_stage: bool) -> np.ndarray:
    """Return the rows' sums, using the parent's sums for the parent's rows.

    This request may have computed the parent's rows again with other routes, which are not stored. The parent's sums
    are over all pipeline stages, so only the first stage counts them.
    """
    sums = rows.sums.copy()
    sums[: parent.rows] = 0
    if parent.rows and first_stage:
        sums[0] = rows_total(parent)
    return sums


def _check_fresh(rows: Rows, began: int, inherited: np.ndarray, key: str) -> None:
    """Refuse rows that the prefix cache kept from older weights than those at which the request began.

    The keys of such rows come from the older weights too. Rows shared with the parent may be as old as the parent's,
    whose versions [R] are `inherited`: the request then continues with the keys that the parent's later tokens attended
    to.
    """
    older = rows.weight_versions < began
    older[: len(inherited)] &= rows.weight_versions[: len(inherited)] != inherited
    if older.any():
        position = int(np.argmax(older))
        raise EngineError(
            "Rows are older than the weights at which their request began",
            where={"request": key, "position": position},
            got=f"weight version {rows.weight_versions[position]}, {int(older.sum())} rows",
            expected=f"weight version {began}",
            do="share cached prefixes within one version: salt them with it, or empty the cache after an update",
            fault="stale prefix cache",
        )


def _check_parent(sink: _Sink, parent: RouteRef, rows: Rows, key: str) -> np.ndarray:
    """Refuse a request that does not continue its parent. Returns the weight versions [R] of the parent's rows."""
    known = sink.recent.get(parent.parts[0].digest)
    if known is None:
        record = sink.writer.store.read(parent, layers=())
        known = record.token_ids, versions_of_rows(record.spans)
    parent_tokens, versions = (array[: parent.rows] for array in known)
    mine = rows.token_ids[: len(parent_tokens)]
    wrong = np.flatnonzero(mine != parent_tokens[: len(mine)])
    if wrong.size or len(mine) < len(parent_tokens):
        position = int(wrong[0]) if wrong.size else len(mine)
        raise TraceError(
            "a sequence does not continue its parent",
            where={"request": key, "parent": parent.key, "position": position},
            got=int(mine[position]) if position < len(mine) else "the end",
            expected=int(parent_tokens[position]),
            do="give the whole dialogue so far as the prompt",
        )
    return versions
