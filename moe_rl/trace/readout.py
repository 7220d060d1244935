"""Turns references into arrays.

First, the records that the references name are found, and their parts are compared with each other. Then the needed
bytes are fetched in file order, checked and decoded.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.codec import decode_chunk
from moe_rl.trace.frame import FrameSection, checksum
from moe_rl.trace.library import Found, Reading, RowSegment, damaged
from moe_rl.trace.primitives import unpack_ints
from moe_rl.trace.record import MAX_ROWS, TraceSpec, check_key
from moe_rl.trace.spans import cut_spans, merge_spans
from moe_rl.types import RoutePart, RouteRef, Span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """Holds one shard's part: the layers that the shard has, and the segments of the reference's rows, oldest first."""

    part: RoutePart
    layers: tuple[int, ...]
    segments: list[RowSegment]


@dataclass(frozen=True, slots=True)
class Joined:
    """Holds the parts of a reference needed for some layers. `columns` maps a layer to its column in an array."""

    parts: list[JoinedPart]
    layers: tuple[int, ...]
    columns: dict[int, int]
    spec: TraceSpec
    spans: tuple[Span, ...]
    aborted: bool


def join(
    reading: Reading, refs: Sequence[RouteRef], layers: tuple[int, ...] | None, *, complete: bool = True
) -> list[Joined]:
    """Find the records that the references name. Parts without a wanted layer are skipped.

    Args:
        reading: opens the shards.
        refs: the references.
        layers: increasing global numbers; None: all layers of the model, or all that exist when not `complete`.
        complete: whether all layers of the model must exist when `layers` is None.

    Raises:
        TraceError: a record is missing or damaged, a layer is in no part or in two, or the parts are from different
            sequences.
    """
    shares = [_parts_of(reading, ref, layers, complete) for ref in refs]
    reading.find((part, _where(ref, part)) for ref, (parts, _) in zip(refs, shares, strict=True) for part in parts)
    return [_join(reading, ref, *share) for ref, share in zip(refs, shares, strict=True)]


def _parts_of(
    reading: Reading, ref: RouteRef, layers: tuple[int, ...] | None, complete: bool
) -> tuple[list[RoutePart], tuple[int, ...]]:
    """Return the parts that have a wanted layer, and the wanted layers."""
    check_key(ref.key)
    if not ref.parts or not (isinstance(ref.rows, int) and 0 <= ref.rows <= MAX_ROWS):
        raise TraceError(
            "reference is impossible",
            where={"record": ref.key},
            got=f"{ref.rows} rows in {len(ref.parts)} shards",
            expected=f"0 to {MAX_ROWS} rows in at least one",
        )
    owner: dict[int, RoutePart] = {}
    for part in ref.parts:
        header = reading.shard(part.shard, _where(ref, part)).header
        first = reading.shard(ref.parts[0].shard, _where(ref, part)).header
        if (header.spec, header.keep_order) != (first.spec, first.keep_order):
            raise TraceError(
                "parts of a record are of different models or orders",
                where={"record": ref.key},
                got=f"shards {first.name} and {header.name}",
                fault="models",
            )
        for layer in header.layers:
            if layer in owner:
                raise TraceError(
                    "two parts of a record have the same layer",
                    where={"record": ref.key, "layer": layer},
                    got=f"shards {owner[layer].shard} and {part.shard}",
                    do="give every pipeline stage its own layers",
                    fault="layer twice",
                )
            owner[layer] = part
    if layers is None:
        layers = first.spec.moe_layers if complete else tuple(sorted(owner))
    missing = [layer for layer in layers if layer not in owner]
    if missing or list(layers) != sorted(set(layers)):
        raise TraceError(
            "a layer is in no part of the record" if missing else "layers are not increasing",
            where={
                "shard": ", ".join(part.shard for part in ref.parts),
                "record": ref.key,
                **({"layer": missing[0]} if missing else {}),
            },
            got=f"layers {str(list(layers))[:80]}",
            expected=f"some of {str(sorted(owner))[:80]}",
            do="join the parts of all pipeline stages, and ask for MoE layers by their global number",
            fault="layer in no part" if missing else "layer order",
        )
    wanted = {owner[layer] for layer in layers}
    return [part for part in ref.parts if part in wanted] or [ref.parts[0]], layers


def _join(reading: Reading, ref: RouteRef, parts: list[RoutePart], layers: tuple[int, ...]) -> Joined:
    shares = []
    for part in parts:
        record = reading.tip(part)
        if record.frame.key != ref.key:
            raise TraceError(
                "reference names another request than its record",
                where=_where(ref, part),
                got=f"record of {record.frame.key}",
                do="sample the sequence again",
                fault="another request",
            )
        shares.append(JoinedPart(part, record.shard.header.layers, reading.chain(part, ref.rows, _where(ref, part))))
    share = shares[0]
    for other in shares[1:]:
        for what, differ in (
            ("spans", _spans(share) != _spans(other)),
            ("tokens", not _same_tokens(reading, share, other, ref.rows)),
        ):
            if differ:
                raise TraceError(
                    f"parts of a record have different {what}",
                    where={"record": ref.key},
                    got=f"shards {share.part.shard} and {other.part.shard}",
                    do="join only what the stages of one engine recorded of one request",
                    fault=what,
                )
    return Joined(
        parts=shares,
        layers=layers,
        columns={layer: column for column, layer in enumerate(layers)},
        spec=reading.tip(parts[0]).shard.header.spec,
        spans=_spans(share),
        aborted=any(reading.tip(part).aborted for part in parts),
    )


def _spans(part: JoinedPart) -> tuple[Span, ...]:
    return merge_spans(
        span for segment in part.segments for span in cut_spans(segment.found.frame.spans, 0, segment.rows)
    )


def _same_tokens(reading: Reading, share: JoinedPart, other: JoinedPart, rows: int) -> bool:
    """Compare tokens by digest if the parts are cut alike, as one engine's parts are; otherwise token by token."""

    def cut(part: JoinedPart) -> list:
        return [
            (s.first, s.rows, s.found.shard.header.token_block, [block.checksum for block in s.found.frame.tokens])
            for s in part.segments
        ]

    ids, readout = np.empty((2, rows), "<i4"), Readout(reading)
    if alike := cut(share) == cut(other):
        return alike
    for part, out in zip((share, other), ids, strict=True):
        readout.tokens(part.segments, (0, rows), out)
    readout.run()
    return np.array_equal(*ids)


