"""Unsigned LEB128 integers, and a cursor that reads them from a buffer and never past its end."""

from __future__ import annotations

from moe_rl.errors import TraceError

_LONGEST = 9


def varint(value: int) -> bytes:
    """7 bits a byte, least significant first; the high bit says that more follow. value: 0 or more."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_at(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """(value, where the next field begins). Raises TraceError as Cursor does."""
    value = shift = 0
    for byte in data[at : at + _LONGEST]:
        at += 1
        if byte < 128:
            return value | byte << shift, at
        value |= (byte & 127) << shift
        shift += 7
    raise TraceError("a number is too large" if shift == 7 * _LONGEST else "a number is cut short")


class Cursor:
    """Reads forward through `data`. Raises TraceError where the data end too early or a varint is over 63 bits."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes | memoryview, at: int = 0):
        self.data, self.at = data, at

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
