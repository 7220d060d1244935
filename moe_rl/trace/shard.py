"""The shard file: a .safetensors file that stock safetensors opens, with one canonical byte sequence for its header.

    u64 header length | JSON header, space padded | routes | index | keys

routes  U8 or U16 [rows, L, K]  every record's rows, one record after the other: where a record lies follows from the
                                row counts before it, so records can neither overlap nor leave gaps
index   U8 [records, 30]        INDEX, one entry per record
keys    U8 [bytes]              the records' keys, one after the other

Each record has its own checksum (record.record_checksum); index and keys have one in the header; the header has one
over itself. A reader renders the header again from what it parsed and compares bytes, so nothing in a header is trusted
that a writer would not have written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import xxhash

from moe_rl.errors import TraceError
from moe_rl.trace.record import TraceSpec, check_key

FORMAT = "moe_rl.routes/1"
SUFFIX = ".safetensors"
MAX_HEADER = 1 << 16
INDEX = np.dtype(
    [("checksum", "<u8"), ("token_digest", "<u8"), ("weight_version", "<i8"), ("rows", "<u4"), ("key_bytes", "<u2")]
)

_MAX_COUNT = 1 << 40
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a header says; rows, records and key_bytes are totals of the shard."""

    shard: str
    spec: TraceSpec
    rows: int
    records: int
    key_bytes: int
    index_checksum: str

    @property
    def index_start(self) -> int:
        """Bytes from the end of the header to the index."""
        return self.rows * self.spec.row_bytes

    @property
    def data_bytes(self) -> int:
        return self.index_start + self.records * INDEX.itemsize + self.key_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One record as the index has it. start: bytes from the end of the header."""

    start: int
    rows: int
    token_digest: int
    weight_version: int
    checksum: int


def header_bytes(layout: Layout) -> bytes:
    """The length field and the header. Its size depends on shard name and spec only: a writer can leave room for it."""
    text = _header_text(layout, _NO_CHECKSUM)
    room = _room(layout)
    body = text.ljust(room)
    checksum = xxhash.xxh3_64_hexdigest(body.encode("ascii"))
    body = _header_text(layout, checksum).ljust(room)
    return room.to_bytes(8, "little") + body.encode("ascii")


def _room(layout: Layout) -> int:
    largest = Layout(layout.shard, layout.spec, _MAX_COUNT, _MAX_COUNT, _MAX_COUNT, _NO_CHECKSUM)
    return -(-len(_header_text(largest, _NO_CHECKSUM)) // 8) * 8


def _header_text(layout: Layout, checksum: str) -> str:
    spec, index, end = layout.spec, layout.index_start, layout.data_bytes
    keys = end - layout.key_bytes
    return json.dumps(
        {
            "__metadata__": {
                "format": FORMAT,
                "shard": layout.shard,
                "model_fingerprint": spec.model_fingerprint,
                "num_experts": str(spec.num_experts),
                "top_k": str(spec.top_k),
                "moe_layers": ",".join(map(str, spec.moe_layers)),
                "index_checksum": layout.index_checksum,
                "header_checksum": checksum,
            },
            "routes": {
                "dtype": "U8" if spec.dtype.itemsize == 1 else "U16",
                "shape": [layout.rows, *spec.row_shape],
                "data_offsets": [0, index],
            },
            "index": {"dtype": "U8", "shape": [layout.records, INDEX.itemsize], "data_offsets": [index, keys]},
            "keys": {"dtype": "U8", "shape": [layout.key_bytes], "data_offsets": [keys, end]},
        },
        separators=(",", ":"),
    )


def parse_header(raw: bytes) -> Layout:
    """The inverse of header_bytes. Raises TraceError saying what is wrong; the caller adds where."""
    try:
        header = json.loads(raw[8:].decode("ascii"))
        meta = header["__metadata__"]
        if meta["format"] != FORMAT:
            raise TraceError(f"it has format {str(meta['format'])[:40]!r}, this version reads {FORMAT!r}")
        spec = TraceSpec(
            model_fingerprint=meta["model_fingerprint"],
            num_experts=int(meta["num_experts"]),
            top_k=int(meta["top_k"]),
            moe_layers=tuple(int(layer) for layer in meta["moe_layers"].split(",")),
        )
        counts = (header["routes"]["shape"][0], header["index"]["shape"][0], header["keys"]["shape"][0])
        if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
            raise TraceError("its header gives impossible sizes")
        layout = Layout(meta["shard"], spec, *counts, meta["index_checksum"])
        canonical = header_bytes(layout)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise TraceError(f"its header is not that of a routing shard ({type(error).__name__})") from error
    if canonical != raw:
        raise TraceError("its header is damaged: it is not what a writer would have written")
    return layout


def parse_index(layout: Layout, raw: bytes) -> dict[str, Entry]:
    """Index and keys, as they lie in the file, to one Entry per key. Raises TraceError saying what is wrong."""
    if xxhash.xxh3_64_hexdigest(raw) != layout.index_checksum:
        raise TraceError("its index is damaged: the checksum differs")
    index = np.frombuffer(raw, INDEX, layout.records)
    text = raw[layout.records * INDEX.itemsize :].decode("latin-1")  # check_key refuses what is not ASCII
    rows, key_bytes = index["rows"].tolist(), index["key_bytes"].tolist()
    if sum(rows) != layout.rows or sum(key_bytes) != layout.key_bytes:
        raise TraceError("its index does not cover its records")
    keys = [check_key(text[a:b], "a record key of it") for a, b in pairwise(accumulate(key_bytes, initial=0))]
    starts = accumulate((n * layout.spec.row_bytes for n in rows), initial=0)
    columns = (index[name].tolist() for name in ("token_digest", "weight_version", "checksum"))
    entries = {key: Entry(*fields) for key, *fields in zip(keys, starts, rows, *columns, strict=False)}
    if len(entries) != layout.records:
        raise TraceError("its index names a record twice")
    return entries
