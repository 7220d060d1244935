"""Packs one record as bytes: a frame with a head and sections. docs/reference/trace_format.md lists every byte.

    magic | varint body length | body | checksum of the body    <- the head; the checksum is the record's digest
    token blocks | chunks | expert counts | aux arrays          <- the sections, each with a checksum in the body

To read a slice, only the head and the sections of the slice are needed. Chunks are ordered by layer group, then token
block, so the layers of one pipeline stage are contiguous.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moe_rl.errors import TraceError
from moe_rl.trace.codec import encode_chunk
from moe_rl.trace.primitives import Cursor, pack_bytes, pack_ints, varint
from moe_rl.trace.record import MAX_ROWS, check_key, check_name
from moe_rl.trace.shard import ShardHeader
from moe_rl.types import Provenance, Span

if TYPE_CHECKING:
    from collections.abc import Buffer  # Python 3.12

MAGIC = b"MRF2"
MAX_HEAD = 1 << 20
MAX_DEPTH = 64
MAX_SPANS = 1 << 16
MAX_AUX = 64
MAX_AUX_BYTES = 1 << 26
# Counts are stored if a frame has at least this many rows per expert on average. For fewer rows, decoding is as fast
# without counts, and they would cost over 5% of the bytes.
COUNTS_FROM = 16

_AUX_NAME = re.compile(r"[a-z_]{1,64}", re.ASCII)
_AUX_DTYPES = tuple(
    np.dtype(name) for name in ("?", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4")
)
_CHECKSUM = 8


@dataclass(frozen=True, slots=True)
class FrameSection:
    """Describes a range of stored bytes in a frame. `kind` says how they are packed; `start` is relative to the
    frame."""

    kind: int
    start: int
    size: int
    checksum: int

    def of(self, frame: memoryview) -> memoryview:
        """Return these bytes of a frame."""
        return frame[self.start : self.start + self.size]


@dataclass(frozen=True, slots=True)
class Aux:
    """Describes a named array of a record."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    section: FrameSection


