"""Trace shards that are being filled: rows of finished requests in, references out.

A sink is one shard in the making. Records are appended as requests finish; what stays in memory is their tokens, to
tell at the end whether they are the ones the sequence was made of, and what each row summed up to when it left the
engine's buffer: the reference says it of the rows that it names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_rl.errors import DiskError, EngineError, MoeRLError, TraceError, describe
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.trace.source_sum import rows_total, total
from moe_rl.trace.spans import cut_spans, spans_of_rows
from moe_rl.types import RouteRef
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.slots import Recorded, Rows

_MAX_OPEN = 64
_MAX_REFUSALS = 1024
# Bytes of ids that a record must have in common with its group's first to refer to it: the reference costs some too.
_MIN_SHARED_BYTES = 64
# Prompts whose rows are remembered, to be shared: the ones seen last.
_MAX_FAMILIES = 256


@dataclass(slots=True)
class _Sink:
    """store: the one that the shard is of. writer: of the shard. records: key -> reference to all stored rows, then of
    all rows the token ids and sums, then the first row to refer to. families: prompt -> a record that begins with it,
    and the prompt's rows."""

    store: TraceStore
    writer: ShardWriter
    records: dict[str, tuple[RouteRef, np.ndarray, np.ndarray, int]] = field(default_factory=dict)
    families: OrderedDict[bytes, tuple[RouteRef, Rows]] = field(default_factory=OrderedDict)


