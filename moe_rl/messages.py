"""Encodes values as msgpack and decodes them by their declared type, never by pickle.

Used between ranks, between processes and on disk. Values are dataclasses, msgspec structs, containers, numbers, paths
and float32 vectors [n]. Over a stream socket, each value is one frame: its length in 8 bytes, little-endian, then the
msgpack bytes.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from moe_rl.errors import Problem, describe

_HEADER_BYTES = 8
_LONGEST_FRAME = 1 << 30


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Serves as base class of everything sent over a socket. msgpack tags each message with its class name."""


def encode(value: object) -> bytes:
    """Encode a value as msgpack. Raises TypeError for a type that cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_to_plain)


def decode[T](payload: bytes, kind: type[T]) -> T:
    """Decode msgpack bytes into a value of type `kind`. Raises msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.decode(payload, type=kind, dec_hook=_from_plain)


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """Return a decoder for `Channel`. `kind` is a union of Messages, which type annotations cannot express here.

    Call this at import time, from one thread: msgspec crashes when two threads decode a new type at the same time.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


class Channel[Incoming: Message]:
    """Sends and receives frames over a stream socket. The socket's timeout limits the wait.

    Args:
        end: the socket.
        incoming: decoder for the messages of the other end, made by `decoder`.
        longest: largest frame in bytes; a longer one is refused before its body is read.
    """

    def __init__(self, end: socket.socket, incoming: msgspec.msgpack.Decoder[Incoming], longest: int = _LONGEST_FRAME):
        self.socket = end
        self._incoming = incoming
        self._longest = longest
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Send one message after any unsent bytes.

        Raises:
            OSError: the other end is gone.
            TimeoutError, BlockingIOError: the other end does not read; `flush` can send the rest later.
            TypeError, ValueError: the message cannot be encoded; nothing is sent.
        """
        payload = encode(message)
        self._unsent += len(payload).to_bytes(_HEADER_BYTES, "little") + payload
        self.flush()

    def flush(self) -> None:
        """Send the unsent bytes. Raises as `send` does."""
        while self._unsent:
            del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> Incoming:
        """Return the next message, without reading past its end.

        Raises:
            EOFError: the other end closed the socket.
            OSError: the other end is gone.
            ValueError: the frame is too long, or is not one of the expected messages.
            TimeoutError, BlockingIOError: the frame is incomplete; the bytes received so far are kept.
        """
        while missing := self._missing():
            data = self.socket.recv(min(missing, 1 << 20))
            if not data:
                begun = f"{len(self._received)} bytes of a frame" if self._received else None
                raise EOFError(describe("the other end closed", got=begun))
            self._received += data
        frame, self._received = self._received, bytearray()
        return self._incoming.decode(memoryview(frame)[_HEADER_BYTES:])

    def _missing(self) -> int:
        """Return how many bytes are missing: from the header first, then from the body."""
        if len(self._received) < _HEADER_BYTES:
            return _HEADER_BYTES - len(self._received)
        length = int.from_bytes(self._received[:_HEADER_BYTES], "little")
        if length > self._longest:
            raise ValueError(
                describe("a frame is too long", got=f"{length} bytes", expected=f"at most {self._longest}")
            )
        return _HEADER_BYTES + length - len(self._received)


# numpy is imported only where arrays are sent or received: a verifier process starts faster without it.


def _to_plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Problem):
        return str(value)
    import numpy as np

    if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 1:
        return value.tobytes()
    raise TypeError(describe(f"{type(value).__name__} cannot be sent", expected="a float32 vector"))


def _from_plain(kind: Any, value: Any) -> object:
    if issubclass(kind, os.PathLike):
        return kind(value)
    import numpy as np

    if kind is np.ndarray:
        return np.frombuffer(value, dtype=np.float32)
    raise TypeError(describe(f"{kind} cannot be received"))