def _where(ref: RouteRef, part: RoutePart) -> About:
    return {"shard": part.shard, "record": ref.key}


@dataclass(slots=True)
class _WantedSection:
    """Describes a section to read.

    Attributes:
        shape: decoded shape, [T'] for a token block, [T', L', K] for a chunk.
        copies: which part of the decoded section goes where: out[to] = decoded[part].
    """

    found: Found
    section: FrameSection
    shape: tuple[int] | tuple[int, int, int]
    copies: list[tuple[Any, np.ndarray, Any]] = field(default_factory=list)


class Readout:
    """Collects the sections of one call. A section that several reads share, such as a group's prompt, is decoded
    once."""

    def __init__(self, reading: Reading):
        self._reading = reading
        # Keyed by shard, frame and number in the frame, which is file order; empty sections share an offset.
        self._sections: dict[tuple[str, int, int], _WantedSection] = {}

    def routes(
        self, segments: Iterable[RowSegment], columns: Mapping[int, int], rows: tuple[int, int], out: np.ndarray
    ) -> None:
        """Plan to fill out [T, L, K] with rows [first, last) of a sequence.

        `columns` maps each wanted layer to its column of `out`; other columns are not touched.
        """
        for record, block_rows, block, taken, start in _blocks(segments, rows):
            header, blocks = record.shard.header, len(record.frame.tokens)
            for group, (first, last) in enumerate(header.groups):
                layers = [i for i, layer in enumerate(header.layers[first:last]) if layer in columns]
                if layers:
                    number = group * blocks + block
                    shape = (block_rows, last - first, header.spec.top_k)
                    chunk = self._section(record, blocks + number, record.frame.chunks[number], shape)
                    into = [columns[header.layers[first + i]] for i in layers]
                    # With slices on both sides, a chunk can be decoded in place.
                    part = (taken, slice(None) if len(layers) == last - first else layers)
                    to = slice(into[0], into[-1] + 1) if into[-1] - into[0] == len(into) - 1 else into
                    chunk.copies.append((part, out[start : start + taken.stop - taken.start], (slice(None), to)))

    def tokens(self, segments: Iterable[RowSegment], rows: tuple[int, int], out: np.ndarray) -> None:
        """Plan to fill out [T] with the token ids of rows [first, last) of a sequence."""
        for record, block_rows, block, taken, start in _blocks(segments, rows):
            tokens = self._section(record, block, record.frame.tokens[block], (block_rows,))
            tokens.copies.append((taken, out[start : start + taken.stop - taken.start], slice(None)))

    def run(self) -> None:
        """Fetch, check and decode everything. Raises TraceError with shard, record and bytes."""
        for wanted, data in self._fetched():
            section, header = wanted.section, wanted.found.shard.header
            into = _in_place(wanted, header.spec.dtype)
            try:
                if len(wanted.shape) == 1:
                    decoded = unpack_ints(section.kind, data, wanted.shape[0])
                    if checksum(decoded) != section.checksum:
                        raise TraceError("the checksum of a token block differs")
                else:
                    if checksum(data) != section.checksum:
                        raise TraceError("the checksum of a chunk differs")
                    decoded = decode_chunk(
                        section.kind,
                        data,
                        wanted.shape,
                        header.spec.num_experts,
                        keep_order=header.keep_order,
                        out=into,
                    )
            except TraceError as error:
                raise _damaged(wanted.found, section, str(error)) from error
            if into is None:
                for part, out, to in wanted.copies:
                    out[to] = decoded[part]

    def _fetched(self) -> Iterator[tuple[_WantedSection, memoryview]]:
        """Yield every section with its stored bytes in file order; sections read together with their head come
        first."""
        by_shard = defaultdict(list)
        for (shard, *_), wanted in sorted(self._sections.items(), key=lambda item: item[0]):
            if wanted.found.page is not None:
                yield wanted, wanted.section.of(wanted.found.page)
            else:
                by_shard[shard].append(wanted)
        for shard, sections in by_shard.items():
            starts = [wanted.found.at + wanted.section.start for wanted in sections]
            ranges = [(start, start + wanted.section.size) for start, wanted in zip(starts, sections, strict=True)]
            yield from zip(sections, self._reading.fetch(shard, ranges), strict=True)

    def _section(
        self, record: Found, number: int, section: FrameSection, shape: tuple[int] | tuple[int, int, int]
    ) -> _WantedSection:
        place = (record.shard.header.name, record.at, number)
        return self._sections.setdefault(place, _WantedSection(record, section, shape))