@dataclass(frozen=True, slots=True)
class Parent:
    """Names the record that a frame continues.

    Attributes:
        shard: "" means the frame's own shard.
        rows: the parent's rows that come before the frame's own rows.
        depth: 1 if the parent itself continues no record.
    """

    shard: str
    digest: bytes
    rows: int
    depth: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Holds everything a head says. `own_rows` are stored here; `chunks` are by layer group, then token block."""

    key: str
    own_rows: int
    spans: tuple[Span, ...]
    parent: Parent | None
    tokens: tuple[FrameSection, ...]
    chunks: tuple[FrameSection, ...]
    counts: FrameSection | None
    aux: tuple[Aux, ...]
    digest: bytes
    head_bytes: int
    size: int

    @property
    def rows(self) -> int:
        """Return the number of rows of the whole sequence."""
        return self.own_rows + (self.parent.rows if self.parent else 0)

    @property
    def depth(self) -> int:
        return self.parent.depth if self.parent else 0


def build_frame(
    shard: ShardHeader,
    key: str,
    routes: np.ndarray,
    token_ids: np.ndarray,
    spans: tuple[Span, ...],
    parent: Parent | None,
    aux: Mapping[str, np.ndarray],
) -> bytes:
    """Build the frame. The caller has checked all arguments but `aux`.

    Args:
        shard: header of the shard that the frame goes into.
        key: the record's key.
        routes: [T, L, K] of the shard's layers.
        token_ids: [T] int32.
        spans: canonical spans over the T rows.
        parent: the record that this one continues.
        aux: named arrays to store with the record.
    """
    rows, block = len(routes), shard.token_block
    routes = np.ascontiguousarray(routes, dtype=shard.spec.dtype)
    sections: list[bytes] = []
    body = bytearray(varint(len(key)) + key.encode("ascii") + varint(len(spans)))
    for span in spans:
        body += varint(span.rows << 2 | span.provenance) + varint(span.weight_version)
    body += varint(parent.depth if parent else 0)
    if parent:
        body += varint(parent.rows) + parent.digest + varint(len(parent.shard)) + parent.shard.encode("ascii")
    for start in range(0, rows, block):
        ids = token_ids[start : start + block]
        kind, data = pack_ints(ids)
        body += varint(len(data) << 3 | kind) + _checksum(np.ascontiguousarray(ids, "<i4"))
        sections.append(data)
    experts, counts = shard.spec.num_experts, None
    if rows * shard.spec.top_k >= COUNTS_FROM * experts:
        counts = np.zeros((len(shard.layers), experts), np.int64)
    for first, last in shard.groups:
        for start in range(0, rows, block):
            chunk = routes[start : start + block, first:last]
            counted = None if counts is None else counts[first:last]
            kind, data = encode_chunk(chunk, experts, keep_order=shard.keep_order, counts=counted)
            body += varint(kind) + varint(len(data)) + _checksum(data)
            sections.append(data)
    if counts is not None:
        kind, data = pack_ints(counts.reshape(-1))
        body += varint(len(data) << 3 | kind) + _checksum(data)
        sections.append(data)
    else:
        body += varint(0)
    body += varint(len(aux))
    for name, array in aux.items():
        array = _check_aux(name, array, key)
        kind, data = pack_bytes(array.tobytes())
        body += varint(len(name)) + name.encode("ascii") + bytes([_AUX_DTYPES.index(array.dtype), array.ndim])
        body += b"".join(map(varint, array.shape)) + varint(len(data) << 1 | kind) + _checksum(data)
        sections.append(data)
    head = MAGIC + varint(len(body)) + body
    if len(head) + _CHECKSUM > MAX_HEAD or len(spans) > MAX_SPANS or len(aux) > MAX_AUX:
        raise TraceError(
            "record has too many chunks, spans or aux arrays",
            where={"shard": shard.name, "record": key},
            got=f"a head of {len(head)} bytes, {len(spans)} spans, {len(aux)} arrays",
            expected=f"a head of at most {MAX_HEAD} bytes, {MAX_SPANS} spans, {MAX_AUX} arrays",
            do="use a larger token_block or layer_group",
        )
    return b"".join([head, _digest(shard, body), *sections])


def head_size(data: bytes | memoryview) -> int:
    """Return the bytes of the head of the frame that starts with `data`; 14 bytes are enough. Raises TraceError."""
    if bytes(data[:4]) != MAGIC:
        raise TraceError("no frame begins here")
    cursor = Cursor(data[:14], 4)
    size = cursor.varint() + cursor.at + _CHECKSUM
    if size > MAX_HEAD:
        raise TraceError("a frame has an impossible header")
    return size


def digest_of(data: bytes, head_bytes: int) -> bytes:
    """Return the digest of the frame that starts with `data` and has a head of `head_bytes` bytes."""
    return data[head_bytes - _CHECKSUM : head_bytes]


def parse_head(shard: ShardHeader, data: bytes | memoryview) -> Frame:
    """Parse exactly one head. Raises TraceError with the fault; the caller adds the place."""
    size = head_size(data)
    if size != len(data):
        raise TraceError(f"a frame has a header of {size} bytes where {len(data)} are expected")
    outer = Cursor(data, 4)
    outer.varint()
    body, digest = bytes(data[outer.at : -_CHECKSUM]), bytes(data[-_CHECKSUM:])
    if _digest(shard, body) != digest:
        raise TraceError("a frame's header is damaged: the checksum differs")
    return _parse_body(shard, body, digest, size)


def _parse_body(shard: ShardHeader, body: bytes, digest: bytes, head_bytes: int) -> Frame:
    cursor, end = Cursor(body), head_bytes

    def section(size: int, kind: int) -> FrameSection:
        nonlocal end
        end += size
        return FrameSection(kind, end - size, size, int.from_bytes(cursor.take(_CHECKSUM), "big"))

    key = check_key(cursor.text(), "a record key of it")
    spans: list[Span] = []
    for _ in range(_few(cursor, body, MAX_SPANS)):
        first, version = cursor.varint(), cursor.varint()
        if first < 4 or first & 3 == 3:
            raise TraceError("a span is impossible")
        span = Span(first >> 2, version, Provenance(first & 3))
        if spans and (span.weight_version, span.provenance) == (spans[-1].weight_version, spans[-1].provenance):
            raise TraceError("a frame has one span written as two")
        spans.append(span)
    own_rows = sum(span.rows for span in spans)
    parent = None
    if depth := cursor.varint():
        rows, parent_digest, name = cursor.varint(), cursor.take(8), cursor.text()
        if depth > MAX_DEPTH:
            raise TraceError(f"a record continues {depth} others, at most {MAX_DEPTH} are allowed")
        parent = Parent(check_name(name, "a parent shard of it") if name else "", parent_digest, rows, depth)
    if own_rows + (parent.rows if parent else 0) > MAX_ROWS:
        raise TraceError(f"a record has more than {MAX_ROWS} rows")
    blocks = -(-own_rows // shard.token_block)
    if blocks * (len(shard.groups) + 1) * (_CHECKSUM + 1) > len(body):
        raise TraceError("a frame does not list its chunks")
    tokens, chunks = [], []
    for _ in range(blocks):
        packed = cursor.varint()
        tokens.append(section(packed >> 3, packed & 7))
    for _ in range(blocks * len(shard.groups)):
        kind = cursor.varint()
        chunks.append(section(cursor.varint(), kind))
    counts = None
    if packed := cursor.varint():
        counts = section(packed >> 3, packed & 7)
    aux: list[Aux] = []
    for _ in range(_few(cursor, body, MAX_AUX)):
        name, (code, ndim) = cursor.text(), cursor.take(2)
        shape = tuple(cursor.varint() for _ in range(ndim))
        if not _AUX_NAME.fullmatch(name) or code >= len(_AUX_DTYPES) or ndim > 3:
            raise TraceError("an aux array is impossible")
        if any(name == other.name for other in aux) or math.prod(shape) * _AUX_DTYPES[code].itemsize > MAX_AUX_BYTES:
            raise TraceError("an aux array is impossible")
        packed = cursor.varint()
        aux.append(Aux(name, _AUX_DTYPES[code], shape, section(packed >> 1, packed & 1)))
    if not cursor.done:
        raise TraceError("a frame's header has more than it should")
    return Frame(
        key=key,
        own_rows=own_rows,
        spans=tuple(spans),
        parent=parent,
        tokens=tuple(tokens),
        chunks=tuple(chunks),
        counts=counts,
        aux=tuple(aux),
        digest=digest,
        head_bytes=head_bytes,
        size=end,
    )


def checksum(data: Buffer) -> int:
    """Return the xxh3-64 of a section's stored bytes; for a token block, of its ids as little-endian int32."""
    return xxhash.xxh3_64_intdigest(data)


