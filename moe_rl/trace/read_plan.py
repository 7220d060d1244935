"""Which stored bytes a read needs and where they go: sections are collected, fetched in file order, checked, decoded.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from moe_rl.errors import TraceError, describe
from moe_rl.trace.codec import decode_chunk
from moe_rl.trace.frame import Section, checksum
from moe_rl.trace.library import Found, Reading, Segment
from moe_rl.trace.primitives import unpack_ints


@dataclass(slots=True)
class _Chunk:
    """One chunk [T', L', K]. copies: rows and layers of it, and the [t, l, K] and columns that they go to."""

    found: Found
    section: Section
    shape: tuple[int, int, int]
    copies: list[tuple[slice, list[int], np.ndarray, list[int]]] = field(default_factory=list)

    def use(self, data: memoryview) -> None:
        header = self.found.shard.header
        spec, order = header.spec, header.keep_order
        if checksum(data) != self.section.checksum:
            raise TraceError("the checksum of a chunk differs")
        if len(self.copies) == 1:
            rows, layers, out, columns = self.copies[0]
            begin, end = columns[0], columns[-1] + 1
            whole = rows == slice(0, self.shape[0]) and len(layers) == self.shape[1] == end - begin
            if whole and out.dtype == spec.dtype:
                into = out[:, begin:end]
                decode_chunk(self.section.kind, data, self.shape, spec.num_experts, keep_order=order, out=into)
                return
        chunk = decode_chunk(self.section.kind, data, self.shape, spec.num_experts, keep_order=order)
        for rows, layers, out, columns in self.copies:
            out[:, columns] = chunk[rows, layers]


@dataclass(slots=True)
class _TokenBlock:
    """The ids of one token block [T']. copies: rows of it, and the [t] that they go to."""

    found: Found
    section: Section
    rows: int
    copies: list[tuple[slice, np.ndarray]] = field(default_factory=list)

    def use(self, data: memoryview) -> None:
        ids = unpack_ints(self.section.kind, data, self.rows)
        if checksum(ids) != self.section.checksum:
            raise TraceError("the digest of a token block differs")
        for rows, out in self.copies:
            out[...] = ids[rows]


class Plan:
    """The sections of one call. A section that several reads share, as of a group's prompt, is decoded once."""

    def __init__(self, reading: Reading):
        self._reading = reading
        # By shard, frame and number in the frame, which is file order; offsets of empty sections are not unique.
        self._sections: dict[tuple[str, int, int], _Chunk | _TokenBlock] = {}

    def routes(
        self, segments: Iterable[Segment], columns: Mapping[int, int], rows: tuple[int, int], out: np.ndarray
    ) -> None:
        """Have out [T, L, K] filled with rows [first, last) of a sequence: of the layers in `columns`, each into its
        column. Other columns are left alone."""
        for found, own, block, taken, at in _blocks(segments, rows):
            header, blocks = found.shard.header, len(found.frame.tokens)
            for group, (first, last) in enumerate(header.groups):
                layers = [i for i, layer in enumerate(header.layers[first:last]) if layer in columns]
                if layers:
                    number = group * blocks + block
                    section = found.frame.chunks[number]
                    shape = (own, last - first, header.spec.top_k)
                    chunk = self._sections.setdefault(_place(found, blocks + number), _Chunk(found, section, shape))
                    into = [columns[header.layers[first + i]] for i in layers]
                    chunk.copies.append((taken, layers, out[at : at + taken.stop - taken.start], into))

    def tokens(self, segments: Iterable[Segment], rows: tuple[int, int], out: np.ndarray) -> None:
        """Have out [T] filled with the token ids of rows [first, last) of a sequence."""
        for found, own, block, taken, at in _blocks(segments, rows):
            section = found.frame.tokens[block]
            tokens = self._sections.setdefault(_place(found, block), _TokenBlock(found, section, own))
            tokens.copies.append((taken, out[at : at + taken.stop - taken.start]))

    def run(self) -> None:
        """Fetch, check and decode everything. Raises TraceError naming shard, record and bytes."""
        by_shard = defaultdict(list)
        for (shard, *_), section in sorted(self._sections.items(), key=lambda item: item[0]):
            if section.found.page is not None:
                _use(section, _cut(section.found.page, section.section))
            else:
                by_shard[shard].append((section.found.at + section.section.start, section))
        for shard, sections in by_shard.items():
            ranges = [(at, at + section.section.size) for at, section in sections]
            for (_, section), data in zip(sections, self._reading.fetch(shard, ranges), strict=True):
                _use(section, data)


def fetch_section(reading: Reading, found: Found, section: Section, what: str) -> memoryview:
    """The stored bytes of one section with a checksum of its own, checked. what: its name, for the message."""
    if found.page is not None:
        data = _cut(found.page, section)
    else:
        at = found.at + section.start
        (data,) = reading.fetch(found.shard.header.name, [(at, at + section.size)])
    if checksum(data) != section.checksum:
        raise damaged(found, section, f"the checksum of its {what} differs")
    return data


def damaged(found: Found, section: Section, fault: str) -> TraceError:
    """The error of a section that is not what its record says."""
    at = found.at + section.start
    return TraceError(
        describe(
            "record is damaged",
            where=f"shard {found.shard.header.name}, record {found.frame.key}, bytes {at} to {at + section.size}",
            got=fault,
            do="drop the sequence or sample it again, and check the disk; other records stay readable",
        )
    )


def _blocks(segments: Iterable[Segment], rows: tuple[int, int]) -> Iterable[tuple[Found, int, int, slice, int]]:
    """Per token block touched: record, rows of the block, its number, the rows wanted of it, where they go."""
    for segment in segments:
        size, own = segment.found.shard.header.token_block, segment.found.frame.own_rows
        first = max(rows[0] - segment.first, 0)
        last = min(rows[1] - segment.first, segment.rows)
        if first >= last:  # also when a block that it takes some rows of holds the first
            continue
        for start in range(first - first % size, last, size):
            begin, end = max(first, start), min(last, start + size)
            taken = slice(begin - start, end - start)
            yield segment.found, min(own, start + size) - start, start // size, taken, segment.first + begin - rows[0]


def _place(found: Found, number: int) -> tuple[str, int, int]:
    return found.shard.header.name, found.at, number


def _cut(page: memoryview, section: Section) -> memoryview:
    return page[section.start : section.start + section.size]


def _use(section: _Chunk | _TokenBlock, data: memoryview) -> None:
    try:
        section.use(data)
    except TraceError as error:
        raise damaged(section.found, section.section, str(error)) from error