def unpacked(reading: Reading, record: Found, section: FrameSection, what: str, unpack: Callable[[memoryview], T]) -> T:
    """Return one section's stored bytes after checking them. `what` names the section in the message."""
    if record.page is not None:
        data = section.of(record.page)
    else:
        start = record.at + section.start
        (data,) = reading.fetch(record.shard.header.name, [(start, start + section.size)])
    if checksum(data) != section.checksum:
        raise _damaged(record, section, f"the checksum of its {what} differs")
    try:
        return unpack(data)
    except TraceError as error:
        raise _damaged(record, section, str(error)) from error


def _damaged(record: Found, section: FrameSection, fault: str) -> TraceError:
    return damaged(record.shard.header.name, record.frame.key, record.at + section.start, section.size, fault)


def _blocks(segments: Iterable[RowSegment], rows: tuple[int, int]) -> Iterable[tuple[Found, int, int, slice, int]]:
    """Yield for each token block touched: record, rows of the block, its number, the wanted rows, their destination."""
    for segment in segments:
        size, total = segment.found.shard.header.token_block, segment.found.frame.own_rows
        first = max(rows[0] - segment.first, 0)
        last = min(rows[1] - segment.first, segment.rows)
        if first >= last:  # a segment that ends before the first wanted row
            continue
        for start in range(first - first % size, last, size):
            begin, end = max(first, start), min(last, start + size)
            taken = slice(begin - start, end - start)
            yield segment.found, min(total, start + size) - start, start // size, taken, segment.first + begin - rows[0]


def _in_place(wanted: _WantedSection, dtype: np.dtype) -> np.ndarray | None:
    """Return the array part to decode a chunk into without a copy; None unless all of it is wanted once,
    contiguously."""
    if len(wanted.shape) == 1 or len(wanted.copies) != 1:
        return None
    (rows, layers), out, (_, columns) = wanted.copies[0]
    whole = rows == slice(0, wanted.shape[0]) and layers == slice(None) and isinstance(columns, slice)
    return out[:, columns] if whole and out.dtype == dtype else None
