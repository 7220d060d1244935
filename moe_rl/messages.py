"""Values as bytes, between ranks and on disk: msgpack, read back by their declared type, never pickled.

Dataclasses, containers and numbers; arrays are float32 [n].
"""

from __future__ import annotations

import msgspec
import numpy as np

from moe_rl.errors import describe


def encode(message: object) -> bytes:
    """Raises TypeError for a value of a kind that cannot be sent."""
    return msgspec.msgpack.encode(message, enc_hook=_array_to_bytes)


def decode(payload: bytes, kind: type) -> object:
    """The value that `encode` was given. kind: its type. Raises msgspec.MsgspecError when it is anything else."""
    return msgspec.msgpack.decode(payload, type=kind, dec_hook=_bytes_to_array)


def _array_to_bytes(value):
    if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 1:
        return value.tobytes()
    raise TypeError(describe(f"{type(value).__name__} cannot be sent to other ranks", expected="a float32 vector"))


def _bytes_to_array(kind, value):
    if kind is np.ndarray:
        return np.frombuffer(value, dtype=np.float32)
    raise TypeError(describe(f"{kind} cannot be received"))
