"""Reads and writes shard headers and indexes. A shard is a .safetensors file that stock safetensors can open.

    u64 header length | JSON header, space padded | frames | index

frames  U8 [bytes]  one frame per record (frame.py), without gaps
index   U8 [bytes]  the shards that records here continue, then length, aborted flag and digest of every frame

The index has the digests of all frames, the header has the checksum of the index, and the header's checksum over itself
is the digest of the shard. Each header has exactly one valid byte sequence: a reader renders the header again from the
parsed values and compares the bytes, so it accepts only what a writer could have written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import xxhash

from moe_rl.errors import TraceError
from moe_rl.trace.primitives import Cursor, varint, varint_at
from moe_rl.trace.record import MAX_LAYERS, TraceSpec, check_name, is_int

FORMAT = "moe_rl.routes/2"
SUFFIX = ".safetensors"
MAX_HEADER = 1 << 16
MAX_BLOCK = 1 << 16
MAX_CHUNK = 1 << 24
MAX_RECORDS = 1 << 17
MAX_PARENTS = 1 << 12
MAX_INDEX = 1 << 23
MAX_COUNTS = 1 << 22
MIN_ENTRY = 10

_MAX_BYTES = 1 << 50
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True)
class ShardHeader:
    """Holds everything a header says.

    Attributes:
        layers: global numbers of the shard's layers, increasing; a subset of spec.moe_layers.
        layer_group, token_block: size of a chunk in layers and tokens.
        keep_order: sets keep the order in which they were recorded.
        records, frame_bytes, index_bytes, index_checksum: 0 until the shard is sealed.
    """

    name: str
    spec: TraceSpec
    layers: tuple[int, ...]
    layer_group: int
    token_block: int
    keep_order: bool
    sealed: bool = False
    records: int = 0
    frame_bytes: int = 0
    index_bytes: int = 0
    index_checksum: str = _NO_CHECKSUM

    def __post_init__(self) -> None:
        check_name(self.name)
        layers = self.layers
        if not layers or list(layers) != sorted(set(layers)) or not set(layers) <= set(self.spec.moe_layers):
            raise TraceError(
                "not increasing MoE layers of the model", where={"field": "layers"}, got=str(list(layers))[:80]
            )
        for field, most in (("layer_group", MAX_LAYERS), ("token_block", MAX_BLOCK)):
            size = getattr(self, field)
            if not (is_int(size) and 1 <= size <= most):
                raise TraceError("out of range", where={"field": field}, got=repr(size), expected=f"1 to {most}")
        chunk = self.token_block * min(self.layer_group, len(layers)) * self.spec.top_k * self.spec.dtype.itemsize
        if chunk > MAX_CHUNK:
            raise TraceError(
                f"token_block x layer_group makes chunks of {chunk} bytes, at most {MAX_CHUNK} are allowed"
            )
        if len(layers) * self.spec.num_experts > MAX_COUNTS:
            raise TraceError(f"{len(layers)} layers of {self.spec.num_experts} experts are more than {MAX_COUNTS}")

    @cached_property
    def context(self) -> bytes:
        """Return 8 bytes that frame digests include; they differ between shards whose frames mean different things."""
        spec = self.spec
        fields = [
            FORMAT,
            spec.model_fingerprint,
            spec.num_experts,
            spec.top_k,
            spec.layer_map,
            list(self.layers),
            self.layer_group,
            self.token_block,
            self.keep_order,
        ]
        return xxhash.xxh3_64_digest(json.dumps(fields, separators=(",", ":")).encode("ascii"))

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Return the layer groups as [first, last) positions in `layers`."""
        count = len(self.layers)
        return tuple((first, min(first + self.layer_group, count)) for first in range(0, count, self.layer_group))


class IndexEntry(NamedTuple):
    """Holds one record of the index; a tuple, because an index may have many.

    `start` is the frame's offset from the end of the header. The first `head_bytes` of its `size` bytes are the head.
    """

    start: int
    size: int
    head_bytes: int
    aborted: bool


