"""Small integers and plain bytes, packed: zstd where it is smaller. What comes out is bounded by the caller."""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from moe_rl.errors import TraceError

_LEVEL = 3
_local = threading.local()  # zstandard's objects are not for several threads at once


def pack_bytes(raw: bytes) -> tuple[bool, bytes]:
    """(zstd or not, the smaller form)."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    packed = _local.compressor.compress(raw)
    return (True, packed) if len(packed) < len(raw) else (False, raw)


def unpack_bytes(zstd: bool, data: bytes | memoryview, size: int) -> bytes:
    """The inverse; `size` bytes exactly, or TraceError. Allocates no more than that, whatever the data claim."""
    if zstd:
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        try:
            if zstandard.frame_content_size(data) != size:
                raise TraceError("packed data are of another size than their record says")
            data = _local.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise TraceError(f"packed data are malformed ({error})") from error
    if len(data) != size:
        raise TraceError("packed data are of another size than their record says")
    return bytes(data)


def pack_ints(values: np.ndarray) -> tuple[int, bytes]:
    """(kind, data) of integers in [0, 2**32). kind, 0 to 7: bytes per integer - 1, plus 4 when zstd.

    Not zstd: little-endian integers of that width. Zstd: the same bytes as planes, all low bytes first; of token ids
    the high planes nearly vanish.
    """
    top = int(values.max(initial=0))
    width = max(1, (top.bit_length() + 7) // 8)
    split = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(-1, 4)[:, :width]
    plain = split.tobytes()
    zstd, planes = pack_bytes(split.T.tobytes())
    return (width - 1 | 4, planes) if zstd else (width - 1, plain)


def unpack_ints(kind: int, data: bytes | memoryview, count: int) -> np.ndarray:
    """The inverse: uint32 [count], or TraceError."""
    width = (kind & 3) + 1
    raw = np.frombuffer(unpack_bytes(bool(kind & 4), data, count * width), np.uint8)
    split = np.zeros((count, 4), np.uint8)
    split[:, :width] = raw.reshape(width, count).T if kind & 4 else raw.reshape(count, width)
    return split.view("<u4").reshape(count)
