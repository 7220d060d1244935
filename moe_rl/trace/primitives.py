"""Encodes the parts of the format: varints, lists of small numbers, and bytes (with zstd where that is smaller).

The size that the caller expects bounds the decoded size, whatever the data claim.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from moe_rl.errors import TraceError

# Longest varint in bytes: 63 bits.
_LONGEST = 9


class _Zstd(threading.local):
    """Holds zstd's contexts per thread: they are costly to create and must not be shared between threads."""

    def __init__(self) -> None:
        self.sized = zstandard.ZstdCompressor(level=3, write_content_size=True)
        self.unsized = zstandard.ZstdCompressor(level=1, write_content_size=False)
        # These bytes hardly repeat: searching for few matches is faster, and Huffman codes alone are shorter.
        self.blocks = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1, min_match=7, hash_log=6, write_content_size=False
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()


ZSTD = _Zstd()


def varint(value: int) -> bytes:
    """Encode an integer >= 0 with 7 bits a byte, least significant first; the high bit means that more bytes follow."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_at(data: bytes | memoryview, offset: int) -> tuple[int, int]:
    """Return (value, offset of the next field). Raises TraceError as Cursor does."""
    value = shift = 0
    for byte in data[offset : offset + _LONGEST]:
        offset += 1
        if byte < 128:
            return value | byte << shift, offset
        value |= (byte & 127) << shift
        shift += 7
    raise TraceError("a number is too large" if shift == 7 * _LONGEST else "a number is cut short")


class Cursor:
    """Reads forward through `data`. Raises TraceError if the data end too early or a varint exceeds 63 bits."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes | memoryview, start: int = 0):
        self.data, self.at = data, start

    def varint(self) -> int:
        value, self.at = varint_at(self.data, self.at)
        return value

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise TraceError(f"a field of {size} bytes is cut short")
        piece = bytes(self.data[self.at : self.at + size])
        self.at += size
        return piece

    def text(self) -> str:
        return self.take(self.varint()).decode("latin-1")  # callers check the characters

    @property
    def done(self) -> bool:
        return self.at == len(self.data)


def pack_bytes(raw: bytes) -> tuple[bool, bytes]:
    """Return (whether zstd was used, the smaller form)."""
    packed = ZSTD.sized.compress(raw)
    return (True, packed) if len(packed) < len(raw) else (False, raw)


def unpack_bytes(zstd: bool, data: bytes | memoryview, size: int) -> bytes:
    """Return exactly `size` bytes from pack_bytes' result, or raise TraceError. Never allocates more than `size`."""
    if zstd:
        try:
            if zstandard.frame_content_size(data) != size:
                raise TraceError("packed data have another size than their record says")
            data = ZSTD.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise TraceError(f"packed data are malformed ({error})") from error
    if len(data) != size:
        raise TraceError("packed data have another size than their record says")
    return bytes(data)


def pack_ints(values: np.ndarray) -> tuple[int, bytes]:
    """Pack integers in [0, 2**32) and return (kind, data).

    kind is the bytes per integer - 1, plus 4 with zstd: 0 to 7. Without zstd, data are little-endian integers of that
    width. With zstd the bytes are grouped in planes, all low bytes first; the high planes of token ids nearly vanish.
    """
    top = int(values.max(initial=0))
    width = max(1, (top.bit_length() + 7) // 8)
    split = np.ascontiguousarray(values, "<u4").view(np.uint8).reshape(-1, 4)[:, :width]
    zstd, planes = pack_bytes(split.T.tobytes())
    return (width - 1 | 4, planes) if zstd else (width - 1, split.tobytes())


def unpack_ints(kind: int, data: bytes | memoryview, count: int) -> np.ndarray:
    """Return uint32 [count] from pack_ints' result, or raise TraceError."""
    width = (kind & 3) + 1
    raw = np.frombuffer(unpack_bytes(bool(kind & 4), data, count * width), np.uint8)
    split = np.zeros((count, 4), np.uint8)
    split[:, :width] = raw.reshape(width, count).T if kind & 4 else raw.reshape(count, width)
    return split.view("<u4").reshape(count)
