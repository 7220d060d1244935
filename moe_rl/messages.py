"""Values as msgpack, read back by their declared type, never pickled: between ranks, on disk and between processes.

Dataclasses, structs, containers, numbers and paths; arrays are float32 [n]. Between two processes a value goes over a
stream socket as a frame: eight bytes of length, little-endian, and that much msgpack.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from moe_rl.errors import describe

# What a reward function may ask for, by name: the fields of tasks.verifiers.RewardItem.
REWARD_ARGUMENTS = ("prompt", "completion", "answer", "finish_reason", "stop_token_id")


def unknown_argument(function: str, parameter: str) -> str:
    """Say that a reward function asks for a parameter that it is not given."""
    return (
        f"{function} has the parameter {parameter!r}: expected only {', '.join(REWARD_ARGUMENTS)}, given by name. "
        "Rename it or give it a default"
    )


_HEADER_BYTES = 8
_LONGEST_FRAME = 1 << 30


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of what goes over a socket; the class name is the tag."""


def encode(value: object) -> bytes:
    """Raises TypeError for a value of a kind that cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_to_plain)


def decode[T](payload: bytes, kind: type[T]) -> T:
    """The value that `encode` was given. kind: its type. Raises msgspec.MsgspecError when it is anything else."""
    return msgspec.msgpack.decode(payload, type=kind, dec_hook=_from_plain)


def decoder(kind: Any) -> msgspec.msgpack.Decoder:
    """A decoder for `Channel`. kind: a union of Messages, which no annotation can name: whoever keeps it says which.

    Make it while a module is imported, by one thread: msgspec dies when two threads are the first to decode a type.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


class Channel[Incoming: Message]:
    """One end of a stream socket that carries frames. It waits for as long as the socket's own timeout says.

    incoming: what the other end may say, made by `decoder`. longest: bytes of a frame; a longer one is refused before
    any of it is read.
    """

    def __init__(self, end: socket.socket, incoming: msgspec.msgpack.Decoder[Incoming], longest: int = _LONGEST_FRAME):
        self.socket = end
        self._incoming = incoming
        self._longest = longest
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Send one message behind whatever is unsent.

        Raises OSError when the other end is gone; TimeoutError or BlockingIOError when it does not read: what is left
        is then kept for `flush`. Raises TypeError or ValueError, and sends nothing, for what has no msgpack.
        """
        payload = encode(message)
        self._unsent += len(payload).to_bytes(_HEADER_BYTES, "little") + payload
        self.flush()

    def flush(self) -> None:
        """Send what is unsent. Raises as `send`."""
        while self._unsent:
            del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> Incoming:
        """The next message. Never reads behind its end: what follows stays in the socket.

        Raises EOFError when the other end closed, OSError when it is gone, ValueError for a frame that is too long or
        no message of these; TimeoutError or BlockingIOError when the frame is not whole yet: what came is kept.
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
        """Bytes to wait for: the rest of the header, then the rest of the frame."""
        if len(self._received) < _HEADER_BYTES:
            return _HEADER_BYTES - len(self._received)
        length = int.from_bytes(self._received[:_HEADER_BYTES], "little")
        if length > self._longest:
            raise ValueError(
                describe("a frame is too long", got=f"{length} bytes", expected=f"at most {self._longest}")
            )
        return _HEADER_BYTES + length - len(self._received)


# numpy is imported by those who send or receive arrays: a verifier process starts faster without it.


def _to_plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
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