def header_bytes(header: ShardHeader) -> tuple[bytes, str]:
    """Return the length field and the header, and the shard's digest.

    The size depends only on what is known when a shard is started, so a writer can reserve the space.
    """
    longest = replace(header, sealed=True, records=_MAX_BYTES, frame_bytes=_MAX_BYTES, index_bytes=_MAX_BYTES)
    # With the length field in front, frames begin at a multiple of 64 bytes.
    room = -(-(len(_header_text(longest, _NO_CHECKSUM)) + 8) // 64) * 64 - 8
    body = _header_text(header, _NO_CHECKSUM).ljust(room)
    digest = xxhash.xxh3_64_hexdigest(body.encode("ascii"))
    body = _header_text(header, digest).ljust(room)
    return room.to_bytes(8, "little") + body.encode("ascii"), digest


def _header_text(header: ShardHeader, digest: str) -> str:
    spec, frames, end = header.spec, header.frame_bytes, header.frame_bytes + header.index_bytes
    return json.dumps(
        {
            "__metadata__": {
                "format": FORMAT,
                "shard": header.name,
                "state": "sealed" if header.sealed else "open",
                "model_fingerprint": spec.model_fingerprint,
                "num_experts": str(spec.num_experts),
                "top_k": str(spec.top_k),
                "layer_map": spec.layer_map,
                "layers": ",".join(map(str, header.layers)),
                "layer_group": str(header.layer_group),
                "token_block": str(header.token_block),
                "order": "recorded" if header.keep_order else "ascending",
                "records": str(header.records),
                "index_checksum": header.index_checksum,
                "digest": digest,
            },
            "frames": {"dtype": "U8", "shape": [frames], "data_offsets": [0, frames]},
            "index": {"dtype": "U8", "shape": [header.index_bytes], "data_offsets": [frames, end]},
        },
        separators=(",", ":"),
    )


def parse_header(raw: bytes) -> tuple[ShardHeader, str]:
    """Parse a header; the inverse of header_bytes. Raises TraceError with the fault; the caller adds the place."""
    try:
        parsed = json.loads(raw[8:].decode("ascii"))
        meta = parsed["__metadata__"]
        if meta["format"] != FORMAT:
            raise TraceError(f"it has format {str(meta['format'])[:40]!r}, this version reads {FORMAT!r}")
        spec = TraceSpec(
            meta["model_fingerprint"], _number(meta["num_experts"]), _number(meta["top_k"]), meta["layer_map"]
        )
        header = ShardHeader(
            name=meta["shard"],
            spec=spec,
            layers=tuple(_number(layer) for layer in meta["layers"].split(",")),
            layer_group=_number(meta["layer_group"]),
            token_block=_number(meta["token_block"]),
            keep_order=meta["order"] == "recorded",
            sealed=meta["state"] == "sealed",
            records=_number(meta["records"]),
            frame_bytes=parsed["frames"]["shape"][0],
            index_bytes=parsed["index"]["shape"][0],
            index_checksum=meta["index_checksum"],
        )
        counts = (header.records, header.frame_bytes, header.index_bytes)
        if not all(is_int(count) and 0 <= count <= _MAX_BYTES for count in counts):
            raise TraceError("its header gives impossible sizes")
        canonical, digest = header_bytes(header)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise TraceError(f"its header is not that of a routing shard ({type(error).__name__})") from error
    if canonical != raw:
        raise TraceError("its header is damaged: it is not what a writer would have written")
    return header, digest


def index_bytes(parents: Iterable[str], entries: Iterable[tuple[int, int, bool, bytes]]) -> bytes:
    """Render the index.

    Args:
        parents: names of the shards that records here continue.
        entries: size of a frame, size of its head, aborted flag and digest.
    """
    names = sorted(parents)
    out = bytearray(varint(len(names)))
    for name in names:
        out += varint(len(name)) + name.encode("ascii")
    for size, head_bytes, aborted, digest in entries:
        out += varint(size) + varint(head_bytes << 1 | aborted) + digest
    return bytes(out)


def parse_index(header: ShardHeader, raw: bytes) -> tuple[tuple[str, ...], dict[bytes, IndexEntry]]:
    """Return the parent shards, and the records' entries by digest in file order. Raises TraceError with what is
    wrong."""
    if xxhash.xxh3_64_hexdigest(raw) != header.index_checksum:
        raise TraceError("its index is damaged: the checksum differs")
    if header.records > MAX_RECORDS or header.records * MIN_ENTRY > len(raw):
        raise TraceError("its index does not list its records")
    cursor = Cursor(raw)
    count = cursor.varint()
    if count > MAX_PARENTS:
        raise TraceError("its index does not list its parents")
    parents = tuple(check_name(cursor.text(), "a parent shard of it") for _ in range(count))
    entries: dict[bytes, IndexEntry] = {}
    start, offset = 0, cursor.at
    for _ in range(header.records):
        size, offset = varint_at(raw, offset)
        head, offset = varint_at(raw, offset)
        entries[raw[offset : offset + 8]] = IndexEntry(start, size, head >> 1, bool(head & 1))
        if head >> 1 > size:
            raise TraceError("a frame's header is longer than the frame, according to the index")
        start += size
        offset += 8
    if offset != len(raw) or start != header.frame_bytes:
        raise TraceError("its index does not cover its frames")
    if len(entries) != header.records:
        raise TraceError("its index names a record twice", fault="record twice")
    return parents, entries


def _number(text: str) -> int:
    """Parse a number of few digits only: a hostile header must not keep int() busy for seconds."""
    if not (isinstance(text, str) and len(text) <= 16 and text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
