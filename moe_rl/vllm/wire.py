"""What the trainer and the engine process say to each other: typed frames over a socket pair, never pickled.

A frame is eight bytes of length, little-endian, and that much MessagePack of one of the structs below.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_rl.types import GenerateRequest, RouteRef
from moe_rl.weights.update import WeightUpdate

_LONGEST_FRAME = 1 << 30

SLEEPING_PARTS = ("weights", "kv_cache")
"""What an engine gives back while it sleeps, in the order in which it is taken back. vLLM's own tags."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with.

    model_path: Hugging Face checkpoint folder; its weights are version 0. dtype: "bfloat16" or "float32".
    max_model_len: prompt + completion, in tokens. max_concurrent: sequences decoded at once. trace_root: folder of the
    trace store, None turns recording off. log_path: gets all output of the engine's process. silence_seconds: an engine
    that makes no progress in a call for so long is taken for hung and killed. support to router_logits_fraction: as in
    recording.Recording. sleeps: whether it will be told to.
    """

    model_path: Path
    dtype: str
    max_model_len: int
    max_concurrent: int
    kv_cache_mib: int
    trace_root: Path | None
    model_fingerprint: str
    log_path: Path
    startup_timeout_seconds: float
    seed: int
    silence_seconds: float = 60.0
    capture: str = "patch"
    support: bool = False
    log_normalizer: bool = False
    router_logits_fraction: float = 0.0
    sleeps: bool = False


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all frames; the class name is the tag."""


class Start(Message):
    """First frame to the engine."""

    settings: EngineSettings


class Generate(Message):
    """enough: completions after which the others are aborted; None: all are sampled to their end."""

    requests: list[GenerateRequest]
    shard: str
    enough: int | None


class Score(Message):
    token_ids: list[int]


class Update(Message):
    update: WeightUpdate


class Sleep(Message):
    level: int


class Wake(Message):
    part: str


class Close(Message):
    pass


class Ready(Message):
    vllm_version: str


class Alive(Message):
    """Sent while a call is worked on, whenever the engine got ahead: a step done, a tensor loaded."""


class Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One completion. logprobs: raw little-endian float32, one a token."""

    token_ids: list[int]
    logprobs: bytes
    finish_reason: str
    weight_version: int
    routes: RouteRef | None


class Generated(Message):
    completions: list[Sampled]


class Scored(Message):
    """logprobs: raw little-endian float32."""

    logprobs: bytes


class Updated(Message):
    pass


class Slept(Message):
    """gives_back: whether there was memory to give back."""

    gives_back: bool


class Awake(Message):
    pass


class Failed(Message):
    """The call failed. weights: for what the weights are, or were to be."""

    message: str
    weights: bool = False


Call = Start | Generate | Score | Update | Sleep | Wake | Close
Reply = Ready | Alive | Generated | Scored | Updated | Slept | Awake | Failed
# Made by the thread that imports: msgspec dies when two threads are the first to decode into a type.
# Paths, which MessagePack does not know, are strings on the way.
_DECODERS = {kind: msgspec.msgpack.Decoder(kind, dec_hook=lambda path, text: path(text)) for kind in (Call, Reply)}


class Channel:
    """One end. incoming: Call or Reply. Sending and receiving block for as long as the socket's own timeout says."""

    def __init__(self, end: socket.socket, incoming: type):
        self.socket = end
        self._encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)
        self._decoder = _DECODERS[incoming]
        self._buffer = bytearray()

    def send(self, message: Message) -> None:
        """Raises OSError (TimeoutError among them) when the other end is gone or does not read."""
        frame = self._encoder.encode(message)
        self.socket.sendall(len(frame).to_bytes(8, "little") + frame)

    def receive(self):
        """The next frame. Raises EOFError at the end, TimeoutError keeping what came, ValueError on garbage."""
        while True:
            if len(self._buffer) >= 8:
                length = int.from_bytes(self._buffer[:8], "little")
                if length > _LONGEST_FRAME:
                    raise ValueError(f"a frame of {length} bytes")
                if len(self._buffer) >= 8 + length:
                    frame = bytes(self._buffer[8 : 8 + length])
                    del self._buffer[: 8 + length]
                    return self._decoder.decode(frame)
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("the other end closed")
            self._buffer += data
