"""What the verifier pool and its workers say to each other: a 4-byte little-endian length, then one msgpack struct."""

from __future__ import annotations

import struct

import msgspec

_LENGTH = struct.Struct("<I")
# A worker answers with a float or a short sentence. A longer frame means that it is out of its mind.
MAX_ANSWER_BYTES = 1 << 20


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Setup(_Frame):
    """Parent, first: what to import, and how much address space the worker may map."""

    sys_path: list[str]
    functions: dict[str, str]
    memory_limit_bytes: int


class Call(_Frame):
    """Parent: call one reward function on one item, with the arguments that it names and no others."""

    item: int
    reward: str
    arguments: dict[str, str]


class Ready(_Frame):
    """Worker: every function is there; these are the arguments each one names."""

    arguments: dict[str, list[str]]


class Refused(_Frame):
    """Worker: reward name -> why its function cannot be used."""

    problems: dict[str, str]


class Started(_Frame):
    """Worker: this call begins now (item -1: the import of this function). Who dies or hangs next is this one."""

    item: int
    reward: str


class Returned(_Frame):
    item: int
    reward: str
    value: float


class Failed(_Frame):
    item: int
    reward: str
    detail: str


Answer = Ready | Refused | Started | Returned | Failed

encode_body = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Setup | Call).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def encode(frame: _Frame) -> bytes:
    body = encode_body(frame)
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    return _LENGTH.unpack(header)[0]


class AnswerBuffer:
    """Cuts the bytes that a worker sent into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Answer]:
        """Frames completed by `data`. Raises ValueError (msgspec's errors are ValueErrors) if they make no sense."""
        self._bytes += data
        frames, at = [], 0
        while len(self._bytes) - at >= _LENGTH.size:
            start = at + _LENGTH.size
            length = length_of(self._bytes[at:start])
            if length > MAX_ANSWER_BYTES:
                raise ValueError(f"a frame of {length} bytes, at most {MAX_ANSWER_BYTES} expected")
            if len(self._bytes) - start < length:
                break
            frames.append(_decode_answer(self._bytes[start : start + length]))
            at = start + length
        del self._bytes[:at]
        return frames