class Sinks:
    """All shards that one worker fills. root: folder of the store, or of several, as those of the runs that a server
    samples for. layers: those that it sees. suffix: what its shards' names end in."""

    def __init__(self, root: Path, spec: TraceSpec, *, layers: tuple[int, ...], suffix: str):
        self._root, self._spec, self._layers, self._suffix = root, spec, layers, suffix
        self._open: dict[str, _Sink] = {}
        self._refused: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lost: dict[str, DiskError] = {}

    def open(self, name: str, folder: str = "") -> _Sink:
        """Begin the shard `name` of the store in `folder` below the root; again, if it was begun before. Raises
        TraceError when it exists."""
        self.abandon(name)
        if len(self._open) >= _MAX_OPEN:
            raise TraceError(
                describe(
                    "too many shards are being filled",
                    where={"shard": name},
                    got=f"{len(self._open)} unpublished ones: {', '.join(sorted(self._open))[:120]}",
                    do="publish or abandon them",
                )
            )
        root = self._root / folder
        writer = ShardWriter(root, name + self._suffix, self._spec, layers=self._layers)
        sink = self._open[name] = _Sink(TraceStore(root), writer)
        return sink

    def add(self, request: Recorded, ask: RecordingRequest, rows: Rows, aux: Mapping[str, np.ndarray]) -> None:
        """Append the rows of a finished request to its sink, which is begun if need be. ask: the request's."""
        sink = self._open.get(ask.sink) or self.open(ask.sink)
        parent: RouteRef | None
        sums = rows.sums
        if ask.parent is not None:
            parent = self._mine(ask.parent)
            _check_parent(sink.store, parent, rows, ask.key)
            sums = _with_sum_of(ask.parent, rows, first_stage=parent.parts[0] == ask.parent.parts[0])
        else:
            parent = self._relative(sink, request, rows) if not ask.start else None
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
        if parent is None and not ask.start:
            sink.families[request.prompt.tobytes()] = (ref, rows.first(len(request.prompt)))
            if len(sink.families) > _MAX_FAMILIES:
                sink.families.popitem(last=False)

    def refuse(self, name: str, key: str, error: MoeRLError) -> None:
        """Remember why a request has no record; and of a whole shard, whose disk refused."""
        if isinstance(error, DiskError):
            self._lost.setdefault(name, error)
        self._refused[name, key] = str(error)
        if len(self._refused) > _MAX_REFUSALS:
            self._refused.popitem(last=False)

    def publish(self, name: str, sequences: Mapping[str, Sequence[int]], aborted: Sequence[str]) -> dict[str, RouteRef]:
        """See Recorder.publish."""
        if (lost := self._lost.get(name)) is not None:
            raise lost
        if name not in self._open:
            reasons = [reason for (sink, _), reason in self._refused.items() if sink == name]
            raise EngineError(
                describe(
                    "Routes were asked for but nothing was recorded",
                    where={"shard": name},
                    got=reasons[:1] or None,
                    fault="nothing",
                )
            )
        sink = self._open[name]
        refs = {key: self._claim(name, sink, key, np.asarray(ids, np.int64)) for key, ids in sequences.items()}
        for key in aborted:
            sink.writer.mark_aborted(key)
        # Published, or gone: a writer whose disk failed leaves nothing.
        del self._open[name]
        sink.writer.publish()
        return refs

    def abandon(self, name: str) -> None:
        """Drop a shard that was begun, if it was."""
        self._lost.pop(name, None)
        if (sink := self._open.pop(name, None)) is not None:
            sink.writer.abandon()

    def _claim(self, name: str, sink: _Sink, key: str, wanted: np.ndarray) -> RouteRef:
        """The record of a sequence, proven to be of its tokens. An engine may have forwarded a token too many."""
        if key not in sink.records:
            reason = self._refused.get((name, key))
            raise EngineError(
                describe(
                    "A sequence was not recorded",
                    where={"request": key, "shard": name},
                    got=reason or "no rows",
                    fault="not recorded",
                )
            )
        ref, token_ids, sums, start = sink.records[key]
        if len(token_ids) < len(wanted):
            raise EngineError(
                describe(
                    "The engine did not record every forwarded token",
                    where={"request": key},
                    got=f"{len(token_ids)} rows",
                    expected=len(wanted),
                    do="check the patch series: moe-rl patch --check",
                )
            )
        wrong = np.flatnonzero(token_ids[: len(wanted)] != wanted)
        if wrong.size:
            raise EngineError(
                describe(
                    "The engine recorded another token than it returned",
                    where={"request": key, "position": wrong[0]},
                    got=int(token_ids[wrong[0]]),
                    expected=int(wanted[wrong[0]]),
                    do="check the patch series: moe-rl patch --check",
                    fault="another token",
                )
            )
        return RouteRef(key, len(wanted) - start, ref.parts, start, total(key, sums[start : len(wanted)]))

    def _relative(self, sink: _Sink, request: Recorded, rows: Rows) -> RouteRef | None:
        """The first rows of a record of the same prompt, as many as this sequence shares: to store them once.

        Not with pipeline stages: each sees its own layers only, and what they store once must be the same rows.
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
        # Every record has rows of its own.
        shared = min(shared, len(rows) - 1)
        return RouteRef(ref.key, shared, ref.parts) if shared * self._spec.row_bytes >= _MIN_SHARED_BYTES else None

    def _mine(self, parent: RouteRef) -> RouteRef:
        """The reference to this worker's part of a record: every pipeline stage continues its own."""
        parts = [part for part in parent.parts if part.shard.endswith(self._suffix)]
        if len(parts) != 1:
            raise TraceError(
                describe(
                    "the parent of a request was recorded by another layout of the engine",
                    where={"record": parent.key},
                    got=", ".join(part.shard for part in parent.parts),
                    expected=f"one shard that ends in {self._suffix!r}",
                )
            )
        return RouteRef(parent.key, parent.rows, tuple(parts))


def _with_sum_of(parent: RouteRef, rows: Rows, *, first_stage: bool) -> np.ndarray:
    """The rows' sums, with those of a parent in place of the first ones: what this request computed again may have been
    routed otherwise, and is not stored. The parent's are of all pipeline stages: the first one counts them for all."""
    sums = rows.sums.copy()
    sums[: parent.rows] = 0
    if parent.rows and first_stage:
        sums[0] = rows_total(parent)
    return sums


def _check_parent(store: TraceStore, parent: RouteRef, rows: Rows, key: str) -> None:
    theirs = store.read(parent, layers=()).token_ids
    mine = rows.token_ids[: len(theirs)]
    wrong = np.flatnonzero(mine != theirs[: len(mine)])
    if wrong.size or len(mine) < len(theirs):
        at = int(wrong[0]) if wrong.size else len(mine)
        raise TraceError(
            describe(
                "a sequence does not continue its parent",
                where={"request": key, "parent": parent.key, "position": at},
                got=int(mine[at]) if at < len(mine) else "the end",
                expected=int(theirs[at]),
                do="give the whole dialogue so far as the prompt",
            )
        )