def _checksum(data: Buffer) -> bytes:
    return xxhash.xxh3_64_digest(data)


def _digest(shard: ShardHeader, body: bytes | bytearray) -> bytes:
    return xxhash.xxh3_64_digest(shard.context + body)


def _few(cursor: Cursor, body: bytes, most: int) -> int:
    """Read a count of items of at least two bytes each. Refuse more than `most`, or more than the body can hold."""
    count = cursor.varint()
    if count > most or 2 * count > len(body):
        raise TraceError("a frame's header lists more than it holds")
    return count


def _check_aux(name: str, array: np.ndarray, key: str) -> np.ndarray:
    dtype = array.dtype.newbyteorder("<") if isinstance(array, np.ndarray) else None
    if (
        not isinstance(name, str)
        or not _AUX_NAME.fullmatch(name)
        or dtype not in _AUX_DTYPES
        or array.ndim > 3
        or array.nbytes > MAX_AUX_BYTES
    ):
        raise TraceError(
            "aux array cannot be stored",
            where={"record": key, "array": name},
            got=f"{array.dtype} of shape {array.shape}" if dtype else type(array).__name__,
            expected=f"name of a-z and _; bool, integers, float16/32; 0 to 3 dimensions, {MAX_AUX_BYTES} bytes",
        )
    return array.astype(dtype, order="C", copy=False)
